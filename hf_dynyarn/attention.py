"""Attention over un-rotated keys: every query rotates itself and the keys it sees at its own scale.

Once per forward call, `make_plan` resolves the position of every token and cuts the new tokens into
segments of columns in which no row's scale changes. Each layer then takes one segment after the
other: it rotates the keys up to the segment's end and the segment's queries at that scale, row by
row, and hands both to a stock backend (eager, sdpa, flash). Masks are built per tile of a segment,
never for the whole call, and not at all where a causal or a full kernel says the same.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import DynamicYaRNCache, last_positions
from .rope import YaRNSchedule, rotary_tables, rotate

# Under this name transformers finds `dynamic_yarn_attention`. "flash" in a name would make it look
# for a hub kernel.
ATTENTION_NAME = "dynamic_yarn"

# Queries that share one mask: over 128k keys such a mask takes 64 MiB as bool.
TILE = 512


@dataclass(frozen=True)
class Segment:
    """Columns `[start, stop)` of the new tokens, in which each row has one scale and sees keys from `first` on."""

    start: int
    stop: int
    first: int
    inv_freq: torch.Tensor  # (B, D/2) float32, on the CPU
    gain: torch.Tensor  # (B,) float32, on the CPU


@dataclass(eq=False)
class AttentionPlan:
    """What every layer of one forward call needs to know; made by `make_plan`.

    Attributes:
        schedule: the schedule in force.
        positions: `(B, L)`, of all keys, -1 where padding. The last `length` columns are the new
            tokens.
        length: number of new tokens `T`.
        segments: cover the new tokens from left to right.
        visible: `(B, L)` bool, False where a key is padding; None where none is.
        documents: `(B, L)` number of each key's document; None where `Segment.first` tells them
            apart.
        packed: whether a row holds several documents.
        custom_mask: the caller's `(B, H, T, L)` mask, bool (True: attend) or additive, in place of
            causality and padding.
        backend: transformers' name of the attention implementation.
        output_attentions: whether the weights are wanted.
    """

    schedule: YaRNSchedule
    positions: torch.Tensor
    length: int
    segments: list[Segment]
    visible: torch.Tensor | None
    documents: torch.Tensor | None
    packed: bool
    custom_mask: torch.Tensor | None
    backend: str
    output_attentions: bool

    def __post_init__(self) -> None:
        self._tables: tuple[object, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def past(self) -> int:
        """Number of keys held before this call."""
        return self.positions.shape[1] - self.length

    def last_key(self, stop: int) -> int:
        """End of the keys that new tokens up to `stop` may see: causal, unless the caller's mask decides."""
        return self.positions.shape[1] if self.custom_mask is not None else self.past + stop

    def tables(
        self, segment: Segment, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, `(B, K, D/2)` each, of all keys the segment sees. The last result serves the next layer too."""
        wanted = (segment.start, device, dtype)
        if self._tables is None or self._tables[0] != wanted:
            positions = self.positions[:, segment.first : self.last_key(segment.stop)].to(device)
            tables = rotary_tables(
                positions, segment.inv_freq.to(device), segment.gain.to(device), dtype
            )
            self._tables = (wanted, tables)
        return self._tables[1]

    def needs_mask(self, queries: int, keys: int) -> bool:
        """Whether a full kernel (one query) or a causal kernel (as many queries as keys) would see the wrong keys."""
        if self.custom_mask is not None or self.visible is not None or self.documents is not None:
            return True
        return queries > 1 and (queries != keys or self.backend == "eager")

    def mask(self, start: int, stop: int, first: int, device: torch.device) -> torch.Tensor:
        """Mask of new tokens `[start, stop)` over keys `[first, last_key(stop))`.

        Returns:
            `(B or 1, H or 1, queries, keys)`, True where a query attends, or additive if the
            caller's own is.
        """
        last = self.last_key(stop)
        if self.custom_mask is not None:
            return self.custom_mask[:, :, start:stop, first:last].to(device)
        query_index = torch.arange(self.past + start, self.past + stop, device=device)[:, None]
        key_index = torch.arange(first, last, device=device)
        allowed = (key_index <= query_index)[None]  # (1, queries, keys)
        if self.documents is not None:
            documents = self.documents.to(device)
            of_queries = documents[:, self.past + start : self.past + stop, None]
            allowed = allowed & (documents[:, None, first:last] == of_queries)
        if self.visible is not None:
            # A padding token sees itself: a row of the mask without a single key would give NaN.
            allowed = allowed & (
                self.visible[:, None, first:last].to(device) | (key_index == query_index)
            )
        return allowed[:, None]


def make_plan(
    schedule: YaRNSchedule,
    cache: DynamicYaRNCache | None,
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    backend: str,
    output_attentions: bool,
) -> AttentionPlan:
    """Resolves positions, padding, documents and scales of one forward call.

    The position of a new token is its `position_ids`; without them, the number of tokens before it
    that a 2-D mask shows; without that, one more than the token before it. Where there is no mask,
    a position that does not follow the one before it starts a new document, by transformers' own
    rule, and the new document sees nothing of the old.

    Synchronises with the device once.

    Args:
        schedule: the schedule in force.
        cache: what the call continues, or None. Only read.
        inputs: `input_ids` or `inputs_embeds`, `(B, T, ...)`.
        attention_mask: `(B, L)` with 0 for padding, or `(B or 1, H or 1, T, L)` bool or additive,
            or None. `L` counts the tokens in the cache and the new ones.
        position_ids: `(B or 1, T)` or None.
        backend: transformers' name of the attention implementation.
        output_attentions: whether the weights are wanted.

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
            "a cache of packed documents must be continued without a 2-D attention_mask, which cannot tell them apart, "
            "got one (generate() always makes one). Call the model itself with position_ids, or start a new cache."
        )
    visible, newest, positions = _positions(held, padding, position_ids, length)
    negative = (positions < 0) & visible[:, past:]
    positions = torch.where(visible[:, past:], positions, -1)

    # The one synchronisation.
    flags = torch.stack((visible.all(), negative.any()))
    host = torch.cat((newest, positions.T.flatten(), flags)).cpu()
    all_visible, any_negative = host[-2:].tolist()
    if any_negative:
        raise ValueError(
            f"position_ids must be at least 0 where attention_mask is not 0, got {position_ids}."
        )
    with_newest = host[:-2].view(length + 1, batch).T  # (B, T + 1)

    starts = first_keys = documents = None
    if attention_mask is None:
        starts, first_keys = _document_starts(with_newest, past)
        if was_packed or starts.any():
            if (first_keys != first_keys[:1]).any() or (was_packed and (first_keys == 0).any()):
                documents = _documents(held, starts.to(held.device), was_packed)
        else:
            starts = first_keys = None
    if "flash" in backend and (custom_mask is not None or documents is not None):
        what = (
            "a 4-D attention_mask"
            if custom_mask is not None
            else "packed documents in several rows or in a cache"
        )
        raise ValueError(
            f"attention_mask and position_ids must be such that {backend} can follow them, got {what}. "
            'Call model.set_attn_implementation("sdpa") first.'
        )
    return AttentionPlan(
        schedule=schedule,
        positions=torch.cat((held, positions), dim=1),
        length=length,
        segments=_segments(schedule, with_newest[:, 1:], starts, first_keys),
        visible=None if all_visible else visible,
        documents=documents,
        packed=was_packed or starts is not None,
        custom_mask=custom_mask,
        backend=backend,
        output_attentions=output_attentions,
    )


def dynamic_yarn_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    dynamic_yarn_plan: AttentionPlan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function that transformers calls in each layer of a patched model.

    Args:
        module: the attention layer.
        query: `(B, Hq, T, D)`, un-rotated.
        key, value: `(B, Hkv, L, D)`, un-rotated, those of the cache included.
        attention_mask: ignored, the plan has it.
        scaling: factor on the logits.
        dropout: probability of dropping a weight.
        dynamic_yarn_plan: the plan of this forward call.

    Returns:
        The output `(B, T, Hq, D)`, and the weights `(B, Hq, T, L)` if wanted and the backend is
        eager, else None.

    Raises:
        ValueError: there is no plan, or the keys are not those that were planned for.
    """
    plan = dynamic_yarn_plan
    if plan is None:
        raise ValueError(
            "a patched attention layer must be called by its patched decoder, got a call without a plan. Call the model, "
            "not its layers or its forward()."
        )
    total = plan.positions.shape[1]
    if key.shape[2] != total:
        raise ValueError(
            f"layer {getattr(module, 'layer_idx', '?')} must attend over {total} keys, got {key.shape[2]}: the layer left "
            "the cache out, as gradient checkpointing does in training mode. Call model.eval(), or pass use_cache=False."
        )
    attend = _attend_flash if "flash" in plan.backend else _attend_tiles
    # Under autocast the stock model rotates in float32 and the backend casts; so do we.
    dtype = torch.float32 if torch.is_autocast_enabled(query.device.type) else query.dtype
    outputs, weights = [], []
    for segment in plan.segments:
        cos, sin = plan.tables(segment, key.device, dtype)
        seen = slice(segment.first, plan.last_key(segment.stop))
        keys, values = rotate(key[:, :, seen], cos, sin), value[:, :, seen]
        own = slice(
            plan.past + segment.start - segment.first, plan.past + segment.stop - segment.first
        )
        queries = rotate(query[:, :, segment.start : segment.stop], cos[:, own], sin[:, own])
        for output, weight in attend(
            module, queries, keys, values, plan, segment, scaling, dropout
        ):
            outputs.append(output)
            if weight is not None and plan.output_attentions:
                weights.append(
                    nn.functional.pad(
                        weight, (segment.first, total - segment.first - weight.shape[-1])
                    )
                )
    return torch.cat(outputs, dim=1), torch.cat(weights, dim=2) if weights else None


Attended = Iterator[tuple[torch.Tensor, torch.Tensor | None]]


def _attend_tiles(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    segment: Segment,
    scaling: float,
    dropout: float,
) -> Attended:
    """eager and sdpa over one segment, rotated already, tile after tile; one tile where no mask is needed."""
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if plan.backend == "eager":
        # Each family's own, which transformers does not register.
        attention = sys.modules[type(module).__module__].eager_attention_forward
    needs_mask = plan.needs_mask(query.shape[2], key.shape[2])
    tile = TILE if needs_mask else query.shape[2]
    for start in range(segment.start, segment.stop, tile):
        stop = min(start + tile, segment.stop)
        tile_query = query[:, :, start - segment.start : stop - segment.start]
        keys = plan.last_key(stop) - segment.first
        mask = None
        if needs_mask:
            mask = plan.mask(start, stop, segment.first, query.device)
            if mask.dtype != torch.bool:
                mask = mask.to(query.dtype)
            elif plan.backend == "eager":
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
                    ~mask, torch.finfo(query.dtype).min
                )
        yield attention(
            module,
            tile_query,
            key[:, :, :keys],
            value[:, :, :keys],
            mask,
            scaling=scaling,
            dropout=dropout,
            is_causal=mask is None and stop - start > 1,
            output_attentions=plan.output_attentions,
        )


def _attend_flash(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    segment: Segment,
    scaling: float,
    dropout: float,
) -> Attended:
    """A flash kernel over one segment, rotated already. Its causal mask is aligned to the last key, as ours is."""
    visible = None
    if plan.visible is not None:
        visible = plan.visible[:, segment.first : plan.last_key(segment.stop)].to(query.device)
        # A row that is still all padding shows its last token: kernels may fail on a row of no keys.
        newest = visible[:, -1:] | ~visible.any(-1, keepdim=True)
        visible = torch.cat((visible[:, :-1], newest), dim=1)
    output = _flash_attention_forward(
        query.transpose(1, 2).to(value.dtype),
        key.transpose(1, 2).to(value.dtype),
        value.transpose(1, 2),
        visible,
        query_length=query.shape[2],
        is_causal=True,
        dropout=dropout,
        softmax_scale=scaling,
        # The name of this parameter on transformers 4 and 5; the other goes unread.
        implementation=plan.backend,
        attn_implementation=plan.backend,
    )
    yield output, None


def _split_mask(
    attention_mask: torch.Tensor | None, batch: int, length: int, total: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Checks the caller's mask; returns it as `(padding, None)` if 2-D, `(None, mask)` if 4-D."""
    if attention_mask is None:
        return None, None
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(
            f"attention_mask must be a torch.Tensor or None, got {type(attention_mask).__name__}."
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
        f"attention_mask must be (batch, tokens in the cache + new tokens) = {(batch, total)}, or 4-D "
        f"{(batch, 'heads or 1', length, total)}, got {shape}."
    )


def _positions(
    held: torch.Tensor, padding: torch.Tensor | None, position_ids: torch.Tensor | None, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which keys are not padding `(B, L)`, the newest position held `(B,)`, and the new positions `(B, T)`."""
    batch, past = held.shape
    newest = last_positions(held) if past else held.new_full((batch,), -1)
    if padding is None:
        visible = torch.cat(
            (held >= 0, torch.ones((batch, length), dtype=torch.bool, device=held.device)), dim=1
        )
        positions = newest[:, None] + 1 + torch.arange(length, device=held.device)
    else:
        visible = padding
        positions = visible.cumsum(-1)[:, past:] - 1
    if position_ids is None:
        return visible, newest, positions
    if not isinstance(position_ids, torch.Tensor) or position_ids.is_floating_point():
        raise TypeError(f"position_ids must be an integer torch.Tensor, got {position_ids!r}.")
    if (
        position_ids.ndim != 2
        or position_ids.shape[0] not in (1, batch)
        or position_ids.shape[1] != length
    ):
        raise ValueError(
            f"position_ids must be (batch or 1, new tokens) = {(batch, length)}, got {tuple(position_ids.shape)}."
        )
    return visible, newest, position_ids.to(held).expand(batch, length)


def _document_starts(positions: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which new tokens start a document, and the first key of the document of each, 0 where that
    began earlier.

    Args:
        positions: `(B, 1 + T)`, the newest held ones before the new ones.
        past: number of keys held.

    Returns:
        `(B, T)` bool and `(B, T)` indices of keys.

    Raises:
        ValueError: the new tokens neither go on from the cache nor start a document.
    """
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if past == 0:
        starts[:, 0] = False  # nothing lies before it
    elif (starts[:, 0] & (positions[:, 1] != 0)).any():
        raise ValueError(
            f"position_ids must go on from the tokens in the cache, at {(positions[:, 0] + 1).tolist()}, or start a "
            f"document at 0, got {positions[:, 1].tolist()}. Leave them out, or pass the attention_mask of all tokens."
        )
    keys = past + torch.arange(starts.shape[1])
    return starts, torch.where(starts, keys, 0).cummax(-1).values


def _documents(held: torch.Tensor, starts: torch.Tensor, was_packed: bool) -> torch.Tensor:
    """Number of each key's document, `(B, L)`. Only packed rows hold several, and they hold no padding."""
    numbers = torch.zeros_like(held)
    if was_packed:
        numbers[:, 1:] = (held[:, 1:] != held[:, :-1] + 1).cumsum(-1)
    latest = numbers[:, -1:] if held.shape[1] else 0
    return torch.cat((numbers, latest + starts.cumsum(-1)), dim=1)


def _segments(
    schedule: YaRNSchedule,
    positions: torch.Tensor,
    starts: torch.Tensor | None,
    first_keys: torch.Tensor | None,
) -> list[Segment]:
    """Cuts the new tokens where any row's scale changes or any row starts a document. All `(B, T)`, on the CPU."""
    scale = _over_padding(schedule.scale(positions), positions >= 0)
    cuts = (scale[:, 1:] != scale[:, :-1]).any(0)
    if starts is not None:
        cuts |= starts[:, 1:].any(0)
    begins = [0, *(cuts.nonzero()[:, 0] + 1).tolist()]
    inv_freq, gain = schedule.inv_freq(scale[:, begins]), schedule.gain(scale[:, begins])
    first = [0] * len(begins) if first_keys is None else first_keys[:, begins].amin(0).tolist()
    return [
        Segment(start, stop, first[index], inv_freq[:, index], gain[:, index])
        for index, (start, stop) in enumerate(
            zip(begins, [*begins[1:], positions.shape[1]], strict=True)
        )
    ]


def _over_padding(scale: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Gives padding the scale of the token before it in its row, else of the one after, so that it cuts no segment."""
    columns = torch.arange(scale.shape[1])
    before = torch.where(valid, columns, -1).cummax(-1).values
    after = valid.long().argmax(-1, keepdim=True)
    return scale.gather(1, torch.where(before < 0, after, before))
