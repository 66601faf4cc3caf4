"""How one layer holds un-rotated keys and values, and beside them a rotated copy of the keys.

While the scale of a row stays the same, so do its rotated keys: each layer keeps them beside the
un-rotated ones, and a decoding step rotates the new key only. When the scale of a row changes, that
row is rotated again from the un-rotated keys, so nothing drifts.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from .rope import rotate

# Buffers grow by an eighth, and by this many tokens at least.
LEAST_GROWTH = 256

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
            self._buffer = self._buffer[torch.tensor(rows, device=self._buffer.device)]
            self._scales = [self._scales[row] for row in rows]

    def to(self, device: torch.device | str | int) -> None:
        """Moves the keys that are there."""
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


class DynamicYaRNLayer(DynamicLayer):
    """One layer: un-rotated keys and values in buffers that grow ahead, and the rotated copy.

    Attributes:
        keys: `(B, Hkv, T, D)`, un-rotated, a view of a buffer: clone what must outlive a change.
        values: `(B, Hkv, T, D)`, likewise.
        rotated: the rotated copy; None where the cache keeps none.
    """

    rotated: RotatedKeys | None
    is_initialized: bool
    _keys: Any  # (B, Hkv, room, D); None while empty
    _values: Any
    _length: int

    def __init__(self, rotated_copy: bool = True) -> None:
        self.rotated = RotatedKeys() if rotated_copy else None
        super().__init__()

    @property
    def keys(self) -> Any:
        return None if self._keys is None else self._keys[:, :, : self._length]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys = keys
        self._length = 0 if keys is None else keys.shape[2]
        if self.rotated is not None:
            self.rotated.forget()

    @property
    def values(self) -> Any:
        return None if self._values is None else self._values[:, :, : self._length]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._values = values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values, `(B, Hkv, T, D)` each; returns all of them."""
        if not self.is_initialized:
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.is_initialized = True
        if torch.is_grad_enabled():
            # A backward pass may need what was read so far to stay as it is.
            keys, values = self.keys, self.values
            self.keys = torch.cat((keys, key_states), dim=2)
            self.values = torch.cat((values, value_states), dim=2)
            return self.keys, self.values
        begin, end = self._length, self._length + key_states.shape[2]
        self._keys = with_room(self._keys, begin, end, dim=2)
        self._values = with_room(self._values, begin, end, dim=2)
        self._keys[:, :, begin:end] = key_states
        self._values[:, :, begin:end] = value_states
        self._length = end
        return self.keys, self.values

    def shorten(self, length: int) -> None:
        """Keeps the first `length` tokens; the buffers stay."""
        self._length = length
        if self.rotated is not None:
            self.rotated.shorten(length)

    def select(self, rows: list[int]) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        index = torch.tensor(rows, device=self._keys.device)
        self._keys, self._values = self._keys[index], self._values[index]
        if self.rotated is not None:
            self.rotated.select(rows)

    def to(self, device: torch.device | str | int) -> None:
        """Moves the keys, rotated and not, and the values."""
        if self.is_initialized:
            self._keys, self._values = self._keys.to(device), self._values.to(device)
        if self.rotated is not None:
            self.rotated.to(device)

    def get_seq_length(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry no spare room, and no keys that can be rotated again."""
        state = {**self.__dict__, "rotated": None if self.rotated is None else RotatedKeys()}
        if self._keys is not None and self._keys.shape[2] > self._length:
            state |= {"_keys": self.keys.clone(), "_values": self.values.clone()}
        return state


def with_room(buffer: torch.Tensor, length: int, needed: int, dim: int) -> torch.Tensor:
    """A buffer whose first `length` entries along `dim` are those of `buffer`, with room to write.

    Args:
        buffer: any tensor.
        length: entries in use.
        needed: entries that will be in use.
        dim: the dimension that grows.

    Returns:
        The buffer itself where it is long enough, else a longer one.
    """
    # Tensors made in inference mode, or in a graph, must not be written to outside.
    writable = not (buffer.is_inference() and not torch.is_inference_mode_enabled())
    if needed <= buffer.shape[dim] and writable and not buffer.requires_grad:
        return buffer
    shape = list(buffer.shape)
    shape[dim] = needed + max(LEAST_GROWTH, needed // 8)
    longer = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)
    longer.narrow(dim, 0, length).copy_(buffer.detach().narrow(dim, 0, length))
    return longer


def kind_of(states: torch.Tensor) -> tuple[object, ...]:
    """Dtype, batch, heads and head dimension, with which states can be put beside each other."""
    return (states.dtype, *states.shape[:2], states.shape[-1])
