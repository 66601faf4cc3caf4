"""Attention by torch's `scaled_dot_product_attention`, or by a family's own eager function.

Masks are built per tile of a segment, never for the whole call, and not at all where a causal or a
full kernel says the same.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..plan import LayerCall
from ..segments import Segment
from . import Attended
from .cpu import attend_in_parts, goes_in_parts, grouped, grouped_mask, has_kernel

# Rows of a mask, query heads of a group included: over 128k keys it takes 256 MiB in bfloat16.
TILE = 1024


def attend(
    call: LayerCall,
    segment: Segment,
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Iterator[Attended]:
    """Attends for one segment, rotated already, a tile of queries at a time if it needs masks."""
    plan, window = call.plan, call.window
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if plan.backend == "eager":
        attention = _family_eager(type(call.module))
    needs_mask = plan.masks.needed(query.shape[2], key.shape[2], window)
    cut = window is not None and key.shape[2] > window
    if plan.masks.plainly_causal and not cut and goes_in_parts(call, query, key, value):
        yield first, attend_in_parts(call.scaling, query, key, value), None
        return
    groups = query.shape[1] // key.shape[1]
    tile = max(1, TILE // groups) if needs_mask else query.shape[2]
    for start in range(segment.start, segment.stop, tile):
        stop = min(start + tile, segment.stop)
        queries = query[:, :, start - segment.start : stop - segment.start]
        begin, end = plan.masks.first_key(start, first, window), plan.masks.last_key(stop)
        keys, values = (states[:, :, begin - first : end - first] for states in (key, value))
        if plan.backend == "sdpa" and (needs_mask or stop - start == 1):
            mask = None
            if needs_mask and plan.masks.plainly_causal:
                mask = plan.masks.tail(stop - start, groups, queries, window)
                mask = mask[..., begin - end :]
            elif needs_mask:
                mask = plan.masks.of(start, stop, begin, query, window)
                mask = grouped_mask(mask, groups)
            yield begin, _grouped_sdpa(call, queries, keys, values, mask), None
        else:
            mask = plan.masks.of(start, stop, begin, query, window) if needs_mask else None
            output, weights = attention(
                call.module,
                queries,
                keys,
                values,
                mask,
                scaling=call.scaling,
                dropout=call.dropout,
                is_causal=not needs_mask and stop - start > 1,
                output_attentions=plan.output_attentions,
            )
            yield begin, output, weights


def attend_to_last(
    scaling: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attends causally for queries at the last of the keys' positions, without a cache or a plan.

    Args:
        scaling: factor on the logits.
        query: `(B, Hq, T, D)`.
        key: `(B, Hkv, K, D)`.
        value: `(B, Hkv, K, D)`.

    Returns:
        `(B, T, Hq, D)`
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries < keys and has_kernel(query, key, value):
        return attend_in_parts(scaling, query, key, value)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_lower_right(queries, keys),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def _family_eager(layer: type) -> Callable[..., Any]:
    """Eager attention of a layer's family, which transformers does not register but each has."""
    modules = (sys.modules[base.__module__] for base in layer.__mro__)
    found = (getattr(module, "eager_attention_forward", None) for module in modules)
    attention: Callable[..., Any] = next(function for function in found if function is not None)
    return attention


def _grouped_sdpa(
    call: LayerCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attends by sdpa without repeating a key for each query head of its group, mask grouped."""
    batch, heads, queries, _ = query.shape
    output = scaled_dot_product_attention(
        grouped(query, key),
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout,
        scale=call.scaling,
    )
    return output.reshape(batch, heads, queries, -1).transpose(1, 2)
