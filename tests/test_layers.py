"""How a layer holds keys: un-rotated, with a rotated copy that follows them."""

import pytest
import torch
from conftest import assert_close, assert_holds, filled, in_chunks, logits_of, random_ids

from hf_dynyarn import patch_llama


@pytest.fixture
def patched(model):
    patch_llama(model, rescale_every=7)
    return model


class TestKeys:
    def test_keys_are_those_of_k_proj_bit_for_bit(self, patched, new_cache):
        ids, seen = random_ids(60), []
        layer = patched.model.layers[1].self_attn
        hook = layer.k_proj.register_forward_hook(lambda module, args, out: seen.append(out))
        cache = new_cache()
        in_chunks(patched, ids, 25, cache)
        hook.remove()
        expected = torch.cat(seen, 1).view(1, 60, 2, 16).transpose(1, 2)
        assert torch.equal(cache.layers[1].keys, expected)

    def test_crop_and_other_tokens(self, patched, new_cache):
        """What was rotated of the tokens that went must not serve those that come."""
        ids, other = random_ids(40), random_ids(40, seed=1)
        cache = filled(patched, ids, new_cache())
        cache.crop(-5)
        expected = logits_of(patched, torch.cat((ids[:, :-5], other), 1), use_cache=False)[:, -40:]
        assert_close(in_chunks(patched, other, 1, cache), expected)

    def test_assigned_keys(self, patched, new_cache):
        """Transformers' own code assigns them; the rotated copy must not be of those before."""
        one, other = (filled(patched, random_ids(45, seed=seed), new_cache()) for seed in (1, 2))
        for layer, of_other in zip(one.layers, other.layers, strict=True):
            layer.keys, layer.values = of_other.keys.clone(), of_other.values.clone()
        assert_holds(one, patched, random_ids(45, seed=2))
