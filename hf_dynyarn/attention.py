"""Attention over un-rotated keys: every query rotates itself and the keys it sees at its own scale.

A layer takes one segment of its call's plan after the other: it rotates the keys up to the
segment's end and the segment's queries at that scale, row by row, and hands both to a backend.
Keys that are rotated already stay so while the scale of their row does, within a call and, in the
cache's rotated copy, from call to call.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from .backends import Attended, cpu, flash, fused, sdpa
from .graphs import outside_graphs
from .plan import AttentionPlan, LayerCall
from .rope import rotate
from .segments import Segment
from .step import Step

# The name by which transformers finds `dynamic_yarn_attention`. With "flash" in it, it would be
# taken for a kernel on the Hub.
ATTENTION_NAME = "dynamic_yarn"


def dynamic_yarn_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    dynamic_yarn_plan: AttentionPlan | Step | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function that transformers calls in each layer of a patched model.

    Args:
        module: the attention layer.
        query: `(B, Hq, T, D)`, un-rotated.
        key: `(B, Hkv, L, D)`, un-rotated, those of the cache included.
        value: `(B, Hkv, L, D)`.
        attention_mask: the one that stands for the plan's, without any number.
        scaling: factor on the logits.
        dropout: probability of dropping a weight.
        sliding_window: how many keys a query sees, itself included; None for all. Read where the
            plan does not say.
        dynamic_yarn_plan: the plan of this forward call, or the step that it is.
        **kwargs: what transformers passes beside, unread.

    Returns:
        The output `(B, T, Hq, D)`, and the weights `(B, Hq, T, L)` if they are wanted and the
        backend is eager, else None.

    Raises:
        ValueError: there is no plan, or the keys or the mask are not those that were planned for.
    """
    if dynamic_yarn_plan is None:
        raise ValueError(
            "a patched attention layer must be called by its patched decoder, got a call without a "
            "plan. Call the model, not its layers or its forward()."
        )
    if attention_mask is None or attention_mask.numel() > 0:
        raise ValueError(
            f"layer {module.layer_idx} must get the mask that the model was called with, got "
            f"{'none' if attention_mask is None else tuple(attention_mask.shape)} from the model's "
            "own code. Pass it to the model as a 4-D attention_mask, or leave the model unpatched."
        )
    states = (query, key, value)
    if isinstance(dynamic_yarn_plan, Step):
        return dynamic_yarn_plan.attend(module, *states, scaling, sliding_window), None
    window = dynamic_yarn_plan.window_of(module, sliding_window)
    call = LayerCall(module, dynamic_yarn_plan, scaling, dropout, window)
    return _attend_as_planned(call, *states)


@outside_graphs
def _attend_as_planned(
    call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    plan = call.plan
    _check_planned_for(call, key)
    outputs, parts = [], []
    for first, output, weights in _attend(call, query, key, value):
        outputs.append(output)
        if weights is not None and plan.output_attentions:
            parts.append((first, weights))
    output = torch.cat(outputs, dim=1)
    if not parts:
        return output, None
    whole = _over_all_keys(parts, plan.total)
    if whole is not parts[0][1] and whole.requires_grad:
        # The output must come from the weights that are returned, for these to have a gradient.
        apart = whole.unflatten(1, (value.shape[1], -1)) @ value[:, :, None]  # (B, Hkv, G, T, D)
        output = apart.flatten(1, 2).transpose(1, 2)
    return output, whole


def _check_planned_for(call: LayerCall, key: torch.Tensor) -> None:
    plan, index = call.plan, call.module.layer_idx
    if plan.past and plan.cache is not None and not plan.cache.is_open_to(plan):
        raise ValueError(
            f"layer {index}, which runs again in a backward pass, must have been called "
            f"without a filled cache, got one with {plan.past} tokens. Pass the whole text and "
            "use_cache=False, or leave checkpointing out."
        )
    if key.shape[2] != plan.total:
        raise ValueError(
            f"layer {index} must attend over {plan.total} keys, got {key.shape[2]}: it "
            "left the cache out. Call model.eval(), or pass use_cache=False."
        )


def _over_all_keys(parts: list[tuple[int, torch.Tensor]], total: int) -> torch.Tensor:
    """The weights `(B, Hq, T, L)` of all queries, of the first key and the weights of some each."""
    if len(parts) == 1 and parts[0][1].shape[-1] == total:
        return parts[0][1]
    padded = [
        nn.functional.pad(weights, (first, total - first - weights.shape[-1]))
        for first, weights in parts
    ]
    return torch.cat(padded, dim=2)


def _attend(
    call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Iterator[Attended]:
    """Rotates, and attends segment by segment; all arguments are those of the whole call."""
    plan = call.plan
    # Under autocast the stock model rotates in float32 and the backend casts; so do we.
    autocast = torch.is_autocast_enabled(query.device.type)
    dtype = torch.float32 if autocast else query.dtype
    # In a buffer, rotated keys would be overwritten before a backward pass reads them.
    differentiable = torch.is_grad_enabled() and any(
        states.requires_grad for states in (query, key, value)
    )
    rotates = call.module.layer_idx not in plan.unrotated
    copy = plan.rotated_copy(call.module)
    rotated = copy or plan.workspace.scratch(key.device)
    tiled = copy is None and plan.backend == "sdpa" and not (differentiable or call.dropout > 0)
    backend = flash.attend if "flash" in plan.backend else sdpa.attend
    for segment in plan.segments_of(call.module, call.window):
        first = plan.masks.first_key(segment.start, segment.first, call.window)
        last = plan.masks.last_key(segment.stop)
        tables = partial(plan.workspace.tables, segment, key.device, dtype)
        queries = query[:, :, segment.start : segment.stop]
        if rotates and tiled and _goes_to_kernel(call, segment, query, key):
            yield first, _by_kernel(call, segment, query, key, value), None
            continue
        keys, values = key[:, :, first:last], value[:, :, first:last]
        if rotates:
            own = tables(None, plan.past + segment.start, plan.past + segment.stop)
            queries = rotate(queries, *own, plan.interleaved)
        if rotates and tiled and queries.shape[2] == 1:
            cos, sin = tables(None, first, last)
            yield first, cpu.one_in_tiles(call, segment, queries, keys, values, cos, sin), None
            continue
        if rotates and differentiable:
            keys = rotate(keys, *tables(None, first, last), plan.interleaved)
        elif rotates:
            scales = segment.scales
            keys = rotated.advance(key, first, last, scales, tables, plan.interleaved)
        yield from backend(call, segment, first, queries, keys, values)


def _goes_to_kernel(
    call: LayerCall, segment: Segment, query: torch.Tensor, key: torch.Tensor
) -> bool:
    """Whether the fused kernel can attend for a segment, over keys of which there is no copy."""
    return (
        fused.has_kernels(key.device.type)
        and segment.stop - segment.start <= fused.MOST_QUERIES
        and query.dtype == key.dtype
        and call.plan.left_padding is not None
    )


def _by_kernel(
    call: LayerCall,
    segment: Segment,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attends for a segment by the fused kernel: all states un-rotated, those of the whole call."""
    plan, device = call.plan, key.device
    padding = plan.left_padding
    starts = key.new_zeros(len(key), dtype=torch.long) if padding is None else padding.to(device)
    scale, inv_freq, gain = plan.workspace.turn(segment, device)
    return fused.decode(
        query[:, :, segment.start : segment.stop],
        key,
        value,
        call.scaling,
        torch.full_like(starts, plan.masks.last_key(segment.stop)),
        starts,
        scale,
        inv_freq,
        gain,
        window=call.window,
        interleaved=plan.interleaved,
    )
