"""The rotated copy of the keys of one layer, which spares a decoding step all but the new key.

While the scale of a row stays the same, so do its rotated keys, and only what is new is rotated.
When the scale of a row changes, that row is rotated again from the un-rotated keys, so nothing
drifts.
"""

from collections.abc import Callable

import torch

from .buffers import kind_of, ordinary_tensors, with_room
from .rope import rotate

# Keys rotated at a time: bounds what rotating a whole row takes beside its result.
ROTATED_AT_A_TIME = 1024

# cos and sin of one row, or of all rows where it is None, over the keys from `first` to `last`.
Tables = Callable[[int | None, int, int], tuple[torch.Tensor, torch.Tensor]]


class RotatedKeys:
    """The keys of one layer, rotated at one scale per row, for as long as the scales stay."""

    def __init__(self) -> None:
        self._buffer = torch.empty((0, 0, 0, 0), device="cpu")  # (B, Hkv, room, D)
        self.forget()

    def forget(self) -> None:
        """Makes the next `advance` rotate everything, into the same buffer."""
        self._scales: list[float] = []
        self._first = self._last = 0  # the keys that are there

    def shorten(self, length: int) -> None:
        """Drops what lies beyond `length` keys."""
        self._last = min(self._last, length)
        self._first = min(self._first, self._last)

    def select(self, rows: list[int]) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        if self._scales:
            with ordinary_tensors():
                self._buffer = self._buffer[torch.tensor(rows, device=self._buffer.device)]
            self._scales = [self._scales[row] for row in rows]

    def to(self, device: torch.device | str | int) -> None:
        """Moves the keys that are there."""
        with ordinary_tensors():
            self._buffer = self._buffer.to(device)

    def advance(
        self,
        keys: torch.Tensor,
        first: int,
        last: int,
        scales: list[float],
        tables: Tables,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Rotates what is not there yet.

        Args:
            keys: `(B, Hkv, L, D)`, un-rotated, all the keys of the layer.
            first: first key that is wanted rotated.
            last: key after the last one.
            scales: of each row.
            tables: gives cos and sin at these scales.
            interleaved: how the pairs of a head lie, see `rotate`.

        Returns:
            Keys `[first, last)`, rotated: `(B, Hkv, last - first, D)`, a view of a buffer.
        """
        if kind_of(self._buffer) != kind_of(keys):
            self._buffer = keys.new_empty((*keys.shape[:2], 0, keys.shape[-1]))
            self.forget()
        if first < self._first:
            self.forget()
        self._buffer = with_room(self._buffer, self._last, last, dim=2)
        stale = [row for row, scale in enumerate(scales) if self._scales[row : row + 1] != [scale]]
        begin, kept = self._last, self._first
        if stale:
            # What is half rotated when an interrupt comes must not be taken for whole.
            self.forget()
        if len(stale) == len(scales):
            self._rotate(keys, None, first, last, tables, interleaved)
        elif not stale:
            self._rotate(keys, None, begin, last, tables, interleaved)
        else:
            for row in range(len(scales)):
                start = first if row in stale else begin
                self._rotate(keys, row, start, last, tables, interleaved)
        self._first, self._last = (first, last) if stale else (kept, max(begin, last))
        self._scales = scales
        return self._buffer[:, :, first:last]

    def _rotate(
        self,
        keys: torch.Tensor,
        row: int | None,
        first: int,
        last: int,
        tables: Tables,
        interleaved: bool,
    ) -> None:
        if first >= last:
            return
        cos, sin = tables(row, first, last)
        rows = slice(None) if row is None else slice(row, row + 1)
        for start in range(first, last, ROTATED_AT_A_TIME):
            stop = min(start + ROTATED_AT_A_TIME, last)
            part = slice(start - first, stop - first)
            target = self._buffer[rows, :, start:stop]
            rotate(keys[rows, :, start:stop], cos[:, part], sin[:, part], interleaved, out=target)
