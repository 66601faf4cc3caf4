"""The plan of one forward call: positions, padding, documents, and runs of one scale.

Once per forward call, `make_plan` resolves the position of every token and cuts the new tokens into
segments of columns in which no row's scale changes. Each layer takes one segment after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from .cache import DynamicYaRNCache
from .documents import check_bounds, positions_within
from .masks import Masks, split_mask, widest_gap
from .positions import check_position_ids, document_starts, last_positions
from .rotated import RotatedKeys
from .schedules import Schedule
from .segments import Segment, cut_into_segments, if_all_is_held, new_starts, told_apart
from .workspace import Workspace


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
        masks: what each new token sees.
        packed: whether a row holds several documents.
        backend: transformers' name of the attention implementation.
        output_attentions: whether the weights are wanted.
        windows: how many keys a query sees in each layer, by its index, None for all; None where
            the layers themselves say.
    """

    schedule: Schedule
    cut_trained: Callable[[], list[Segment]]
    cache: DynamicYaRNCache | None
    held: torch.Tensor
    new: torch.Tensor
    segments: list[Segment]
    unrotated: frozenset[int]
    interleaved: bool
    masks: Masks
    packed: bool
    backend: str
    output_attentions: bool
    windows: dict[int, int | None] | None = None

    def __post_init__(self) -> None:
        self.past = self.held.shape[1]
        self.total = self.past + self.new.shape[1]
        self.workspace = Workspace(self.held, self.new)

    @cached_property
    def trained_segments(self) -> list[Segment]:
        """Segments for layers that keep the scale they were trained at."""
        return self.cut_trained()

    @cached_property
    def left_padding(self) -> torch.Tensor | None:
        """Padding before each row, `(B,)`, where its keys lie in order behind it; None elsewhere.

        Synchronises with the device. Only who attends over un-rotated keys asks.
        """
        masks, positions = self.masks, self.workspace.positions
        if self.packed or masks.custom is not None or masks.documents is not None:
            return None
        starts = (positions >= 0).int().argmax(-1)
        places = torch.arange(self.total, device=positions.device) - starts[:, None]
        in_order = ((positions == places) | (positions < 0)).all()
        if masks.visible is not None:
            in_order &= (masks.visible == (positions >= 0)).all()  # or a mask hides what is held
        return starts if in_order else None

    def window_of(self, layer: Any, told: int | None) -> int | None:
        """How many keys a query sees in a layer, which itself was `told` so; None for all."""
        return told if self.windows is None else self.windows[layer.layer_idx]

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
        """An attention layer's rotated keys in the cache, if it keeps any, while the call goes on.

        Afterwards, when a layer runs again in a backward pass, they may be those of other tokens.
        """
        if self.cache is None or not self.cache.is_open_to(self):
            return None
        copy: RotatedKeys | None = self.cache.layers[layer.layer_idx].rotated
        return copy


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
    windows: dict[int, int | None] | None = None,
    bounds: torch.Tensor | None = None,
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
        windows: see `AttentionPlan`.
        bounds: `(1 or 2, N + 1)`, those of packed documents where the caller gives them, see
            `documents.py`. Positions, where there are none, count from these.

    Raises:
        TypeError: the mask or the positions are of another type.
        ValueError: the mask or the positions do not fit the call, or the backend cannot take them.
    """
    batch, length = inputs.shape[:2]
    held = torch.empty((batch, 0), dtype=torch.long, device=inputs.device)
    if cache is not None and (there := cache.key_positions()) is not None:
        held = there.to(inputs.device)
    past = held.shape[1]
    if batch == 0 or length == 0:
        raise ValueError(
            f"a call must have at least one row and at least one token, got {(batch, length)}."
            f"{if_all_is_held(past)}"
        )
    was_packed = cache is not None and cache.packed
    padding, custom_mask = split_mask(attention_mask, batch, length, past + length, inputs.device)
    if was_packed and padding is not None:
        raise ValueError(
            "a cache of packed documents must be continued without a 2-D attention_mask, which "
            "cannot tell them apart, got one (generate() always makes one). Call the model itself "
            "with position_ids, or start a new cache."
        )
    if bounds is not None and position_ids is None:
        position_ids = positions_within(bounds[0].to(inputs.device), batch, length)
    newest, positions = _positions(held, padding, position_ids, length)
    visible = padding
    if visible is None:
        visible = torch.cat((held >= 0, torch.ones_like(positions, dtype=torch.bool)), dim=1)
    on_host, all_visible, gap, bounds = _read_back(
        held, newest, positions, visible, custom_mask is not None, bounds
    )
    starts = documents = None
    if attention_mask is None:
        starts = new_starts(on_host, past)
        if bounds is not None:
            check_bounds(bounds, starts)
        starts = starts if was_packed or starts.any() else None
    cut = partial(
        cut_into_segments,
        positions=on_host[:, 1:],
        starts=starts,
        past=past,
        # A kernel that takes the bounds of documents takes many at once.
        side_by_side="flash" in backend and batch == 1 and all_visible,
    )
    segments = cut(schedule, trained=False)
    if starts is not None and not told_apart(segments, starts, past, was_packed):
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
        masks=Masks(
            past=past,
            total=past + length,
            visible=None if all_visible else visible,
            documents=documents,
            custom=custom_mask,
            additive=backend == "eager",
            gap=gap,
        ),
        packed=was_packed or starts is not None,
        backend=backend,
        output_attentions=output_attentions,
        windows=windows,
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
    check_position_ids(position_ids, batch, length, past)
    return newest, position_ids.to(held).expand(batch, length)


def _read_back(
    held: torch.Tensor,
    newest: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
    custom: bool,
    bounds: torch.Tensor | None,
) -> tuple[torch.Tensor, bool, int, torch.Tensor | None]:
    """Brings what the CPU has to know from the device, the one synchronisation of a call.

    Args:
        held: `(B, P)`, positions in the cache.
        newest: `(B,)`, the newest of each row.
        positions: `(B, T)`, of the new tokens.
        visible: `(B, P + T)`, False where padding.
        custom: whether the mask is the caller's own, which says nothing of padding.
        bounds: of documents, `(1 or 2, N + 1)`, or None.

    Returns:
        `(B, 1 + T)`, the newest position held and those of the new tokens, -1 where padding;
        whether there is no padding; the most padding between the tokens of a row; and the bounds.

    Raises:
        ValueError: the mask shows padding of the cache, or a position is negative.
    """
    past, (batch, length) = held.shape[1], positions.shape
    shows_padding = (visible[:, :past] & (held < 0)).any()
    negative = ((positions < 0) & visible[:, past:]).any()
    flags = torch.stack((visible.all(), shows_padding, negative, widest_gap(visible)))
    shown = torch.where(visible[:, past:], positions, -1)
    wanted = [flags, newest, shown.T.flatten()]
    if bounds is not None:
        wanted.append(bounds.to(newest).flatten())
    host = torch.cat(wanted).cpu()
    all_visible, shows_padding, negative, gap = host[:4].tolist()
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
    end = 4 + (length + 1) * batch
    on_host = host[4:end].view(length + 1, batch).T
    return (
        on_host,
        bool(all_visible),
        gap,
        None if bounds is None else host[end:].view(bounds.shape),
    )
