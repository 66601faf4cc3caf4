"""A call that fails leaves the cache as it was."""

import copy

import pytest
import torch
from conftest import assert_close, generate, logits_of, random_ids, tiny_llama

from hf_dynyarn import DynamicYaRNCache, patch_llama, rotated

LONG = random_ids(70)


class TestAFailedCallLeavesTheCacheAsItWas:
    """The next correct call on the cache is right."""

    @pytest.fixture(params=[0, 50], ids=["empty", "filled"])
    def case(self, request, model):
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        if request.param:
            logits_of(model, LONG[:, : request.param], cache)
        yield model, cache
        assert cache.get_seq_length() == request.param
        rest = logits_of(model, LONG[:, request.param :], cache)
        assert_close(rest, logits_of(model, LONG, use_cache=False)[:, request.param :])

    def test_another_batch(self, case):
        model, cache = case
        if cache.get_seq_length():
            with pytest.raises(
                ValueError, match=r"batch size of the cache, 1, got 2.*batch_repeat_interleave"
            ):
                logits_of(model, random_ids(3, rows=2), cache)

    def test_another_dtype(self, case):
        model, cache = case
        if cache.get_seq_length():
            other = copy.deepcopy(model).to(torch.bfloat16)
            with pytest.raises(ValueError, match=r"dtype.*float32.*got.*bfloat16"):
                logits_of(other, LONG[:, :3], cache)

    def test_other_heads(self, case):
        _, cache = case
        if cache.get_seq_length():
            other = tiny_llama(num_key_value_heads=4)
            patch_llama(other, rescale_every=7)
            with pytest.raises(ValueError, match=r"with 2 heads of 16 .*got 4 of 16"):
                logits_of(other, LONG[:, :3], cache)

    @pytest.mark.parametrize(
        ("kwargs", "error", "match"),
        [
            (
                {"attention_mask": torch.ones(1, 2)},
                ValueError,
                r"attention_mask must be .* got \(1, 2\)",
            ),
            ({"attention_mask": torch.ones(1, 1, 2, 2)}, ValueError, "attention_mask must be"),
            ({"attention_mask": [[1, 1, 1]]}, TypeError, "attention_mask must be a torch.Tensor"),
            (
                {"position_ids": torch.zeros(1, 2).long()},
                ValueError,
                r"position_ids must be .* got \(1, 2\)",
            ),
            ({"position_ids": torch.zeros(1, 3)}, TypeError, "position_ids must be an integer"),
            ({"position_ids": torch.tensor([[-3, -2, -1]])}, ValueError, "position_ids must"),
        ],
        ids=["short mask", "4-D mask", "list", "short ids", "float ids", "negative ids"],
    )
    def test_bad_arguments(self, case, kwargs, error, match):
        model, cache = case
        with pytest.raises(error, match=match):
            logits_of(model, LONG[:, :3], cache, **kwargs)

    def test_an_integer_4d_mask(self, case):
        model, cache = case
        mask = torch.ones(1, 1, 3, cache.get_seq_length() + 3, dtype=torch.long)
        with pytest.raises(TypeError, match=r"bool or floating point, got torch.int64"):
            logits_of(model, LONG[:, :3], cache, attention_mask=mask)

    def test_a_mask_that_shows_padding(self, case):
        model, cache = case
        if cache.get_seq_length():
            padded, ids = DynamicYaRNCache(), random_ids(50, rows=2)
            mask = torch.ones(2, 50)
            mask[0, :9] = 0
            logits_of(model, ids, padded, attention_mask=mask)
            with pytest.raises(ValueError, match="got one that shows padding"):
                logits_of(model, ids[:, :1], padded, attention_mask=torch.ones(2, 51))
            with pytest.raises(
                ValueError, match=r"got one that shows padding|go on from the tokens"
            ):
                generate(model, torch.cat((ids, ids[:, :1]), 1), padded)

    @pytest.mark.parametrize(
        "kwargs",
        [{"is_causal": False}, {"cu_seq_lens_q": torch.tensor([0, 2]).int()}],
        ids=["is_causal", "cu_seq_lens"],
    )
    def test_keywords_of_kernels(self, case, kwargs):
        model, cache = case
        with pytest.raises(ValueError, match=r"is_causal=False|position_ids tell documents"):
            logits_of(model, LONG[:, :3], cache, **kwargs)

    def test_positions_that_leave_a_gap(self, case):
        model, cache = case
        if cache.get_seq_length():
            with pytest.raises(
                ValueError, match=r"go on from the tokens in the cache, at \[50\].* got \[53\]"
            ):
                logits_of(model, LONG[:, :1], cache, position_ids=torch.tensor([[53]]))

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("layer", [0, 1, 2])
    def test_an_error_half_way(self, case, error, layer):
        model, cache = case

        def fail(*_):
            raise error("half way")

        hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
        with pytest.raises(error, match="half way"):
            logits_of(model, LONG[:, :9], cache)
        hook.remove()

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_error_closes_the_cache_to_unpatched_models(self, case, error):
        """Even where somebody keeps the exception, and the failed call's frames with it."""
        model, cache = case

        def fail(*_):
            raise error("half way")

        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(error) as kept:
            logits_of(model, LONG[:, :9], cache)
        hook.remove()
        with pytest.raises(TypeError, match="patched model"):
            logits_of(tiny_llama(), LONG[:, :9], cache)
        assert kept

    @pytest.mark.parametrize("at", range(9))
    def test_an_interrupt_while_keys_are_rotated(self, case, at, monkeypatch):
        """The rotated copy must not be taken for whole."""
        model, cache = case
        monkeypatch.setattr(rotated, "ROTATED_AT_A_TIME", 8)
        rotate, calls = rotated.rotate, []

        def interrupted(*args, **kwargs):
            calls.append(None)
            if len(calls) == at + 1:
                raise KeyboardInterrupt
            return rotate(*args, **kwargs)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(rotated, "rotate", interrupted)
            logits_of(model, random_ids(20, seed=5), cache)

    def test_operations_after_a_failure(self, case):
        model, cache = case

        def fail(*_):
            raise RuntimeError

        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError):
            logits_of(model, LONG[:, :9], cache)
        hook.remove()
        cache.reorder_cache(torch.tensor([0]))
        assert copy.deepcopy(cache).get_seq_length() == cache.get_seq_length()
