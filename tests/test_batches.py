"""Rows of a batch and packed documents: each is its solo run."""

import oracle
import pytest
import torch
from conftest import WINDOW, assert_close, generate, left_padded, logits_of, random_ids, tiny_llama

from hf_dynyarn import DynamicYaRNCache, patch_llama


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
