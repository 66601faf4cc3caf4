"""The contract against the oracle, under any cut of the text."""

import oracle
import pytest
import torch
from conftest import (
    ROUNDING,
    WINDOW,
    assert_close,
    generate,
    greedy_by_oracle,
    in_chunks,
    logits_of,
    random_ids,
    tiny_llama,
)
from transformers import DynamicCache

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.rotated import RotatedKeys

STEPS = [1, 7, None]  # None: the default, 1 for a window of 32


class TestOracle:
    @pytest.mark.parametrize("layers", [1, 3])
    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 90])
    def test_uncached_and_cached_logits(self, layers, step, length):
        model, ids = tiny_llama(num_hidden_layers=layers).double(), random_ids(length)
        expected = oracle.llama_logits(model, ids[0].tolist(), WINDOW, step or 1)
        patch_llama(model, rescale_every=step)
        assert_close(logits_of(model, ids, use_cache=False)[0], expected)
        assert_close(in_chunks(model, ids, 1)[0], expected)

    def test_plain_rope_knows_the_stock_model(self, model):
        """The oracle itself is right: with no window to outgrow, it is the stock model."""
        model.double()
        ids = random_ids(90)
        expected = oracle.llama_logits(model, ids[0].tolist(), oracle.PLAIN, 1)
        assert_close(logits_of(model, ids)[0], expected)

    @pytest.mark.parametrize("step", [1, 7])
    def test_greedy_tokens(self, step):
        model, prompt = tiny_llama(num_hidden_layers=1), random_ids(25)
        expected = greedy_by_oracle(model, prompt[0], 30, step)
        patch_llama(model, rescale_every=step)
        assert torch.equal(generate(model, prompt, DynamicYaRNCache(), 30)[0], expected)

    def test_options_reach_the_model(self, model):
        model.double()
        ids = random_ids(100)
        options = {"max_scale": 2.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
        expected = oracle.llama_logits(
            model, ids[0].tolist(), 24, 5, attention_factor=1.05, **options
        )
        patch_llama(
            model,
            original_max_position_embeddings=24,
            rescale_every=5,
            attention_factor=1.05,
            **options,
        )
        assert_close(in_chunks(model, ids, 9)[0], expected)


def stale_logits(model, ids):
    """Token by token, each key rotated once and for all at the scale of its own time."""
    advance = RotatedKeys.advance

    def never_again(self, keys, first, last, scales, *how):
        self._scales = scales if self._last else []
        return advance(self, keys, first, last, scales, *how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RotatedKeys, "advance", never_again)
        return in_chunks(model, ids, 1)


class TestTeeth:
    """The figures that the tests above tell apart."""

    def test_stale_keys_are_far_off(self, model):
        """What exists without this package: keys cached as rotated at the scale of their time."""
        ids = random_ids(90)
        patch_llama(model)
        exact = logits_of(model, ids, use_cache=False)
        stale = stale_logits(model, ids)
        assert_close(stale[:, :WINDOW], exact[:, :WINDOW])
        assert (stale - exact)[:, 60:].abs().max() > 1000 * ROUNDING

    def test_one_scale_per_call_is_far_off(self, model):
        """Un-rotated keys alone, with the paper's scale per forward call."""
        ids = random_ids(90)
        patch_llama(model)
        exact = logits_of(model, ids, use_cache=False)
        patch_llama(model, schedule="forward")
        cut = in_chunks(model, ids, [60, 30])
        assert (cut - exact)[:, :60].abs().max() > 1000 * ROUNDING
        whole = logits_of(model, ids, use_cache=False)
        assert (cut - whole).abs().max() > 1000 * ROUNDING


class TestAnyCut:
    @pytest.mark.parametrize("step", STEPS)
    def test_every_cut_in_two(self, model, step):
        ids = random_ids(70)
        patch_llama(model, rescale_every=step)
        whole = logits_of(model, ids, use_cache=False)
        for cut in range(1, 70):
            assert_close(in_chunks(model, ids, [cut, 70 - cut]), whole)

    @pytest.mark.parametrize("size", [1, 3, 16, 32, 33, 64])
    def test_chunks(self, model, new_cache, size):
        ids = random_ids(100, rows=2)
        patch_llama(model, rescale_every=7)
        whole = logits_of(model, ids, use_cache=False)
        assert_close(in_chunks(model, ids, size, new_cache()), whole)

    def test_exactly_in_float64(self, model):
        ids = random_ids(80)
        patch_llama(model.double())
        whole = logits_of(model, ids, use_cache=False)
        assert_close(in_chunks(model, ids, [30, 1, 1, 20, 28]), whole, tolerance=1e-12)

    @pytest.mark.parametrize("length", [WINDOW - 1, WINDOW])
    def test_up_to_the_window_is_the_stock_model_bit_for_bit(self, model, length):
        ids = random_ids(length)
        stock = logits_of(model, ids, DynamicCache())
        patch_llama(model)
        assert torch.equal(logits_of(model, ids, DynamicYaRNCache()), stock)

    def test_a_long_text_leaves_no_trace(self, model):
        ids = random_ids(20)
        stock = generate(model, ids, new_tokens=12)
        patch_llama(model)
        generate(model, random_ids(90, seed=1))
        assert torch.equal(generate(model, ids, new_tokens=12), stock)

    def test_prefill_chunk_size(self, model):
        prompt = random_ids(50)
        patch_llama(model)
        expected = generate(model, prompt, use_cache=False)
        for size in (7, 32, 49):
            cache = DynamicYaRNCache()  # transformers 5.0 makes none of its own here
            assert torch.equal(generate(model, prompt, cache, prefill_chunk_size=size), expected)
