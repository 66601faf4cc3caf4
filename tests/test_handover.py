"""Which cache a call gets: one of ours, a stock one that is adopted, or a refusal."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import (
    CACHE,
    TEXT,
    assert_close,
    assert_same,
    filled,
    generate,
    in_chunks,
    logits_of,
    random_ids,
    tiny_llama,
)
from transformers import DynamicCache, QuantizedCache

from hf_dynyarn import DynamicYaRNCache, patch_llama, unpatch_llama

LONG = random_ids(70)


def stock_cache(model, ids):
    cache = DynamicCache()
    logits_of(model, ids, cache)
    return cache


class TestAdoption:
    def test_an_empty_cache_of_the_caller_is_filled(self, model):
        """A loop that passes its own DynamicCache must not start over at each call."""
        ids = random_ids(60)
        patch_llama(model)
        cache = DynamicCache()
        assert_close(in_chunks(model, ids, 7, cache), logits_of(model, ids, use_cache=False))
        assert isinstance(cache, DynamicYaRNCache)
        assert cache.get_seq_length() == 60


class TestRefusedCaches:
    def test_ours_on_an_unpatched_model(self, model):
        cache = DynamicYaRNCache()
        for call in (logits_of, generate):
            with pytest.raises(TypeError, match=r"patched model.*Call patch_llama\(model\) first"):
                call(model, LONG, cache)
            assert cache.get_seq_length() == 0
        patch_llama(model)
        assert_close(logits_of(model, LONG, cache), logits_of(model, LONG))
        unpatch_llama(model)
        with pytest.raises(TypeError, match="patched model"):
            logits_of(model, LONG, cache)
        patch_llama(model)
        more = random_ids(5, seed=1)
        expected = logits_of(model, torch.cat((LONG, more), 1))[:, -5:]
        assert_close(logits_of(model, more, cache), expected)

    def test_a_filled_foreign_cache(self, model):
        cache = stock_cache(model, LONG)
        keys = cache.layers[0].keys.clone()
        patch_llama(model)
        with pytest.raises(TypeError, match="un-rotated keys, got a DynamicCache with 70 tokens"):
            logits_of(model, LONG, cache)
        assert type(cache) is DynamicCache
        assert torch.equal(cache.layers[0].keys, keys)

    @pytest.mark.filterwarnings("ignore::FutureWarning:optimum", "ignore::DeprecationWarning")
    def test_a_quantized_cache(self, model):
        patch_llama(model)
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a QuantizedCache"):
            logits_of(model, LONG, QuantizedCache(backend="quanto", config=model.config))
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a QuantizedCache"):
            generate(model, LONG, cache_implementation="quantized")

    def test_an_offloaded_cache(self, model):
        patch_llama(model)
        with pytest.raises(TypeError, match="got an offloaded DynamicCache"):
            generate(model, LONG, cache_implementation="offloaded")

    def test_something_else(self, model):
        patch_llama(model)
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a tuple"):
            model.model(LONG, **{CACHE: ((torch.zeros(1), torch.zeros(1)),)})

    def test_a_cache_filled_under_other_options(self, model):
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        logits_of(model, LONG, cache)
        patch_llama(model, rescale_every=8)
        with pytest.raises(ValueError, match=r"rescale_every=7.*got.*rescale_every=8"):
            logits_of(model, LONG, cache)

    def test_a_cache_of_another_model(self, model):
        other = tiny_llama(num_hidden_layers=2)
        patch_llama(model)
        patch_llama(other)
        cache = DynamicYaRNCache()
        logits_of(other, LONG, cache)
        with pytest.raises(ValueError, match="with 2 layers, got 3"):
            logits_of(model, LONG, cache)

    def test_refusal_leaves_an_empty_cache_of_the_caller_alone(self, model):
        patch_llama(model)
        cache = DynamicCache()
        with pytest.raises(ValueError, match="attention_mask must be"):
            logits_of(model, LONG, cache, attention_mask=torch.ones(1, 3))
        assert type(cache) is DynamicCache


class TestRefusedModels:
    """A cache is refused with the reason, and is as it was."""

    def refused(self, model, cache, message):
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match=message):
            logits_of(model, TEXT[:, 40:], cache)
        assert_same(cache, before)
        assert all(layer.get_seq_length() == 40 for layer in cache.layers)

    def test_other_options(self, model, travelled):
        patch_llama(model, rescale_every=7)
        cache = travelled(filled(model))
        patch_llama(model, rescale_every=8)
        self.refused(model, cache, r"rescale_every=7.*got.*rescale_every=8.*Start a new")

    def test_another_window(self, model, travelled):
        other = tiny_llama(max_position_embeddings=64)
        patch_llama(model, rescale_every=1)
        patch_llama(other, rescale_every=1)
        cache = travelled(filled(other))
        self.refused(model, cache, r"embeddings=64.*got.*embeddings=32")

    def test_a_model_that_is_not_patched(self, model, travelled):
        other = tiny_llama()
        patch_llama(other)
        cache = travelled(filled(other))
        with pytest.raises(TypeError, match=r"Call patch_llama\(model\) first"):
            logits_of(model, TEXT[:, 40:], cache)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_hidden_layers": 2}, "with 2 layers, got 3"),
            ({"num_key_value_heads": 4}, "with 4 heads of 16 dimensions in its keys, got 2 of 16"),
            ({"num_key_value_heads": 1}, "with 1 heads of 16 dimensions in its keys, got 2 of 16"),
        ],
        ids=["layers", "more heads", "fewer heads"],
    )
    def test_another_shape(self, model, travelled, changes, message):
        other = tiny_llama(**changes)
        patch_llama(model)
        patch_llama(other)
        self.refused(model, travelled(filled(other)), message)

    def test_another_head_dim(self, model, travelled):
        """Under equal options, which would be refused first."""
        other = tiny_llama(head_dim=32)
        patch_llama(model)
        patch_llama(other)
        cache = filled(other)
        cache.schedule = replace(cache.schedule, rotary_dim=16)
        self.refused(model, travelled(cache), "2 heads of 32 dimensions in its keys, got 2 of 16")

    def test_before_any_layer_runs(self, model, monkeypatch):
        other = tiny_llama(num_key_value_heads=4)
        patch_llama(model)
        patch_llama(other)
        cache = filled(other)
        monkeypatch.setattr(DynamicYaRNCache, "begin", None)
        self.refused(model, cache, "with 4 heads")

    def test_heads_split_between_processes_are_checked_by_the_layers(self, model, monkeypatch):
        other = tiny_llama(num_key_value_heads=4)
        patch_llama(model)
        patch_llama(other)
        cache = filled(other)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        self.refused(model, cache, "new keys must have the dtype, batch, heads")

    def test_another_batch_size(self, model, travelled):
        patch_llama(model)
        cache = travelled(filled(model))
        with pytest.raises(ValueError, match="batch size of the cache, 1, got 2"):
            logits_of(model, random_ids(3, rows=2), cache)

    def test_another_dtype(self, model, travelled):
        patch_llama(model)
        cache = travelled(filled(model))
        self.refused(model.to(torch.bfloat16), cache, r"new keys must have the dtype.*float32")


class TestOffloading:
    """Refused: layers that come and go would need a GPU to be tested on."""

    def test_asked_of_the_cache(self):
        with pytest.raises(TypeError, match=r"offloading must be False, got True.*cache\.to\("):
            DynamicYaRNCache(offloading=True)

    def test_a_cache_of_transformers(self, model):
        patch_llama(model)
        cache = DynamicCache(offloading=True)
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got an offloaded Dynamic"):
            logits_of(model, TEXT, cache)
        assert cache.get_seq_length() == 0

    @pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
    def test_asked_of_generate(self, model, name):
        patch_llama(model)
        with pytest.raises(TypeError, match="cache of a patched model must be a DynamicYaRNCache"):
            generate(model, TEXT, cache_implementation=name)
