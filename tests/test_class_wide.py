"""A patch of every model, loaded already or later."""

import copy
import gc
import logging
import pickle
import threading

import pytest
import torch
from conftest import generate, logits_of, random_ids, tiny_llama, traces

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, patch_llama, unpatch_llama

LONG = random_ids(70)


def is_class_patched(model):
    with torch.no_grad():
        model(LONG)
    return type(model.model.rotary_emb).__name__ == "UnrotatedEmbedding"


class TestClassWide:
    def test_models_already_loaded_and_loaded_later(self, model):
        stock = logits_of(model, LONG)
        patch_llama()
        later = tiny_llama()
        assert is_class_patched(model)
        assert is_class_patched(later)
        assert torch.equal(logits_of(later, LONG), logits_of(model, LONG))
        unpatch_llama()
        for one in (model, later):
            assert torch.equal(logits_of(one, LONG), stock)
            assert traces(one) == traces(tiny_llama())

    def test_handle_and_context_manager(self, model):
        stock = logits_of(model, LONG)
        with patch_llama(rescale_every=7) as handle:
            assert handle.config == DynamicYaRNConfig(rescale_every=7)
            assert not torch.equal(logits_of(model, LONG), stock)
        assert torch.equal(logits_of(model, LONG), stock)
        handle.remove()

    def test_generates_with_either_cache(self, model):
        patch_llama()
        expected = generate(model, LONG, use_cache=False)
        assert torch.equal(generate(model, LONG, DynamicYaRNCache()), expected)
        assert torch.equal(generate(model, LONG), expected)

    def test_leaves_alone_what_is_patched_by_itself(self, model):
        own = patch_llama(model, rescale_every=50)
        expected = logits_of(model, LONG)
        handle = patch_llama(rescale_every=1)
        assert torch.equal(logits_of(model, LONG), expected)
        handle.remove()
        assert torch.equal(logits_of(model, LONG), expected)
        own.remove()

    def test_twice_replaces_the_options_and_says_so_once(self, model, caplog):
        old = patch_llama(rescale_every=1)
        first = logits_of(model, LONG)
        with caplog.at_level(logging.WARNING):
            patch_llama(rescale_every=50)
        assert [record.getMessage().count("replaces") for record in caplog.records] == [1]
        second = logits_of(model, LONG)
        assert not torch.equal(first, second)
        unpatch_llama()
        old.remove()  # removes the patch that replaced it, so nothing here
        assert not torch.equal(logits_of(model, LONG), second)

    def test_unpatch_all_finds_every_model(self, model):
        other = tiny_llama(seed=1)
        patch_llama(other)
        never_called = copy.deepcopy(other)
        patch_llama()
        logits_of(model, LONG)
        unpatch_llama()
        for one in (model, other, never_called):
            assert traces(one) == traces(tiny_llama())

    def test_one_model_alone_cannot_be_unpatched(self, model):
        patch_llama()
        logits_of(model, LONG)
        with pytest.raises(ValueError, match=r"class-wide.*Call unpatch_llama\(\) without a model"):
            unpatch_llama(model)

    def test_a_model_it_cannot_serve_is_refused_when_called(self, model):
        model.config.is_causal = False
        patch_llama()
        with pytest.raises(ValueError, match="must attend causally"):
            model(LONG)
        unpatch_llama()
        model(LONG)

    def test_models_that_the_garbage_collector_no_longer_lists(self, model):
        with patch_llama():
            logits_of(model, LONG)
            gc.freeze()
        gc.unfreeze()
        assert traces(model) == traces(tiny_llama())

    def test_models_pickled_under_it_are_stock_after_it(self, model):
        stock = logits_of(model, LONG)
        with patch_llama():
            logits_of(model, LONG)
            pickled = pickle.dumps(model)
        twin = pickle.loads(pickled)
        assert torch.equal(logits_of(twin, LONG), stock)
        assert traces(twin) == traces(tiny_llama())

    def test_first_calls_from_two_threads(self):
        model, results = tiny_llama(), []
        patch_llama()
        threads = [
            threading.Thread(target=lambda: results.append(logits_of(model, LONG)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(logits, results[0]) for logits in results)
        assert len(model.model._forward_pre_hooks) == 1
