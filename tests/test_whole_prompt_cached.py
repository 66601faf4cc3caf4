"""`generate` from a cache that holds the whole prompt already, or more: an edited history.

Up to 4.57 stock's own generate() fails before a model is called. Later it calls the model with what
a negative length leaves of the prompt, and attends to the rest twice.
"""

import pytest
import torch
from conftest import CACHE, assert_close, generate, logits_of, random_ids, tiny_llama
from transformers import DynamicCache

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.versions import TRANSFORMERS

IDS = random_ids(50)
CROP = r"cache\.crop\(-n\)"


@pytest.fixture
def model():
    model = tiny_llama()
    patch_llama(model, rescale_every=7)
    return model


@pytest.fixture
def cache(model):
    cache = DynamicYaRNCache()
    logits_of(model, IDS[:, :40], cache)
    return cache


@pytest.mark.parametrize("prompt", [10, 20, 25, 39], ids=str)
def test_more_than_the_prompt(model, cache, prompt):
    """By half, stock calls the model with no token at all; else with some from the middle."""
    with pytest.raises((ValueError, IndexError)) as refusal:
        generate(model, IDS[:, :prompt], cache, new_tokens=3)
    if TRANSFORMERS >= (5, 20):
        assert refusal.match(CROP)
    elif refusal.type is IndexError:
        with pytest.raises(IndexError):  # generate()'s own, as for stock
            filled = DynamicCache()
            stock = tiny_llama()
            logits_of(stock, IDS[:, :40], filled)
            generate(stock, IDS[:, :prompt], filled, new_tokens=3)
    assert cache.get_seq_length() == 40


# Up to 4.57 chunks start from the first token, whatever the cache holds.
@pytest.mark.parametrize("chunk", [None, 7] if TRANSFORMERS >= (5, 20) else [None])
def test_the_remedy(model, cache, chunk):
    expected = generate(model, IDS[:, :25], new_tokens=30)
    cache.crop(-16)
    actual = generate(model, IDS[:, :25], cache, new_tokens=30, prefill_chunk_size=chunk)
    assert actual.tolist() == expected.tolist()


@pytest.mark.skipif(TRANSFORMERS < (5, 20), reason="generate() itself fails, as of stock models")
def test_exactly_the_prompt_is_read_anew(model, cache):
    """As a document of its own, for its positions start at 0: never as its own continuation."""
    expected = generate(model, IDS[:, :40], new_tokens=30)
    assert generate(model, IDS[:, :40], cache, new_tokens=30).tolist() == expected.tolist()


@pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="there is another way to cut chunks")
@pytest.mark.parametrize("prompt", [25, 40])
def test_in_chunks(model, cache, prompt):
    with pytest.raises(ValueError, match=CROP):
        generate(model, IDS[:, :prompt], cache, new_tokens=3, prefill_chunk_size=7)
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize("inputs", ["input_ids", "inputs_embeds"])
def test_a_call_without_tokens(model, cache, inputs):
    empty = IDS[:, :0]
    if inputs == "inputs_embeds":
        empty = model.model.embed_tokens(empty)
    with pytest.raises(ValueError, match=r"at least one token, got \(1, 0\).*holds 40.*" + CROP):
        model(**{inputs: empty, CACHE: cache})
    with pytest.raises(ValueError, match=r"at least one token, got \(1, 0\)\.$"):
        model(**{inputs: empty})
    rest = logits_of(model, IDS[:, 40:], cache)
    assert_close(rest, logits_of(model, IDS)[:, 40:])
    assert torch.equal(cache.positions[0], torch.arange(50))
