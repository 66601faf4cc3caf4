"""Attention over un-rotated keys: every query rotates itself and the keys it sees at its own scale.

Once per forward call, `make_plan` resolves the position of every token and cuts the new tokens into
segments of columns in which no row's scale changes. Each layer takes one segment after the other:
it rotates the keys up to the segment's end and the segment's queries at that scale, row by row, and
hands both to a stock backend (eager, sdpa, flash).

Keys that are rotated already stay so while the scale of their row does, within a call and, in the
cache's rotated copy, from call to call. Masks are built per tile of a segment, never for the whole
call, and not at all where a causal or a full kernel says the same.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import versions
from .cache import (
    ROTATED_AT_A_TIME,
    DynamicYaRNCache,
    RotatedKeys,
    document_starts,
    last_positions,
)
from .rope import Schedule, rotary_tables, rotate

# The name by which transformers finds `dynamic_yarn_attention`. With "flash" in it, it would be
# taken for a kernel on the Hub.
ATTENTION_NAME = "dynamic_yarn"

# Rows of a mask, query heads of a group included: over 128k keys it takes 256 MiB in bfloat16.
TILE = 1024

# Keys that a thread of the CPU takes at least: with fewer, merging costs more than it saves.
LEAST_KEYS = 2048

# What `scaled_dot_product_attention` runs on a CPU, which hides the log-sum-exp that it returns.
_cpu_kernel: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Segment:
    """Columns `[start, stop)` of the new tokens.

    In these, each row has one scale and sees no key before `first`.
    """

    start: int
    stop: int
    first: int
    scales: list[float]  # of each row
    inv_freq: torch.Tensor  # (B, D/2) float32, on the CPU
    gain: torch.Tensor  # (B,) float32, on the CPU
    trained: bool  # whether of `AttentionPlan.trained_segments`


@dataclass(eq=False)
class AttentionPlan:
    """What every layer of one forward call needs to know; made by `make_plan`.

    Attributes:
        schedule: the schedule in force.
        cut_trained: makes the segments of layers that keep the scale they were trained at.
        cache: what the call fills, or None.
        held: `(B, P)`, positions of the keys held before, -1 where padding.
        new: `(B, T)`, positions of the new tokens, likewise.
        segments: cover the new tokens from left to right.
        unrotated: indices of the layers that rotate nothing.
        interleaved: how the pairs of a head lie, see `rotate`.
        visible: `(B, P + T)` bool, False where a key is padding; None where none is.
        documents: `(B, P + T)` number of each key's document; None where `Segment.first` tells
            them apart.
        packed: whether a row holds several documents.
        custom_mask: the caller's `(B, H, T, P + T)` mask, bool (True: attend) or additive, in
            place of causality and padding.
        backend: transformers' name of the attention implementation.
        output_attentions: whether the weights are wanted.
    """

    schedule: Schedule
    cut_trained: Callable[[], list[Segment]]
    cache: DynamicYaRNCache | None
    held: torch.Tensor
    new: torch.Tensor
    segments: list[Segment]
    unrotated: frozenset[int]
    interleaved: bool
    visible: torch.Tensor | None
    documents: torch.Tensor | None
    packed: bool
    custom_mask: torch.Tensor | None
    backend: str
    output_attentions: bool

    def __post_init__(self) -> None:
        self.past = self.held.shape[1]
        self.total = self.past + self.new.shape[1]
        self._tables: dict[bool, tuple[Segment, dict[object, Tables]]] = {}
        self._scratch: dict[torch.device, RotatedKeys] = {}
        self._tail: tuple[object, torch.Tensor] | None = None

    @cached_property
    def positions(self) -> torch.Tensor:
        """Of all keys, `(B, P + T)`. Made when first asked for: a step mostly does without."""
        return torch.cat((self.held, self.new), dim=1)

    @cached_property
    def trained_segments(self) -> list[Segment]:
        """Segments for layers that keep the scale they were trained at."""
        return self.cut_trained()

    def last_key(self, stop: int) -> int:
        """End of the keys that new tokens up to `stop` may see: causal, unless by a custom mask."""
        return self.total if self.custom_mask is not None else self.past + stop

    def tables(
        self,
        segment: Segment,
        device: torch.device,
        dtype: torch.dtype,
        row: int | None,
        first: int,
        last: int,
    ) -> Tables:
        """Gives cos and sin of keys `[first, last)` at the segment's scales, for all layers.

        Args:
            segment: the segment.
            device: of the result.
            dtype: of the result.
            row: one row, or None for all.
            first: first key.
            last: key after the last one.

        Returns:
            cos and sin, `(B or 1, last - first, D/2)` each.
        """
        # A call of many segments keeps the tables of one, and of one for layers as trained.
        owner, tables = self._tables.get(segment.trained, (None, {}))
        if owner is not segment:
            tables = {}
            self._tables[segment.trained] = (segment, tables)
        wanted = (device, dtype, row, first, last)
        if wanted not in tables:
            rows = slice(None) if row is None else slice(row, row + 1)
            new_only = first >= self.past
            positions = self.new if new_only else self.positions
            offset = self.past if new_only else 0
            tables[wanted] = rotary_tables(
                positions[rows, first - offset : last - offset].to(device),
                # From the CPU: without waiting for what the device still has to do.
                segment.inv_freq[rows].to(device, non_blocking=True),
                segment.gain[rows].to(device, non_blocking=True),
                dtype,
            )
        return tables[wanted]

    def segments_of(self, layer: nn.Module, window: int | None) -> list[Segment]:
        """The segments of a layer.

        A layer that rotates nothing, or whose window lies within the trained one, so that no pair
        is ever farther apart than in training, has its queries at one scale.

        Args:
            layer: an attention layer.
            window: how many keys a query of the layer sees, or None for all.
        """
        within = window is not None and window <= self.schedule.original_max_position_embeddings
        if layer.layer_idx in self.unrotated or (within and not self.schedule.per_forward):
            return self.trained_segments
        return self.segments

    def rotated_copy(self, layer: nn.Module) -> RotatedKeys | None:
        """An attention layer's rotated keys in the cache, if it keeps any."""
        if self.cache is None:
            return None
        copy: RotatedKeys | None = self.cache.layers[layer.layer_idx].rotated
        return copy

    def scratch(self, device: torch.device) -> RotatedKeys:
        """A place for the rotated keys of one layer, for this call alone."""
        scratch = self._scratch.setdefault(device, RotatedKeys())
        scratch.forget()  # another layer's keys
        return scratch

    def first_key(self, start: int, first: int, window: int | None) -> int:
        """First key that new token `start` may see, of those from `first` on.

        Args:
            start: the new token.
            first: first key of its segment.
            window: how many keys a query sees, or None for all. A custom mask has its own.
        """
        if window is None or self.custom_mask is not None:
            return first
        return max(first, self.past + start - window + 1)

    def needs_mask(self, queries: int, keys: int, window: int | None = None) -> bool:
        """Whether a full kernel or a causal one would see the wrong keys.

        A full kernel serves one query, a causal kernel as many queries as keys.
        """
        if not self.plainly_causal:
            return True
        cut = window is not None and keys > window
        return queries > 1 and (queries != keys or cut or self.backend == "eager")

    @property
    def plainly_causal(self) -> bool:
        """Whether every token sees all that came before it, and nothing else."""
        return self.custom_mask is None and self.visible is None and self.documents is None

    def tail_mask(
        self, queries: int, groups: int, like: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """Causal mask, additive, of queries that are the last keys, repeated for each of `groups`.

        It is wide enough for all keys: its last columns serve any tile of as many queries, so that
        the segments and layers of a call share it.

        Args:
            queries: number of queries.
            groups: query heads of a key head.
            like: gives the device and the dtype.
            window: how many keys a query sees, or None for all.

        Returns:
            `(1, 1, groups * queries, P + T)`
        """
        wanted = (queries, groups, window, like.device, like.dtype)
        if self._tail is None or self._tail[0] != wanted:
            mask = like.new_zeros((groups, queries, self.total))
            hidden = like.new_full((queries, queries), -torch.inf).triu(1)
            mask[:, :, self.total - queries :] = hidden
            if window is not None:
                hidden = like.new_full((queries, self.total), -torch.inf)
                mask += hidden.tril(self.total - queries - window)
            self._tail = (wanted, mask.view(1, 1, groups * queries, self.total))
        return self._tail[1]

    def mask(
        self, start: int, stop: int, first: int, like: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """Mask of new tokens `[start, stop)` over keys `[first, last_key(stop))`.

        Args:
            start: first new token.
            stop: new token after the last one.
            first: first key.
            like: gives the device, and the dtype where the mask is additive.
            window: how many keys a query sees, or None for all.

        Returns:
            `(B or 1, H or 1, queries, keys)`, True where a query attends; additive where the
            caller's own is, or for eager.
        """
        last = self.last_key(stop)
        lowest = torch.finfo(like.dtype).min
        if self.custom_mask is not None:
            mask = self.custom_mask[:, :, start:stop, first:last].to(like.device)
        else:
            mask = self._causal_mask(start, stop, first, last, window, like.device)
        if mask.dtype != torch.bool:
            # Clamped, since the lowest number of a wider dtype would become -inf, and rows of these
            # NaN.
            return mask.clamp(min=lowest).to(like.dtype)
        if self.backend == "eager":
            return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, lowest)
        return mask

    def _causal_mask(
        self,
        start: int,
        stop: int,
        first: int,
        last: int,
        window: int | None,
        device: torch.device,
    ) -> torch.Tensor:
        query_index = torch.arange(self.past + start, self.past + stop, device=device)[:, None]
        key_index = torch.arange(first, last, device=device)
        allowed = (key_index <= query_index)[None]  # (1, queries, keys)
        if window is not None:
            allowed = allowed & (key_index > query_index - window)
        if self.documents is not None:
            documents = self.documents.to(device)
            of_queries = documents[:, self.past + start : self.past + stop, None]
            allowed = allowed & (documents[:, None, first:last] == of_queries)
        if self.visible is not None:
            # A padding token sees itself: a row of the mask without any key would give NaN.
            visible = self.visible[:, None, first:last].to(device)
            allowed = allowed & (visible | (key_index == query_index))
        return allowed[:, None]


def make_plan(
    schedule: Schedule,
    cache: DynamicYaRNCache | None,
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    backend: str,
    output_attentions: bool,
    unrotated: frozenset[int] = frozenset(),
    interleaved: bool = False,
    windowed: Schedule | None = None,
) -> AttentionPlan:
    """Resolves positions, padding, documents and scales of one forward call.

    The position of a new token is its `position_ids`; without them, one more than that of the
    token before it in its row that is not padding. Where there is no mask, a position that does not
    follow the one before it starts a new document, by transformers' own rule, and the new document
    sees nothing of the old.

    Synchronises with the device once.

    Args:
        schedule: the schedule in force.
        cache: what the call continues, or None. Only read.
        inputs: `input_ids` or `inputs_embeds`, `(B, T, ...)`.
        attention_mask: `(B, P + T)` with 0 for padding, or `(B or 1, H or 1, T, P + T)` bool or
            additive, or None. `P` counts the tokens in the cache.
        position_ids: `(B or 1, T)` or None.
        backend: transformers' name of the attention implementation.
        output_attentions: whether the weights are wanted.
        unrotated: indices of the layers that rotate nothing.
        interleaved: how the pairs of a head lie, see `rotate`.
        windowed: the schedule of layers that keep the scale they were trained at, where these were
            trained with other frequencies. Default: `schedule`.

    Raises:
        TypeError: the mask or the positions are of another type.
        ValueError: the mask or the positions do not fit the call, or the backend cannot take them.
    """
    batch, length = inputs.shape[:2]
    if batch == 0 or length == 0:
        raise ValueError(
            f"a call must have at least one row and at least one token, got {(batch, length)}."
        )
    held = torch.empty((batch, 0), dtype=torch.long, device=inputs.device)
    if cache is not None and cache.positions is not None:
        held = cache.positions.to(inputs.device)
    past = held.shape[1]
    was_packed = cache is not None and cache.packed
    padding, custom_mask = _split_mask(attention_mask, batch, length, past + length, inputs.device)
    if was_packed and padding is not None:
        raise ValueError(
            "a cache of packed documents must be continued without a 2-D attention_mask, which "
            "cannot tell them apart, got one (generate() always makes one). Call the model itself "
            "with position_ids, or start a new cache."
        )
    newest, positions = _positions(held, padding, position_ids, length)
    visible = padding
    if visible is None:
        visible = torch.cat((held >= 0, torch.ones_like(positions, dtype=torch.bool)), dim=1)
    on_host, all_visible = _read_back(held, newest, positions, visible, custom_mask is not None)
    starts = documents = None
    if attention_mask is None:
        starts = _starts(on_host, past)
        starts = starts if was_packed or starts.any() else None
    cut = partial(_segments, positions=on_host[:, 1:], starts=starts, past=past)
    segments = cut(schedule, trained=False)
    if starts is not None and not _told_apart(segments, starts, past, was_packed):
        before = document_starts(held) if was_packed else torch.zeros_like(held, dtype=torch.bool)
        documents = torch.cat((before, starts.to(held.device)), dim=1).cumsum(-1)
    if "flash" in backend and not (custom_mask is None and documents is None):
        packed = "packed documents in several rows or in a cache"
        raise ValueError(
            f"attention_mask and position_ids must be such that {backend} can follow them, got "
            f"{packed if custom_mask is None else 'a 4-D attention_mask'}. Call "
            'model.set_attn_implementation("sdpa") first.'
        )
    return AttentionPlan(
        schedule=schedule,
        cut_trained=partial(cut, windowed or schedule, trained=True),
        cache=cache,
        held=held,
        new=torch.where(visible[:, past:], positions, -1),
        segments=segments,
        unrotated=unrotated,
        interleaved=interleaved,
        visible=None if all_visible else visible,
        documents=documents,
        packed=was_packed or starts is not None,
        custom_mask=custom_mask,
        backend=backend,
        output_attentions=output_attentions,
    )


# First key, output `(B, T, Hq, D)`, and weights `(B, Hq, T, K)` or None, of some of the queries.
Attended = tuple[int, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class _Call:
    """One layer's part in a forward call."""

    module: nn.Module
    plan: AttentionPlan
    scaling: float
    dropout: float
    window: int | None  # how many keys a query sees; None for all


@torch.compiler.disable
def dynamic_yarn_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    dynamic_yarn_plan: AttentionPlan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function that transformers calls in each layer of a patched model.

    Args:
        module: the attention layer.
        query: `(B, Hq, T, D)`, un-rotated.
        key: `(B, Hkv, L, D)`, un-rotated, those of the cache included.
        value: `(B, Hkv, L, D)`.
        attention_mask: unread; the plan has it.
        scaling: factor on the logits.
        dropout: probability of dropping a weight.
        sliding_window: how many keys a query sees, itself included; None for all.
        dynamic_yarn_plan: the plan of this forward call.
        **kwargs: what transformers passes beside, unread.

    Returns:
        The output `(B, T, Hq, D)`, and the weights `(B, Hq, T, L)` if they are wanted and the
        backend is eager, else None.

    Raises:
        ValueError: there is no plan, or the keys are not those that were planned for.
    """
    plan = dynamic_yarn_plan
    if plan is None:
        raise ValueError(
            "a patched attention layer must be called by its patched decoder, got a call without a "
            "plan. Call the model, not its layers or its forward()."
        )
    if key.shape[2] != plan.total:
        raise ValueError(
            f"layer {module.layer_idx} must attend over {plan.total} keys, got {key.shape[2]}: it "
            "left the cache out. Call model.eval(), or pass use_cache=False."
        )
    call = _Call(module, plan, scaling, dropout, sliding_window)
    outputs, weights = [], []
    for first, output, weight in _attend(call, query, key, value):
        outputs.append(output)
        if weight is not None and plan.output_attentions:
            missing = (first, plan.total - first - weight.shape[-1])
            weights.append(nn.functional.pad(weight, missing))
    return torch.cat(outputs, dim=1), torch.cat(weights, dim=2) if weights else None


def _attend(
    call: _Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
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
    rotated = copy or plan.scratch(key.device)
    tiled = copy is None and plan.backend == "sdpa" and not (differentiable or call.dropout > 0)
    backend = _flash if "flash" in plan.backend else _eager_or_sdpa
    for segment in plan.segments_of(call.module, call.window):
        first = plan.first_key(segment.start, segment.first, call.window)
        last = plan.last_key(segment.stop)
        tables = partial(plan.tables, segment, key.device, dtype)
        queries = query[:, :, segment.start : segment.stop]
        keys, values = key[:, :, first:last], value[:, :, first:last]
        if rotates:
            own = tables(None, plan.past + segment.start, plan.past + segment.stop)
            queries = rotate(queries, *own, plan.interleaved)
        if rotates and tiled and queries.shape[2] == 1:
            cos, sin = tables(None, first, last)
            yield first, _one_in_tiles(call, segment, queries, keys, values, cos, sin), None
            continue
        if rotates and differentiable:
            keys = rotate(keys, *tables(None, first, last), plan.interleaved)
        elif rotates:
            scales = segment.scales
            keys = rotated.advance(key, first, last, scales, tables, plan.interleaved)
        yield from backend(call, segment, first, queries, keys, values)


def _eager_or_sdpa(
    call: _Call,
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
    needs_mask = plan.needs_mask(query.shape[2], key.shape[2], window)
    cut = window is not None and key.shape[2] > window
    if plan.plainly_causal and not cut and _goes_in_parts(call, query, key, value):
        yield first, _sdpa_in_parts(call.scaling, query, key, value), None
        return
    groups = query.shape[1] // key.shape[1]
    tile = max(1, TILE // groups) if needs_mask else query.shape[2]
    for start in range(segment.start, segment.stop, tile):
        stop = min(start + tile, segment.stop)
        queries = query[:, :, start - segment.start : stop - segment.start]
        begin, end = plan.first_key(start, first, window), plan.last_key(stop)
        keys, values = (states[:, :, begin - first : end - first] for states in (key, value))
        if plan.backend == "sdpa" and (needs_mask or stop - start == 1):
            mask = None
            if needs_mask and plan.plainly_causal:
                mask = plan.tail_mask(stop - start, groups, queries, window)
                mask = mask[..., begin - end :]
            elif needs_mask:
                mask = plan.mask(start, stop, begin, query, window)
                mask = _grouped_mask(mask, groups)
            yield begin, _grouped_sdpa(call, queries, keys, values, mask), None
        else:
            mask = plan.mask(start, stop, begin, query, window) if needs_mask else None
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


def _family_eager(layer: type) -> Callable[..., Any]:
    """Eager attention of a layer's family, which transformers does not register but each has."""
    modules = (sys.modules[base.__module__] for base in layer.__mro__)
    found = (getattr(module, "eager_attention_forward", None) for module in modules)
    attention: Callable[..., Any] = next(function for function in found if function is not None)
    return attention


def _grouped_sdpa(
    call: _Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attends by sdpa without repeating a key for each query head of its group, mask grouped."""
    batch, heads, queries, _ = query.shape
    output = scaled_dot_product_attention(
        _grouped(query, key),
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout,
        scale=call.scaling,
    )
    return output.reshape(batch, heads, queries, -1).transpose(1, 2)


def _goes_in_parts(
    call: _Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Whether `_sdpa_in_parts` can and should attend for queries that see all before them."""
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
    return _has_cpu_kernel(query, key, value) and (
        queries > 1 or _pieces(_grouped(query, key), keys) > 1
    )


def _has_cpu_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether sdpa would run `_cpu_kernel`: torch's own word on dtypes, sizes and strides."""
    if _cpu_kernel is None or query.device.type != "cpu":
        return False
    choice: int = torch._fused_sdp_choice(_grouped(query, key), key, value)
    return choice == SDPBackend.FLASH_ATTENTION.value


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
    if queries < keys and _has_cpu_kernel(query, key, value):
        return _sdpa_in_parts(scaling, query, key, value)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_lower_right(queries, keys),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def _sdpa_in_parts(
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
        parts.append(_cpu_kernel(apart, *own, is_causal=True, scale=scaling))
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
    parts = [_cpu_kernel(query.expand(-1, pieces, -1, -1), *cut, scale=scaling)]
    if even < key.shape[1]:
        rest = (states[:, None, even:] for states in (key, value))
        parts.append(_cpu_kernel(query, *rest, scale=scaling))
    return parts


def _pieces(query: torch.Tensor, keys: int) -> int:
    """Into how many pieces so many keys are cut, to give every thread a share of `query`.

    The kernel shares out the first two dimensions and blocks of 32 queries or more, never the keys.
    """
    threads = torch.get_num_threads()
    tasks = query.shape[0] * query.shape[1] * math.ceil(query.shape[2] / 32)
    wanted = threads // math.gcd(threads, tasks) if tasks < 4 * threads else 1
    return max(1, min(wanted, keys // LEAST_KEYS))


def _one_in_tiles(
    call: _Call,
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
        queries = _grouped(query, key).to(precise)
        scores = queries.new_empty((*queries.shape[:3], count))
        for start in range(0, count, ROTATED_AT_A_TIME):
            part = slice(start, start + ROTATED_AT_A_TIME)
            # Rounded like the keys of a rotated copy, for the same results.
            tables = (cos[:, part], sin[:, part])
            keys = rotate(key[:, :, part], *tables, plan.interleaved).to(key.dtype)
            scores[..., part] = queries @ keys.to(precise).mT
        scores *= call.scaling
        if plan.needs_mask(1, count, call.window):
            first = plan.last_key(segment.stop) - count
            mask = plan.mask(segment.start, segment.stop, first, query, call.window)
            mask = _grouped_mask(mask, query.shape[1] // key.shape[1])
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores += mask
        output = scores.softmax(-1).to(value.dtype) @ value
    return output.reshape(query.shape[0], 1, query.shape[1], -1)


def _grouped(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Makes the query heads of a group more queries of their key head.

    Args:
        query: `(B, Hq, T, D)`.
        key: `(B, Hkv, K, D)`.

    Returns:
        `(B, Hkv, Hq / Hkv * T, D)`.
    """
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])


def _grouped_mask(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """The mask `(B or 1, Hq or 1, T, K)` of the queries that `_grouped` makes."""
    if mask.shape[1] > 1:
        return mask.reshape(mask.shape[0], mask.shape[1] // groups, -1, mask.shape[-1])
    return mask.repeat(1, 1, groups, 1)


def _flash(
    call: _Call,
    segment: Segment,
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Iterator[Attended]:
    """Attends by a flash kernel, whose causal mask is aligned to the last key as ours is."""
    plan = call.plan
    visible = None
    if plan.visible is not None:
        visible = plan.visible[:, first : plan.last_key(segment.stop)].to(query.device)
        # A row that is still all padding shows its last token: a kernel may fail without any key.
        newest = visible[:, -1:] | ~visible.any(-1, keepdim=True)
        visible = torch.cat((visible[:, :-1], newest), dim=1)
    output = versions.flash_attention(
        plan.backend,
        query.transpose(1, 2).to(value.dtype),
        key.transpose(1, 2).to(value.dtype),
        value.transpose(1, 2),
        visible,
        query_length=query.shape[2],
        is_causal=True,
        dropout=call.dropout,
        softmax_scale=call.scaling,
        sliding_window=call.window,
    )
    yield first, output, None


def _split_mask(
    attention_mask: torch.Tensor | None, batch: int, length: int, total: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Checks the caller's mask; returns it as `(padding, None)` if 2-D, `(None, mask)` if 4-D."""
    if attention_mask is None:
        return None, None
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(
            f"attention_mask must be a torch.Tensor or None, got {type(attention_mask).__name__}. "
            "Pass one of these, or leave a model unpatched that makes others of its images."
        )
    shape = tuple(attention_mask.shape)
    if shape == (batch, total):
        return attention_mask.to(device=device, dtype=torch.bool), None
    if len(shape) == 4 and shape[0] in (1, batch) and shape[2:] == (length, total):
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise TypeError(
                f"a 4-D attention_mask must be bool or floating point, got {attention_mask.dtype}."
            )
        return None, attention_mask
    raise ValueError(
        "attention_mask must be (batch, tokens in the cache + new tokens) = "
        f"{(batch, total)}, or 4-D {(batch, 'heads or 1', length, total)}, got {shape}."
    )


def _positions(
    held: torch.Tensor,
    padding: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Newest position in each row of the cache, `(B,)`, and those of the new tokens, `(B, T)`."""
    batch, past = held.shape
    newest = last_positions(held) if past else held.new_full((batch,), -1)
    if position_ids is None:
        count = held.new_ones((batch, length)) if padding is None else padding[:, past:]
        return newest, newest[:, None] + count.cumsum(-1)
    if not isinstance(position_ids, torch.Tensor) or position_ids.is_floating_point():
        raise TypeError(f"position_ids must be an integer torch.Tensor, got {position_ids!r}.")
    if tuple(position_ids.shape) not in ((1, length), (batch, length)):
        raise ValueError(
            f"position_ids must be (batch or 1, new tokens) = {(batch, length)}, got "
            f"{tuple(position_ids.shape)}."
        )
    return newest, position_ids.to(held).expand(batch, length)


def _read_back(
    held: torch.Tensor,
    newest: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
    custom: bool,
) -> tuple[torch.Tensor, bool]:
    """Brings what the CPU has to know from the device, the one synchronisation of a call.

    Args:
        held: `(B, P)`, positions in the cache.
        newest: `(B,)`, the newest of each row.
        positions: `(B, T)`, of the new tokens.
        visible: `(B, P + T)`, False where padding.
        custom: whether the mask is the caller's own, which says nothing of padding.

    Returns:
        `(B, 1 + T)`, the newest position held and those of the new tokens, -1 where padding; and
        whether there is no padding.

    Raises:
        ValueError: the mask shows padding of the cache, or a position is negative.
    """
    past, (batch, length) = held.shape[1], positions.shape
    shows_padding = (visible[:, :past] & (held < 0)).any()
    negative = ((positions < 0) & visible[:, past:]).any()
    flags = torch.stack((visible.all(), shows_padding, negative))
    shown = torch.where(visible[:, past:], positions, -1)
    host = torch.cat((newest, shown.T.flatten(), flags)).cpu()
    all_visible, shows_padding, negative = host[-3:].bool().tolist()
    if shows_padding:
        raise ValueError(
            "attention_mask must be 0 where it was 0 when the cache was filled, got one that shows "
            "padding. Pass the mask of all tokens since the first call, or none."
        )
    if negative and not custom:
        raise ValueError(
            "position_ids must be at least 0 where attention_mask is not 0, got negative ones. "
            "Leave them out, or mask the padding."
        )
    return host[:-3].view(length + 1, batch).T, all_visible


def _starts(positions: torch.Tensor, past: int) -> torch.Tensor:
    """Which new tokens start a document after another, `(B, T)`.

    Args:
        positions: `(B, 1 + T)`, the newest held ones before the new ones.
        past: number of keys held.

    Returns:
        `(B, T)` bool.

    Raises:
        ValueError: the new tokens neither go on from the cache nor start a document at 0.
    """
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if past == 0:
        starts[:, 0] = False  # nothing lies before it
    elif (starts[:, 0] & (positions[:, 1] != 0)).any():
        raise ValueError(
            "position_ids must go on from the tokens in the cache, at "
            f"{(positions[:, 0] + 1).tolist()}, or start a document at 0, got "
            f"{positions[:, 1].tolist()}. Leave them out, or pass the attention_mask of all tokens."
        )
    return starts


def _segments(
    schedule: Schedule,
    positions: torch.Tensor,
    starts: torch.Tensor | None,
    past: int,
    trained: bool,
) -> list[Segment]:
    """Cuts the new tokens where any row's scale changes or any row starts a document.

    Args:
        schedule: the schedule in force.
        positions: `(B, T)`, of the new tokens, on the CPU.
        starts: `(B, T)`, which of them start a document, or None.
        past: number of keys held.
        trained: whether all are at the scale that the model was trained at.
    """
    if trained:
        scale = torch.full_like(positions, schedule.min_scale, dtype=torch.float64)
    else:
        scale = _over_padding(schedule.scale(positions), positions >= 0)
    cuts = (scale[:, 1:] != scale[:, :-1]).any(0)
    first = torch.zeros_like(positions)
    if starts is not None:
        cuts |= starts[:, 1:].any(0)
        first = _first_keys(starts, past)
    begins = [0, *(cuts.nonzero()[:, 0] + 1).tolist()]
    stops = [*begins[1:], positions.shape[1]]
    first, scale = first[:, begins].amin(0), scale[:, begins]
    inv_freq, gain = schedule.inv_freq(scale), schedule.gain(scale)
    return [
        Segment(
            start,
            stop,
            int(first[i]),
            scale[:, i].tolist(),
            inv_freq[:, i],
            gain[:, i],
            trained,
        )
        for i, (start, stop) in enumerate(zip(begins, stops, strict=True))
    ]


def _first_keys(starts: torch.Tensor, past: int) -> torch.Tensor:
    """First key of each new token's document, 0 where it began in an earlier call: `(B, T)`."""
    keys = past + torch.arange(starts.shape[1])
    return torch.where(starts, keys, 0).cummax(-1).values


def _told_apart(segments: list[Segment], starts: torch.Tensor, past: int, was_packed: bool) -> bool:
    """Whether `Segment.first` alone keeps every row to its own document."""
    first = _first_keys(starts, past)[:, [segment.start for segment in segments]]
    unknown = was_packed and bool((first == 0).any())
    return not unknown and bool((first == first[:1]).all())


def _over_padding(scale: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Gives padding the scale of the token before it, else after it, so that it cuts nothing."""
    columns = torch.arange(scale.shape[1])
    before = torch.where(valid, columns, -1).cummax(-1).values
    after = valid.long().argmax(-1, keepdim=True)
    return scale.gather(1, torch.where(before < 0, after, before))
