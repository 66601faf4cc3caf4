"""What a query sees: the masks that are built, and those of the caller."""

import oracle
import pytest
import torch
from conftest import (
    WINDOW,
    assert_close,
    held,
    left_padded,
    logits_of,
    plan_for,
    random_ids,
    tiny_llama,
)

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.backends import sdpa


class TestMasks:
    @pytest.mark.parametrize("past", [0, 40])
    @pytest.mark.parametrize("padded", [True, False])
    def test_say_who_sees_whom(self, past, padded):
        """Rebuilt here key by key."""
        mask = torch.ones(2, past + 9, dtype=torch.long)
        if padded:
            mask[0, :3] = 0
        cache = held([list(range(past))] * 2) if past else None
        plan = plan_for(9, cache, mask=mask, rows=2)
        got = plan.masks.of(2, 7, 0, torch.zeros(1)).expand(2, 1, 5, past + 7)
        for row in range(2):
            for query in range(5):
                for key in range(past + 7):
                    own = past + 2 + query
                    sees = key == own or (key < own and bool(mask[row, key]))
                    assert got[row, 0, query, key].item() == sees

    def test_none_for_a_step_or_a_first_call(self, masks_built):
        model = tiny_llama()
        patch_llama(model)
        cache = DynamicYaRNCache()
        logits_of(model, random_ids(32), cache)
        for _ in range(5):
            logits_of(
                model,
                random_ids(1),
                cache,
                attention_mask=torch.ones(1, cache.get_seq_length() + 1),
            )
        assert masks_built == []

    def test_none_for_packed_documents_of_one_row(self, masks_built):
        model = tiny_llama()
        patch_llama(model)
        positions = torch.tensor([[*range(30), *range(20), *range(32)]])
        logits_of(model, random_ids(82), position_ids=positions)
        assert masks_built == []

    def test_never_for_the_whole_call(self, masks_built, monkeypatch):
        monkeypatch.setattr(sdpa, "TILE", 16)
        model = tiny_llama()
        ids = random_ids(200)
        patch_llama(model, rescale_every=64)
        cache = DynamicYaRNCache()
        logits = [logits_of(model, ids[:, :3], cache), logits_of(model, ids[:, 3:], cache)]
        assert max(shape[2] for shape in masks_built) == 16
        assert_close(torch.cat(logits, 1), logits_of(model, ids, use_cache=False))

    def test_no_stock_mask_is_built(self, monkeypatch):
        """At 32k tokens that alone would take a gigabyte."""
        from transformers import masking_utils

        def refuse(*args, **kwargs):
            raise AssertionError("a stock mask was built")

        for name in ("sdpa", "eager"):
            monkeypatch.setitem(
                masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, refuse
            )
        model = tiny_llama()
        patch_llama(model)
        cache = DynamicYaRNCache()
        ids, mask = left_padded([random_ids(9)[0], random_ids(40)[0]])
        logits_of(model, ids, cache, attention_mask=mask)
        logits_of(model, random_ids(4, rows=2), cache)


class TestMaskOfTheCaller:
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
