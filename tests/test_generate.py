"""The contract in every way people generate, against the oracle and each row's solo run."""

import copy
import pickle
import threading
from functools import partial

import oracle
import pytest
import torch
from conftest import (
    CACHE,
    ROUNDING,
    WINDOW,
    assert_close,
    generate,
    left_padded,
    logits_of,
    random_ids,
    tiny_llama,
)
from transformers import DynamicCache, TextStreamer

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.layers import RotatedKeys

STEPS = [1, 7, None]  # None: the default, 1 for a window of 32


@pytest.fixture(params=[True, False], ids=["rotated copy", "no copy"])
def new_cache(request):
    """Makes caches with or without a rotated copy, which must not differ in anything but cost."""
    return partial(DynamicYaRNCache, rotated_copy=request.param)


def in_chunks(model, ids, sizes, cache=None, **kwargs):
    """Logits of all of `ids`, fed to one cache in chunks of these sizes."""
    cache = DynamicYaRNCache() if cache is None else cache
    return torch.cat(
        [logits_of(model, chunk, cache, **kwargs) for chunk in ids.split(sizes, dim=1)], 1
    )


def greedy_by_oracle(model, prompt, new_tokens, step):
    tokens = prompt.tolist()
    for _ in range(new_tokens):
        tokens.append(int(oracle.llama_logits(model, tokens, WINDOW, step)[-1].argmax()))
    return torch.tensor(tokens[len(prompt) :])


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


def stale_logits(model, ids):
    """Token by token, each key rotated once and for all at the scale of its own time."""
    advance = RotatedKeys.advance

    def never_again(self, keys, first, last, scales, *how):
        self._scales = scales if self._last else []
        return advance(self, keys, first, last, scales, *how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RotatedKeys, "advance", never_again)
        return in_chunks(model, ids, 1)


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


class TestDecoding:
    """Whatever the decoding, a cache changes nothing."""

    def test_greedy(self, model, new_cache):
        prompt = random_ids(20)
        patch_llama(model, rescale_every=7)
        expected = generate(model, prompt, use_cache=False)
        cache = new_cache()
        assert torch.equal(generate(model, prompt, cache), expected)
        assert torch.equal(generate(model, prompt), expected)
        assert cache.get_seq_length() == 59
        assert cache.scales == [oracle.scale_at(58, WINDOW, 7)]

    def test_sampling(self, model):
        prompt = random_ids(20)
        patch_llama(model)
        drawn = []
        for kwargs in ({"use_cache": False}, {"cache": DynamicYaRNCache()}):
            torch.manual_seed(3)
            drawn.append(generate(model, prompt, do_sample=True, top_k=20, **kwargs))
        assert torch.equal(*drawn)
        assert not torch.equal(drawn[0], generate(model, prompt))

    def test_beam_search(self, model, new_cache):
        prompt = random_ids(25, rows=2)
        patch_llama(model)
        beams = {"num_beams": 4, "num_return_sequences": 3}
        expected = generate(model, prompt, use_cache=False, **beams)
        assert expected.shape == (6, 40)
        assert torch.equal(generate(model, prompt, new_cache(), **beams), expected)

    def test_several_samples_of_one_prompt(self, model):
        prompt = random_ids(25)
        patch_llama(model)
        drawn = []
        for kwargs in ({"use_cache": False}, {"cache": DynamicYaRNCache()}):
            torch.manual_seed(3)
            drawn.append(generate(model, prompt, do_sample=True, num_return_sequences=3, **kwargs))
        assert torch.equal(*drawn)

    def test_prompt_lookup(self, model):
        prompt = random_ids(9).repeat(1, 3)
        patch_llama(model)
        expected = generate(model, prompt)
        calls = count_calls(model)
        assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=4), expected)
        assert len(calls) < 40, "no candidate was ever taken, so nothing was tested"

    @pytest.mark.parametrize("assistant_is_patched", [True, False])
    def test_assistant_model(self, model, assistant_is_patched):
        assistant = copy.deepcopy(model)
        with torch.no_grad():
            for (
                weight
            ) in assistant.parameters():  # a model that is often, not always, of the same mind
                weight.add_(torch.randn_like(weight) * 0.003)
        prompt = random_ids(25)
        patch_llama(model)
        if assistant_is_patched:
            patch_llama(assistant)
        expected = generate(model, prompt)
        calls = count_calls(model)
        assert torch.equal(generate(model, prompt, assistant_model=assistant), expected)
        assert 1 < len(calls) < 40

    def test_no_cache_at_all(self, model):
        prompt = random_ids(25)
        expected = greedy_by_oracle(model, prompt[0], 15, 1)
        patch_llama(model)
        assert torch.equal(generate(model, prompt, use_cache=False, new_tokens=15)[0], expected)

    def test_inputs_embeds(self, model):
        prompt = random_ids(40)
        patch_llama(model)
        expected = generate(model, prompt)
        embeds = model.get_input_embeddings()(prompt)
        assert torch.equal(generate(model, None, inputs_embeds=embeds), expected)
        whole = logits_of(model, prompt)
        assert torch.equal(logits_of(model, None, inputs_embeds=embeds), whole)

    def test_continuing_from_a_filled_cache(self, model):
        prompt, more = random_ids(40), random_ids(12, seed=1)
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        reply = generate(model, prompt, cache, 10)
        turn = torch.cat((prompt, reply, more), 1)
        expected = generate(model, turn, use_cache=False)
        assert torch.equal(generate(model, turn, cache), expected)

    def test_continuing_from_a_prefilled_cache(self, model):
        prompt = random_ids(60)
        patch_llama(model)
        cache = DynamicYaRNCache()
        in_chunks(model, prompt[:, :-1], 13, cache)
        expected = generate(model, prompt, use_cache=False)
        assert torch.equal(generate(model, prompt, cache), expected)

    def test_an_empty_cache_of_the_caller_is_filled(self, model):
        """A loop that passes its own DynamicCache must not start over at each call."""
        ids = random_ids(60)
        patch_llama(model)
        cache = DynamicCache()
        assert_close(in_chunks(model, ids, 7, cache), logits_of(model, ids, use_cache=False))
        assert isinstance(cache, DynamicYaRNCache)
        assert cache.get_seq_length() == 60


def count_calls(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(None))
    return calls


class TestBatches:
    LENGTHS = (20, 45, 33, 1)

    def rows(self):
        return [random_ids(length, seed=length)[0] for length in self.LENGTHS]

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_each_row_is_its_solo_run(self, attention, new_cache):
        model = tiny_llama(attn_implementation=attention)
        patch_llama(model, rescale_every=7)
        ids, mask = left_padded(self.rows())
        together = generate(model, ids, new_cache(), attention_mask=mask)
        for row, tokens in zip(together, self.rows(), strict=True):
            assert torch.equal(row, generate(model, tokens[None], use_cache=False)[0])

    @pytest.mark.parametrize("with_position_ids", [True, False])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_logits_of_each_row(self, model, with_position_ids, side):
        patch_llama(model, rescale_every=7)
        ids, mask = left_padded(self.rows())
        if side == "right":
            ids, mask = [
                torch.stack([x.roll(n) for x, n in zip(y, self.LENGTHS, strict=True)])
                for y in (ids, mask)
            ]
        kwargs = {"attention_mask": mask}
        if with_position_ids:
            kwargs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        logits = logits_of(model, ids, DynamicYaRNCache(), **kwargs)
        assert logits.isfinite().all()
        for row, keep, tokens in zip(logits, mask, self.rows(), strict=True):
            assert_close(row[keep.bool()], logits_of(model, tokens[None], use_cache=False)[0])

    def test_beams_of_a_padded_batch(self, model):
        patch_llama(model)
        ids, mask = left_padded(self.rows())
        together = generate(model, ids, attention_mask=mask, num_beams=3, new_tokens=20)
        for row, tokens in zip(together, self.rows(), strict=True):
            assert torch.equal(row, generate(model, tokens[None], num_beams=3, new_tokens=20)[0])

    @pytest.mark.parametrize("mask_given", [True, False])
    def test_second_turn_has_pads_in_the_middle(self, model, mask_given):
        """Without a mask the cache remembers the pads of the first turn by itself."""
        patch_llama(model, rescale_every=7)
        first = self.rows()
        second = [random_ids(length, seed=50 + length)[0] for length in (15, 15, 15, 15)]
        if mask_given:
            second = [row[:length] for row, length in zip(second, (9, 1, 15, 4), strict=True)]
        cache = DynamicYaRNCache()
        ids, mask = left_padded(first)
        logits_of(model, ids, cache, attention_mask=mask)
        ids, more = left_padded(second)
        kwargs = {"attention_mask": torch.cat((mask, more), 1)} if mask_given else {}
        logits = logits_of(model, ids, cache, **kwargs)
        solo_scales = []
        for row, keep, *tokens in zip(logits, more, first, second, strict=True):
            whole = torch.cat(tokens)
            solo = logits_of(model, whole[None], use_cache=False)[0]
            assert_close(row[keep.bool()], solo[-len(tokens[1]) :])
            solo_scales.append(oracle.scale_at(len(whole) - 1, WINDOW, 7))
        assert cache.scales == solo_scales

    def test_second_turn_of_generate(self, model):
        patch_llama(model)
        first, cache = self.rows(), DynamicYaRNCache()
        ids, mask = left_padded(first)
        reply = generate(model, ids, cache, 10, attention_mask=mask)
        more = random_ids(8, rows=4, seed=9)
        ids = torch.cat((ids, reply, more), 1)
        mask = torch.nn.functional.pad(mask, (0, 18), value=1)
        together = generate(model, ids, cache, attention_mask=mask)
        for index, row in enumerate(together):
            solo = torch.cat((first[index], reply[index], more[index]))
            assert torch.equal(row, generate(model, solo[None], use_cache=False)[0])

    def test_positions_go_on_from_the_cache(self, model):
        """Also where they did not begin at 0, and where a mask hides tokens seen before."""
        patch_llama(model)
        ids = random_ids(60, rows=2)
        offset = torch.arange(7, 67)[None]
        expected = logits_of(model, ids, position_ids=offset, use_cache=False)
        for mask in ({}, {"attention_mask": torch.ones(2, 60)}):
            cache = DynamicYaRNCache()
            logits_of(model, ids[:, :40], cache, position_ids=offset[:, :40])
            assert_close(logits_of(model, ids[:, 40:], cache, **mask), expected[:, 40:])
        mask = torch.ones(2, 60)
        mask[0, 5:25] = 0
        allowed = torch.ones(60, 60).tril().bool()
        allowed[40:, 5:25] = False
        tokens = ids[0].tolist()
        expected = oracle.llama_logits(tiny_llama(), tokens, WINDOW, 1, allowed=allowed.numpy())
        cache = DynamicYaRNCache()
        logits_of(model, ids[:, :40], cache)
        assert_close(logits_of(model, ids[:, 40:], cache, attention_mask=mask)[0], expected[40:])

    def test_a_row_that_is_all_padding(self, model):
        patch_llama(model)
        ids = random_ids(40, rows=2)
        mask = torch.stack((torch.ones(40), torch.zeros(40)))
        logits = logits_of(model, ids, attention_mask=mask)
        assert logits.isfinite().all()
        assert_close(logits[0], logits_of(model, ids[:1])[0])


class TestPacked:
    LENGTHS = (40, 5, 60, 1)

    def documents(self):
        return [random_ids(length, seed=length) for length in self.LENGTHS]

    def packed(self):
        ids = torch.cat(self.documents(), 1)
        return ids, torch.cat([torch.arange(length) for length in self.LENGTHS])[None]

    def solo(self, model):
        return torch.cat([logits_of(model, ids, use_cache=False) for ids in self.documents()], 1)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_restarting_positions(self, attention, use_cache):
        model = tiny_llama(attn_implementation=attention)
        patch_llama(model, rescale_every=7)
        ids, positions = self.packed()
        logits = logits_of(model, ids, position_ids=positions, use_cache=use_cache)
        assert_close(logits, self.solo(model))

    def test_rows_packed_differently(self, model):
        patch_llama(model)
        one, positions = self.packed()
        other = torch.cat([self.documents()[index] for index in (2, 3, 0, 1)], 1)
        others = torch.cat([torch.arange(self.LENGTHS[index]) for index in (2, 3, 0, 1)])[None]
        logits = logits_of(
            model,
            torch.cat((one, other)),
            position_ids=torch.cat((positions, others)),
            use_cache=False,
        )
        assert_close(logits[0], self.solo(model)[0])
        assert_close(logits[1, :60], logits_of(model, self.documents()[2])[0])
        assert_close(logits[1, 61:101], logits_of(model, self.documents()[0])[0])

    @pytest.mark.parametrize("size", [1, 17, 45, 50])
    def test_any_cut(self, model, size):
        patch_llama(model)
        ids, positions = self.packed()
        cache = DynamicYaRNCache()
        logits = [
            logits_of(model, chunk, cache, position_ids=where)
            for chunk, where in zip(ids.split(size, 1), positions.split(size, 1), strict=True)
        ]
        assert_close(torch.cat(logits, 1), self.solo(model))

    def test_the_last_document_goes_on(self, model):
        patch_llama(model)
        ids, positions = self.packed()
        cache = DynamicYaRNCache()
        logits_of(model, ids[:, :-1], cache, position_ids=positions[:, :-1])
        more = random_ids(6, seed=8)
        whole = torch.cat((self.documents()[2], more), 1)
        assert_close(
            logits_of(model, more, cache), logits_of(model, whole, use_cache=False)[:, 60:]
        )

    def test_generate_on_packed_documents_is_refused(self, model):
        patch_llama(model)
        ids, positions = self.packed()
        cache = DynamicYaRNCache()
        logits_of(model, ids, cache, position_ids=positions)
        with pytest.raises(
            ValueError, match=r"position_ids must go on|packed documents must be continued"
        ):
            generate(model, torch.cat((ids, ids[:, :1]), 1), cache)
        assert_close(
            logits_of(model, ids[:, :3], cache, position_ids=torch.arange(3)[None]),
            logits_of(model, ids[:, :3]),
        )

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("kind", [torch.bool, torch.float32])
    @pytest.mark.parametrize("size", [106, 13])
    def test_a_mask_of_the_caller(self, attention, kind, size):
        model = tiny_llama(attn_implementation=attention)
        patch_llama(model, rescale_every=7)
        ids, positions = self.packed()
        numbers = (positions[0] == 0).cumsum(0)
        mask = (numbers[:, None] == numbers) & torch.ones(106, 106).tril().bool()
        if kind != torch.bool:
            mask = torch.zeros(106, 106).masked_fill(~mask, torch.finfo(kind).min)
        cache, logits = DynamicYaRNCache(), []
        for start in range(0, 106, size):
            stop = min(start + size, 106)
            part = logits_of(
                model,
                ids[:, start:stop],
                cache,
                attention_mask=mask[None, None, start:stop, :stop],
                position_ids=positions[:, start:stop],
            )
            logits.append(part)
        assert_close(torch.cat(logits, 1), self.solo(model))

    def test_a_document_after_padding_in_another_row(self, model):
        """The row with a pad in its middle stays one document."""
        patch_llama(model)
        ids, more = random_ids(6, rows=2), random_ids(2, rows=2, seed=1)
        mask = torch.ones(2, 6)
        mask[0, 3] = 0
        cache = DynamicYaRNCache()
        logits_of(model, ids, cache, attention_mask=mask)
        logits_of(model, more[:, :1], cache, position_ids=torch.tensor([[5], [0]]))
        logits = logits_of(model, more[:, 1:], cache, position_ids=torch.tensor([[6], [1]]))
        solo = torch.cat((ids[:1, :3], ids[:1, 4:], more[:1]), 1)
        assert_close(logits[0], logits_of(model, solo)[0, -1:])
        assert_close(logits[1], logits_of(model, more[1:])[0, -1:])

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("kind", [torch.bool, torch.float32])
    def test_a_mask_for_each_head(self, attention, kind, new_cache):
        model = tiny_llama(attn_implementation=attention)
        patch_llama(model)
        ids = random_ids(60, rows=2)
        mask = torch.ones(1, 4, 60, 60).tril().bool()
        mask[:, 2, :, 3:9] = False
        mask[:, 2] |= torch.eye(60).bool()
        if kind != torch.bool:
            mask = torch.zeros(1, 4, 60, 60).masked_fill(~mask, torch.finfo(kind).min)
        whole = logits_of(model, ids, attention_mask=mask, use_cache=False)
        assert (whole - logits_of(model, ids)).abs().max() > 0.1
        cache, logits = new_cache(), []
        for start in range(0, 60, 4):
            part = mask[:, :, start : start + 4, : start + 4]
            logits.append(logits_of(model, ids[:, start : start + 4], cache, attention_mask=part))
        assert_close(torch.cat(logits, 1), whole)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_a_mask_of_a_wider_dtype(self, attention):
        """Its lowest number is -inf in the model's dtype, and a row of these would be NaN."""
        model = tiny_llama(attn_implementation=attention).half()
        patch_llama(model)
        mask = torch.zeros(1, 1, 60, 60)
        mask = mask.masked_fill(~torch.ones(60, 60).tril().bool(), torch.finfo(torch.float32).min)
        mask[..., :3] = torch.finfo(torch.float32).min
        positions = (torch.arange(60) - 3)[None]
        logits = logits_of(model, random_ids(60), attention_mask=mask, position_ids=positions)
        assert logits.isfinite().all()
        solo = logits_of(model, random_ids(60)[:, 3:])
        assert_close(logits[:, 3:], solo, 0.05)

    def test_a_mask_that_is_not_causal(self, model):
        """A prefix that sees itself both ways, past the window: the oracle says what that is."""
        ids = random_ids(60)
        allowed = torch.ones(60, 60).tril().bool()
        allowed[:50, :50] = True
        expected = oracle.llama_logits(model, ids[0].tolist(), WINDOW, 1, allowed=allowed.numpy())
        patch_llama(model)
        assert_close(logits_of(model, ids, attention_mask=allowed[None, None])[0], expected)


class TestCacheOperations:
    """Each on a cache of more than a window, continued for more than a stair."""

    @pytest.fixture
    def patched(self, model):
        patch_llama(model, rescale_every=7)
        return model

    @pytest.fixture(autouse=True)
    def both_kinds(self, new_cache):
        self.new_cache = new_cache

    def filled(self, model, ids):
        cache = self.new_cache()
        logits_of(model, ids, cache)
        return cache

    def assert_holds(self, cache, model, ids, seed=5):
        """The cache goes on as if it had been filled with `ids`."""
        more = random_ids(20, rows=len(ids), seed=seed)
        expected = logits_of(model, torch.cat((ids, more), 1), use_cache=False)[:, -20:]
        assert_close(in_chunks(model, more, 6, cache), expected)
        assert cache.positions.shape == (len(ids), cache.layers[0].keys.shape[2])

    def test_keys_are_those_of_k_proj_bit_for_bit(self, patched):
        ids, seen = random_ids(60), []
        layer = patched.model.layers[1].self_attn
        hook = layer.k_proj.register_forward_hook(lambda module, args, out: seen.append(out))
        cache = self.new_cache()
        in_chunks(patched, ids, 25, cache)
        hook.remove()
        expected = torch.cat(seen, 1).view(1, 60, 2, 16).transpose(1, 2)
        assert torch.equal(cache.layers[1].keys, expected)

    def test_crop(self, patched):
        ids = random_ids(60)
        for remove in (1, 15, 40):
            cache = self.filled(patched, ids)
            cache.crop(-remove)
            assert cache.get_seq_length() == 60 - remove
            assert cache.scales == [oracle.scale_at(59 - remove, WINDOW, 7)]
            self.assert_holds(cache, patched, ids[:, :-remove])

    def test_crop_to_nothing(self, patched):
        cache = self.filled(patched, random_ids(60))
        cache.crop(-60)
        assert cache.get_seq_length() == 0
        assert cache.scales == []
        self.assert_holds(cache, patched, random_ids(3, rows=2)[:, :0])

    def test_crop_and_other_tokens(self, patched):
        """What was rotated of the tokens that went must not serve those that come."""
        ids, other = random_ids(40), random_ids(40, seed=1)
        cache = self.filled(patched, ids)
        cache.crop(-5)
        expected = logits_of(patched, torch.cat((ids[:, :-5], other), 1), use_cache=False)[:, -40:]
        assert_close(in_chunks(patched, other, 1, cache), expected)

    def test_crop_back_to_one_document(self, patched):
        ids, positions = random_ids(60), torch.tensor([[*range(40), *range(20)]])
        cache = self.new_cache()
        logits_of(patched, ids, cache, position_ids=positions)
        cache.crop(-20)
        reply = generate(patched, ids[:, :41], cache)
        assert torch.equal(reply, generate(patched, ids[:, :41], use_cache=False))

    def test_assigned_keys(self, patched):
        """Transformers' own code assigns them; the rotated copy must not be of those before."""
        one, other = (self.filled(patched, random_ids(45, seed=seed)) for seed in (1, 2))
        for layer, of_other in zip(one.layers, other.layers, strict=True):
            layer.keys, layer.values = of_other.keys.clone(), of_other.values.clone()
        self.assert_holds(one, patched, random_ids(45, seed=2))

    def test_reorder(self, patched):
        ids = random_ids(60, rows=3)
        cache = self.filled(patched, ids)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        self.assert_holds(cache, patched, ids[[2, 0, 0]])

    def test_reorder_of_unequal_rows(self, patched):
        rows = [random_ids(length, seed=length)[0] for length in (20, 50)]
        ids, mask = left_padded(rows)
        cache = self.new_cache()
        logits_of(patched, ids, cache, attention_mask=mask)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.scales == [oracle.scale_at(49, WINDOW, 7), 1]
        more = random_ids(20, rows=2, seed=5)
        logits = logits_of(patched, more, cache)
        for row, tokens, new in zip(logits, (rows[1], rows[0]), more, strict=True):
            whole = torch.cat((tokens, new))[None]
            assert_close(row, logits_of(patched, whole, use_cache=False)[0, -20:])

    def test_repeat_interleave(self, patched):
        ids = random_ids(60, rows=2)
        cache = self.filled(patched, ids)
        cache.batch_repeat_interleave(3)
        self.assert_holds(cache, patched, ids.repeat_interleave(3, 0))

    @pytest.mark.parametrize("indices", [[2, 0], [True, False, True]], ids=["indices", "mask"])
    @pytest.mark.parametrize("as_tensor", [True, False])
    def test_select(self, patched, indices, as_tensor):
        ids = random_ids(60, rows=3)
        cache = self.filled(patched, ids)
        cache.batch_select_indices(torch.tensor(indices) if as_tensor else indices)
        self.assert_holds(cache, patched, ids[torch.tensor(indices)])

    def test_reset(self, patched):
        cache = self.filled(patched, random_ids(60))
        cache.reset()
        assert cache.get_seq_length() == 0
        patch_llama(patched, rescale_every=3)  # whatever filled it is forgotten
        self.assert_holds(cache, patched, random_ids(60, rows=2)[:, :0])

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
        ids=["deepcopy", "pickle"],
    )
    def test_copies_go_their_own_ways(self, patched, copied):
        ids = random_ids(60)
        cache = self.filled(patched, ids)
        other = copied(cache)
        self.assert_holds(cache, patched, ids, seed=5)
        self.assert_holds(other, patched, ids, seed=6)

    def test_a_prefix_serves_several_questions(self, patched):
        prefix = random_ids(50)
        cache = self.filled(patched, prefix)
        for seed in range(3):
            whole = torch.cat((prefix, random_ids(5, seed=seed)), 1)
            reply = generate(patched, whole, copy.deepcopy(cache))
            assert torch.equal(reply, generate(patched, whole, use_cache=False))


class TestSeveralAtOnce:
    def test_two_caches_interleaved(self, model):
        patch_llama(model)
        texts = [random_ids(90, seed=1), random_ids(90, seed=2)]
        caches, logits = [DynamicYaRNCache(), DynamicYaRNCache()], [[], []]
        for start in range(0, 90, 9):
            for text, cache, out in zip(texts, caches, logits, strict=True):
                out.append(logits_of(model, text[:, start : start + 9], cache))
        for text, out in zip(texts, logits, strict=True):
            assert_close(torch.cat(out, 1), logits_of(model, text, use_cache=False))

    def test_two_threads(self, model):
        patch_llama(model)
        prompts = [random_ids(length, seed=length) for length in (10, 60)]
        expected = [generate(model, prompt, use_cache=False) for prompt in prompts]
        found = {}

        def run(index):
            found[index] = [generate(model, prompts[index], DynamicYaRNCache()) for _ in range(4)]

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(2):
            assert all(torch.equal(tokens, expected[index]) for tokens in found[index])


class TestTools:
    def test_text_streamer(self, model, tokenizer, capsys):
        patch_llama(model)
        prompt = random_ids(25)
        tokens = generate(model, prompt, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out.split() == tokenizer.decode(tokens[0]).split()

    def test_attentions(self):
        """Eager attention returns the weights, over all keys and with rows that add up to one."""
        model = tiny_llama(attn_implementation="eager")
        ids = random_ids(50)
        stock = model(ids[:, :WINDOW], output_attentions=True).attentions
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        first = model(ids[:, :40], output_attentions=True, **{CACHE: cache}).attentions
        second = model(ids[:, 40:], output_attentions=True, **{CACHE: cache}).attentions
        assert [weights.shape for weights in second] == [(1, 4, 10, 50)] * 3
        for own, theirs in zip(first, stock, strict=True):
            assert_close(own[:, :, :WINDOW, :WINDOW].detach(), theirs.detach(), 1e-6)
        for weights in (*first, *second):
            assert_close(weights.detach().sum(-1), torch.ones(weights.shape[:3]), 1e-6)
            assert (weights.triu(weights.shape[3] - weights.shape[2] + 1) == 0).all()
