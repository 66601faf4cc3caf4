"""Additive 4-D masks of another dtype than the queries."""

import pytest
import torch
from conftest import assert_close, logits_of, random_ids, tiny_llama

from hf_dynyarn import patch_llama

IDS = random_ids(20)
CAUSAL = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]


def additive(dtype, hidden=None):
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(CAUSAL.shape, dtype=dtype).masked_fill(~CAUSAL, hidden)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_of_any_dtype(attention, dtype):
    model = tiny_llama(attn_implementation=attention)
    expected = logits_of(model, IDS)
    patch_llama(model)
    for mask in (additive(dtype), additive(dtype, -torch.inf)):
        assert_close(logits_of(model, IDS, attention_mask=mask), expected)


def test_of_a_wider_dtype_does_not_hide_whole_rows():
    """The lowest number of float64 is -inf in float32, and a row of nothing else NaN."""
    model = tiny_llama()
    patch_llama(model)
    mask = additive(torch.float64)
    mask[..., 3, :] = torch.finfo(torch.float64).min
    assert logits_of(model, IDS, attention_mask=mask).isfinite().all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_under_autocast_with_weights_of_float32(attention):
    model = tiny_llama(attn_implementation=attention)
    mask = additive(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits_of(model, IDS, attention_mask=mask)
        patch_llama(model)
        actual = logits_of(model, IDS, attention_mask=mask)
    assert_close(actual, expected, 0)
