"""Positions of held tokens, `(B, T)`, -1 where padding: which is newest, where documents start."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .buffers import ordinary_tensors, writable
from .graphs import mark_static
from .masks import check_kind
from .segments import if_all_is_held


def last_positions(positions: torch.Tensor) -> torch.Tensor:
    """Position of the newest token of each row that is not padding, -1 where there is none.

    Args:
        positions: `(B, T)`, at least one token.

    Returns:
        `(B,)`
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    newest = torch.where(positions >= 0, index, 0).amax(-1, keepdim=True)
    return positions.gather(1, newest)[:, 0]


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """Which tokens start a document: those whose position does not follow the one before.

    Args:
        positions: `(B, T)`, -1 where padding, which starts nothing and stands between nothing.

    Returns:
        `(B, T)` bool. The first token of a row counts unless its position is 0.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    # Index of the newest token up to each column that is not padding, -1 before the first.
    newest = torch.where(positions >= 0, index, -1).cummax(-1).values
    before = nn.functional.pad(newest[:, :-1], (1, 0), value=-1)
    expected = torch.where(before < 0, 0, positions.gather(1, before.clamp(min=0)) + 1)
    return (positions >= 0) & (positions != expected)


def check_position_ids(position_ids: Any, batch: int, length: int, past: int = 0) -> None:
    """Checks the kind and the shape of the positions that a call gives.

    Args:
        position_ids: of the call.
        batch: rows of the call.
        length: new tokens of each.
        past: tokens held, for the remedy where there are no positions.

    Raises:
        TypeError: they are no integers.
        ValueError: they are not `(B or 1, T)`.
    """
    if not isinstance(position_ids, torch.Tensor) or position_ids.is_floating_point():
        raise TypeError(f"position_ids must be an integer torch.Tensor, got {position_ids!r}.")
    if tuple(position_ids.shape) not in ((1, length), (batch, length)):
        raise ValueError(
            f"position_ids must be (batch or 1, new tokens) = {(batch, length)}, got "
            f"{tuple(position_ids.shape)}.{'' if position_ids.numel() else if_all_is_held(past)}"
        )


class StaticPositions:
    """Positions of a cache of fixed size: written in place, read back to the host by nothing here.

    Args:
        rows: of the cache, `B`.
        room: tokens that each row has room for, padding included, `N`.
        device: of the tensors.

    Attributes:
        columns: `(B, N)` int64, position of each token, -1 where padding and where none is yet.
        lengths: `(B,)` int64, tokens of each row that are not padding.
        count: `()` int64, tokens of each row, padding included.
    """

    def __init__(self, rows: int, room: int, device: torch.device) -> None:
        self.columns = torch.full((rows, room), -1, dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.count = torch.zeros((), dtype=torch.long, device=device)
        self._mark()

    def append(self, positions: torch.Tensor) -> None:
        """Adds new tokens, `(B, T)`."""
        self.columns.index_copy_(1, self.next_columns(positions.shape[1]), positions)
        self.lengths.add_((positions >= 0).sum(-1))
        self.count.add_(positions.shape[1])

    def following(
        self, tokens: int, mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Positions of new tokens, which must have room and go on from those held.

        In a graph, what needs values is checked on the device, where it stops the call.

        Args:
            tokens: how many new ones, `T`.
            mask: `(B, T)` or `(B, tokens held + T)`, 0 for padding; or None.
            position_ids: `(B or 1, T)` or None.

        Returns:
            `(B, T)`, -1 where padding.

        Raises:
            TypeError: the mask or the positions are of another type.
            ValueError: there is no room, or the mask or the positions do not fit the cache.
        """
        room = self.columns.shape[1]
        _require(
            self.count + tokens <= room,
            lambda: f"{int(self.count)} held and {tokens} new ones",
            f"a text must fit into the max_cache_len of its cache, {room} tokens, padding "
            "included, got {}. Start with a larger DynamicYaRNCache(max_cache_len=...).",
        )
        new = self.lengths[:, None] + torch.arange(tokens, device=self.lengths.device)
        if mask is not None:
            valid = _new_part(mask, self, tokens)
            new = torch.where(valid, self.lengths[:, None] + valid.cumsum(-1) - 1, -1)
        if position_ids is not None:
            check_position_ids(position_ids, len(new), tokens)
            _require(
                ((position_ids.to(new.device) == new) | (new < 0)).all(),
                lambda: f"{position_ids.tolist()} where it goes on at {new.tolist()}",
                "position_ids must go on from the tokens of each row in a cache with "
                "max_cache_len, got {}. Leave them out, or use a DynamicYaRNCache() that grows.",
            )
        return new

    def next_columns(self, tokens: int) -> torch.Tensor:
        """Where the next tokens of all rows go, `(T,)`."""
        return self.count + torch.arange(tokens, device=self.count.device)

    def taken(self) -> torch.Tensor:
        """The columns that hold tokens, `(B, T)`."""
        return self.columns[:, : int(self.count)]

    def by_slot(self) -> torch.Tensor | None:
        """Position of the token in each slot that any row uses, `(B, P)`, -1 where a row does not.

        None where none does.
        """
        most = int(self.lengths.max()) if len(self.lengths) else 0
        slots = torch.arange(most, device=self.lengths.device)
        return torch.where(slots < self.lengths[:, None], slots, -1) if len(slots) else None

    def select(self, rows: torch.Tensor) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        self.columns, self.lengths = self.columns[rows], self.lengths[rows]
        self._mark()

    def to(self, device: torch.device | str | int) -> None:
        """Moves all of it."""
        with ordinary_tensors():
            self.columns, self.lengths, self.count = (
                part.to(device) for part in (self.columns, self.lengths, self.count)
            )
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, which may be made in inference mode."""
        self.__dict__ |= writable(state)
        self._mark()

    def _mark(self) -> None:
        mark_static(self.columns, self.lengths, self.count)

    def shorten(self, length: int) -> None:
        """Keeps the first `length` columns."""
        self.columns[:, length:] = -1
        self.count.fill_(length)
        self.lengths.copy_((self.columns >= 0).sum(-1))


def _new_part(mask: torch.Tensor, held: StaticPositions, tokens: int) -> torch.Tensor:
    """What a mask says of the new tokens, `(B, T)` bool; it must agree on those held."""
    check_kind(mask)
    rows, room = held.columns.shape
    if mask.dim() != 2 or mask.shape[0] != rows or not tokens <= mask.shape[1] <= room + tokens:
        raise ValueError(
            "attention_mask over a cache with max_cache_len must be (batch, new tokens) or (batch, "
            f"tokens in the cache + new tokens), got {tuple(mask.shape)} for {rows} rows of "
            f"{tokens} new tokens. Leave it out, use a DynamicYaRNCache() that grows, or, in "
            "generate(), patch the whole model and not its decoder alone."
        )
    before = mask.shape[1] - tokens
    if before:
        as_filled = (mask[:, :-tokens] != 0) == (held.columns[:, :before] >= 0)
        _require(
            as_filled.all() & (held.count == before),
            lambda: f"another, of {before} tokens for {int(held.count)} held",
            "attention_mask must say of the tokens in a cache with max_cache_len what it said when "
            "they came, got {}. Leave it out, or use a DynamicYaRNCache() that grows.",
        )
    return mask[:, -tokens:] != 0


def _require(condition: torch.Tensor, got: Callable[[], str], message: str) -> None:
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message.format("others"))
    elif not condition:
        raise ValueError(message.format(got()))
