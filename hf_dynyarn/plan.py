"""The plan of one forward call: positions, padding, documents, runs of one scale, and masks.

Once per forward call, `make_plan` resolves the position of every token and cuts the new tokens into
segments of columns in which no row's scale changes. Each layer takes one segment after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from .cache import DynamicYaRNCache
from .layers import RotatedKeys
from .positions import document_starts, last_positions
from .rope import rotary_tables
from .schedules import Schedule

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


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One layer's part in a forward call."""

    module: nn.Module
    plan: AttentionPlan
    scaling: float
    dropout: float
    window: int | None  # how many keys a query sees; None for all


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
    padding, custom_mask = split_mask(attention_mask, batch, length, past + length, inputs.device)
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


def split_mask(
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
