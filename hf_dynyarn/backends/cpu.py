"""Attention on a CPU: over parts of the keys that all threads share, and over un-rotated keys."""

import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ..plan import LayerCall
from ..rope import rotate
from ..rotated import ROTATED_AT_A_TIME
from ..segments import Segment

# Keys that a thread of the CPU takes at least: with fewer, merging costs more than it saves.
LEAST_KEYS = 2048

# What `scaled_dot_product_attention` runs on a CPU, which hides the log-sum-exp that it returns.
_kernel: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def goes_in_parts(
    call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Whether `attend_in_parts` can and should attend for queries that see all before them."""
    queries, keys = query.shape[2], key.shape[2]
    if (
        call.plan.backend != "sdpa"
        or call.dropout > 0
        # The kernel's own derivative knows nothing of the log-sum-exp.
        or any(states.requires_grad for states in (query, key, value))
        # One causal kernel does it, as in the stock model.
        or queries == keys
        or keys < 2 * LEAST_KEYS
    ):
        return False
    return has_kernel(query, key, value) and (queries > 1 or _pieces(grouped(query, key), keys) > 1)


def has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether sdpa would run `_kernel`: torch's own word on dtypes, sizes and strides."""
    if _kernel is None or query.device.type != "cpu":
        return False
    choice: int = torch._fused_sdp_choice(grouped(query, key), key, value)
    return choice == SDPBackend.FLASH_ATTENTION.value


def attend_in_parts(
    scaling: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attends without a mask to parts of the keys, and merges the results.

    With `o_i` and `l_i` the output and the log-sum-exp of the logits of part `i`, the output of all
    is `sum_i softmax(l)_i o_i`. One query sees all keys, several see all that are before them and,
    causally, those that are their own.

    Args:
        scaling: factor on the logits.
        query: `(B, Hq, T, D)`, of the last keys.
        key: `(B, Hkv, K, D)`.
        value: `(B, Hkv, K, D)`.

    Returns:
        `(B, T, Hq, D)`
    """
    queries, dim = query.shape[2:]
    # Key heads as rows, so that the second dimension is free for what shares one.
    keys, values = key.flatten(0, 1), value.flatten(0, 1)  # (B * Hkv, K, D)
    apart = query.reshape(len(keys), -1, queries, dim)  # (B * Hkv, G, T, D)
    grouped = apart.reshape(len(keys), 1, -1, dim)  # (B * Hkv, 1, G * T, D)
    seen = key.shape[2] - queries if queries > 1 else key.shape[2]
    parts = _over_all(scaling, grouped, keys[:, :seen], values[:, :seen])
    if queries > 1:
        own = (states[:, None, seen:].expand_as(apart) for states in (keys, values))
        parts.append(_kernel(apart, *own, is_causal=True, scale=scaling))
    outputs = torch.cat(
        [output.reshape(len(keys), -1, *grouped.shape[2:]) for output, _ in parts], 1
    )
    logs = torch.cat([log.reshape(len(keys), -1, grouped.shape[2]) for _, log in parts], 1)
    merged = (logs.softmax(1)[..., None] * outputs).sum(1).to(value.dtype)
    return merged.view(query.shape).transpose(1, 2)


def _over_all(
    scaling: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs `(R, pieces, Q, D)` and log-sum-exps of `(R, 1, Q, D)` over pieces of `(R, K, D)`."""
    pieces = _pieces(query, key.shape[1])
    even = key.shape[1] - key.shape[1] % pieces
    cut = (states[:, :even].unflatten(1, (pieces, -1)) for states in (key, value))
    parts = [_kernel(query.expand(-1, pieces, -1, -1), *cut, scale=scaling)]
    if even < key.shape[1]:
        rest = (states[:, None, even:] for states in (key, value))
        parts.append(_kernel(query, *rest, scale=scaling))
    return parts


def _pieces(query: torch.Tensor, keys: int) -> int:
    """Into how many pieces so many keys are cut, to give every thread a share of `query`.

    The kernel shares out the first two dimensions and blocks of 32 queries or more, never the keys.
    """
    threads = torch.get_num_threads()
    tasks = query.shape[0] * query.shape[1] * math.ceil(query.shape[2] / 32)
    wanted = threads // math.gcd(threads, tasks) if tasks < 4 * threads else 1
    return max(1, min(wanted, keys // LEAST_KEYS))


def one_in_tiles(
    call: LayerCall,
    segment: Segment,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Attends for one query, `(B, Hq, 1, D)`, over un-rotated keys.

    They are rotated some at a time, and never held: what is held is one number per key and head.
    """
    plan, count = call.plan, key.shape[2]
    precise = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        queries = grouped(query, key).to(precise)
        scores = queries.new_empty((*queries.shape[:3], count))
        for start in range(0, count, ROTATED_AT_A_TIME):
            part = slice(start, start + ROTATED_AT_A_TIME)
            # Rounded like the keys of a rotated copy, for the same results.
            tables = (cos[:, part], sin[:, part])
            keys = rotate(key[:, :, part], *tables, plan.interleaved).to(key.dtype)
            scores[..., part] = queries @ keys.to(precise).mT
        scores *= call.scaling
        if plan.masks.needed(1, count, call.window):
            first = plan.masks.last_key(segment.stop) - count
            mask = plan.masks.of(segment.start, segment.stop, first, query, call.window)
            mask = grouped_mask(mask, query.shape[1] // key.shape[1])
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores += mask
        output = scores.softmax(-1).to(value.dtype) @ value
    return output.reshape(query.shape[0], 1, query.shape[1], -1)


def grouped(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Makes the query heads of a group more queries of their key head.

    Args:
        query: `(B, Hq, T, D)`.
        key: `(B, Hkv, K, D)`.

    Returns:
        `(B, Hkv, Hq / Hkv * T, D)`.
    """
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])


def grouped_mask(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """The mask `(B or 1, Hq or 1, T, K)` of the queries that `grouped` makes."""
    if mask.shape[1] > 1:
        return mask.reshape(mask.shape[0], mask.shape[1] // groups, -1, mask.shape[-1])
    return mask.repeat(1, 1, groups, 1)
