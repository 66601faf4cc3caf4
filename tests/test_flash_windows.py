"""Windows on the flash path, with kernels in place of flash-attn's: its CPU reference has none.

They are exact, so that rows can be held against their solo runs.
"""

import inspect

import flash_attn
import pytest
import torch
from conftest import assert_close, logits_of, random_ids
from families import STEP, tiny
from test_flash import calls as available
from test_padded_windows import CASES, TURNS, assert_rows_are_their_solo_runs, turns_of
from transformers import modeling_flash_attention_utils

from hf_dynyarn import DynamicYaRNCache, patch_llama

__all__ = ["available"]


def attend(query, key, value, scale, window):
    """One row, (T, Hq, D) over (K, Hkv, D), aligned to the last key as flash-attn does it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    behind = torch.arange(len(key)) - torch.arange(len(query))[:, None] - len(key) + len(query)
    seen = (behind <= 0) & ((behind >= -window) if window >= 0 else True)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, value)


def flash_attn_func(q, k, v, softmax_scale, window_size=(-1, -1), causal=True, **_):
    rows = [attend(*row, softmax_scale, window_size[0]) for row in zip(q, k, v, strict=True)]
    return torch.stack(rows)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size=(-1, -1), causal=True, **_
):
    rows = []
    for row in range(len(cu_seqlens_q) - 1):
        own = slice(*cu_seqlens_q[row : row + 2].tolist())
        keys = slice(*cu_seqlens_k[row : row + 2].tolist())
        rows.append(attend(q[own], k[keys], v[keys], softmax_scale, window_size[0]))
    return torch.cat(rows)


@pytest.fixture(autouse=True)
def exact_kernels(available, monkeypatch):
    for function in (flash_attn_func, flash_attn_varlen_func):
        real = inspect.signature(getattr(flash_attn, function.__name__))
        function.__signature__ = real
        monkeypatch.setattr(flash_attn, function.__name__, function)
    assert modeling_flash_attention_utils.is_flash_attn_2_available()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_their_solo_runs(case, side):
    model = tiny(case)
    patch_llama(model, rescale_every=STEP)
    model.config._attn_implementation = "flash_attention_2"
    assert_rows_are_their_solo_runs(model, *turns_of(TURNS, side))


@pytest.mark.parametrize("case", CASES)
def test_is_what_sdpa_computes(case):
    model, cache = tiny(case), DynamicYaRNCache()
    patch_llama(model, rescale_every=STEP)
    expected = logits_of(model, random_ids(80))
    model.config._attn_implementation = "flash_attention_2"
    parts = [logits_of(model, part, cache) for part in random_ids(80).split([50, 27, 1, 1, 1], 1)]
    assert_close(torch.cat(parts, dim=1), expected)
