"""Decoders whose layers were taken out, and whose config does not know."""

import copy

import pytest
from conftest import WINDOW, assert_close, generate, logits_of, random_ids, tiny_llama

from hf_dynyarn import DynamicYaRNCache, patch_llama, unpatch_llama

LONG = random_ids(70)


def cut(model, layers):
    model.model.layers = model.model.layers[layers]
    return model


@pytest.fixture(
    params=[slice(2), slice(None, None, 2), slice(1, None)], ids=["first", "every_other", "last"]
)
def layers(request):
    return request.param


@pytest.fixture(params=["cut_then_patched", "patched_then_cut"])
def model(request, layers):
    model = tiny_llama()
    if request.param == "cut_then_patched":
        patch_llama(cut(model, layers), rescale_every=7)
    else:
        patch_llama(model, rescale_every=7)
        cut(model, layers)
    return model


def test_generate_within_the_window_as_stock(model):
    prompt = LONG[:, :8]
    patched = generate(model, prompt, new_tokens=WINDOW - 8)
    unpatch_llama(model)
    assert (
        patched.tolist()
        == generate(model, LONG[:, :8], new_tokens=WINDOW - 8, use_cache=False).tolist()
    )


def test_cached_equals_uncached(model):
    cache = DynamicYaRNCache()
    chunks = [logits_of(model, chunk, cache) for chunk in LONG.split([40, 1, 29], 1)]
    expected = logits_of(model, LONG, use_cache=False)
    assert_close(chunks[0], expected[:, :40])
    assert_close(chunks[1], expected[:, 40:41])
    assert_close(chunks[2], expected[:, 41:])


def test_what_moves_a_cache(model):
    cache = DynamicYaRNCache()
    logits_of(model, LONG[:, :40], cache)
    cache.crop(-10)
    cache.batch_repeat_interleave(2)
    logits_of(model, LONG[:, 30:50].repeat(2, 1), copy.deepcopy(cache))
    cache.to("cpu").batch_select_indices([1])
    actual = logits_of(model, LONG[:, 30:], cache)
    assert_close(actual, logits_of(model, LONG, use_cache=False)[:, 30:])


def test_beams(model):
    with_cache, without = (
        generate(model, LONG[:, :30], new_tokens=20, num_beams=3, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert with_cache.tolist() == without.tolist()


def test_saved_only_without_a_gap(model, layers, tmp_path):
    cache = DynamicYaRNCache()
    logits_of(model, LONG[:, :40], cache)
    if layers != slice(2):
        with pytest.raises(ValueError, match=r"each layer up to the last.*got none for layer \d"):
            cache.save(tmp_path / "cache")
        return
    cache.save(tmp_path / "cache")
    loaded = DynamicYaRNCache.load(tmp_path / "cache")
    expected = logits_of(model, LONG, use_cache=False)
    assert_close(logits_of(model, LONG[:, 40:], loaded), expected[:, 40:])


def test_another_number_of_layers_is_refused():
    model = tiny_llama()
    patch_llama(model)
    cache = DynamicYaRNCache()
    logits_of(model, LONG[:, :40], cache)
    with pytest.raises(ValueError, match=r"with 3 layers, got 2"):
        logits_of(cut(model, slice(2)), LONG[:, 40:], cache)
