"""Generating by the Triton kernels, in Triton's interpreter: see `make test-kernels`."""

import interpreter
import pytest
import torch
from conftest import assert_close, generate, left_padded, logits_of, random_ids, tiny_llama

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.backends import fused

IDS, MASK = left_padded([random_ids(40)[0], random_ids(26, seed=3)[0]])

CACHES = {
    "fixed size": lambda: DynamicYaRNCache(max_cache_len=64),
    "no copy": lambda: DynamicYaRNCache(rotated_copy=False),
}


@pytest.fixture(params=CACHES.values(), ids=CACHES)
def new_cache(request, monkeypatch):
    """Caches over which the kernels decode, and how many times they did."""
    interpreter.interpret(monkeypatch)
    monkeypatch.setattr(fused, "has_kernels", lambda device_type: True)
    return request.param


@pytest.fixture
def model():
    model = tiny_llama(num_hidden_layers=2)
    patch_llama(model, rescale_every=4)
    return model


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    found, decode = [], fused.decode
    monkeypatch.setattr(fused, "decode", lambda *args, **kw: found.append(1) or decode(*args, **kw))
    yield found
    assert found


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_generates_the_tokens_of_torch(model, new_cache, options):
    options = {"attention_mask": MASK, "new_tokens": 8, **options}
    expected = generate(model, IDS, DynamicYaRNCache(), **options)
    assert generate(model, IDS, new_cache(), **options).equal(expected)


def test_steps_and_runs_of_several_scales(model, new_cache):
    text = random_ids(70)
    cache, expected = new_cache(), logits_of(model, text[:, :60], use_cache=False)
    parts = text[:, :60].split([30, 1, 9, 16, 1, 3], dim=1)
    assert_close(torch.cat([logits_of(model, part, cache) for part in parts], 1), expected)
