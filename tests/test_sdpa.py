"""Attention by sdpa, and by eager, which returns its weights."""

import torch
from conftest import CACHE, WINDOW, assert_close, random_ids, tiny_llama

from hf_dynyarn import DynamicYaRNCache, patch_llama


class TestEager:
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
