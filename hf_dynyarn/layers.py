"""How one layer holds un-rotated keys and values: in buffers that grow, or of fixed size."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .buffers import WeakLink, kind_of, ordinary_tensors, with_room, writable
from .graphs import mark_static
from .rotated import RotatedKeys


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
    _version: int  # torch's count of the writes to `_keys`, our own newest one included
    _by_hand: bool  # whether a user has put tensors in, which are unchecked and have no room
    _owner: WeakLink | None  # the cache that the layer is in

    def __init__(self, rotated_copy: bool = True, owner: Any = None) -> None:
        self.rotated = RotatedKeys() if rotated_copy else None
        self._keys = self._values = None
        self._length = self._version = 0
        self._by_hand, self._owner = True, None if owner is None else WeakLink(owner)
        super().__init__()
        self._by_hand = False

    @property
    def keys(self) -> Any:
        return None if self._keys is None else self._keys[:, :, : self._length]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        _check_states("keys", keys)
        self._take_in_hand()
        self._keys = keys
        self._length = 0 if keys is None else keys.shape[2]
        if self.rotated is not None:
            self.rotated.forget()

    @property
    def values(self) -> Any:
        if self._values is None or self._by_hand:
            return self._values
        return self._values[:, :, : self._length]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        _check_states("values", values)
        self._take_in_hand()
        self._values = values

    def append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values, `(B, Hkv, T, D)` each; returns all of them."""
        if not self.is_initialized:
            self._keys, self._values = key_states[:, :, :0], value_states[:, :, :0]
            self.is_initialized = True
        self._notice_edits()
        begin, end = self._length, self._length + key_states.shape[2]
        if torch.is_grad_enabled():
            # A backward pass may need what was read so far to stay as it is.
            self._keys = torch.cat((self.keys, key_states), dim=2)
            self._values = torch.cat((self.values, value_states), dim=2)
            if self.rotated is not None:
                self.rotated.forget()
        else:
            self._keys = with_room(self._keys, begin, end, dim=2)
            self._values = with_room(self._values, begin, end, dim=2)
            self._keys[:, :, begin:end] = key_states
            self._values[:, :, begin:end] = value_states
        self._length, self._version = end, self._keys._version
        return self.keys, self.values

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises a TypeError: the cache appends, which knows the positions."""
        raise TypeError(
            "tokens of a DynamicYaRNLayer must be added by calling the model with its cache, which "
            "records their positions, got a call of update()."
        )

    def claim(self, cache: Any) -> bool:
        """Makes a cache the owner if there is none; whether it is the owner now."""
        owner = None if self._owner is None else self._owner()
        if owner is None:
            if self.is_initialized:
                self._take_in_hand()  # whatever another cache has left
            self._owner = WeakLink(cache)
        return owner is None or owner is cache

    def check(self, name: str, rows: int, length: int) -> None:
        """Checks that all tokens of the cache are there, and, of what was put in by hand, no more.

        Args:
            name: of the layer.
            rows: of the cache.
            length: tokens of the cache. Beyond them may lie what a failed call has appended.

        Raises:
            ValueError: they are not.
        """
        if not self._by_hand:
            # Without keys it is of an index that the model has no layer for.
            fits = self._keys is None or self._length >= length
        elif self._keys is None or self._values is None:
            fits = self._keys is self._values and length == 0
        else:
            keys, values = (
                (*states.shape[:3], states.dtype, states.device)
                for states in (self._keys, self._values)
            )
            fits = keys == values and (keys[0], keys[2]) == (rows, length)
        if fits:
            self._by_hand, self.is_initialized = False, self._keys is not None
            return
        raise ValueError(
            f"{name} must hold {length} tokens like the cache itself, in {rows} row(s) of keys "
            f"and values of one dtype on one device, got {_told(self.keys)} as keys and "
            f"{_told(self.values)} as values. Cut tokens off with cache.crop(), and add them by "
            "calling the model: both keep the positions."
        )

    def shorten(self, length: int) -> None:
        """Keeps the first `length` tokens, if there are so many; the buffers stay."""
        self._length = min(self._length, length)
        if self.rotated is not None:
            self.rotated.shorten(length)

    def select(self, rows: list[int]) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        if self.is_initialized:
            self._notice_edits()
            with ordinary_tensors():
                index = torch.tensor(rows, device=self._keys.device)
                self._keys, self._values = self._keys[index], self._values[index]
            self._version = self._keys._version
        if self.rotated is not None:
            self.rotated.select(rows)

    def to(self, device: torch.device | str | int) -> None:
        """Moves the keys, rotated and not, and the values."""
        if self.is_initialized:
            self._notice_edits()
            with ordinary_tensors():
                self._keys, self._values = self._keys.to(device), self._values.to(device)
            self._version = 0 if self._keys.is_inference() else self._keys._version
        if self.rotated is not None:
            self.rotated.to(device)

    def get_seq_length(self) -> int:
        return self._length

    def copied(self, length: int | None = None) -> "DynamicYaRNLayer":
        """A layer in no cache, with copies of the first `length` tokens, or of all.

        Copies carry no spare room, and no keys that can be rotated again. Gradients reach through
        them what filled this one.
        """
        made = type(self).__new__(type(self))
        made.__dict__ |= self.__dict__ | {"_owner": None}
        made.rotated = None if self.rotated is None else RotatedKeys()
        with ordinary_tensors():
            if self._keys is not None:
                made._keys = self.keys[:, :, :length].clone()
                made._length, made._version = made._keys.shape[2], made._keys._version
            if self._values is not None:
                made._values = self.values[:, :, :length].clone()
        return made

    def __copy__(self) -> "DynamicYaRNLayer":
        return self.copied()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DynamicYaRNLayer":
        return self.copied()

    def __getstate__(self) -> dict[str, Any]:
        return self.copied().__dict__

    def _take_in_hand(self) -> None:
        """Makes `check` look at all there is."""
        if not self._by_hand:
            self._keys, self._values, self._by_hand = self.keys, self.values, True

    def _notice_edits(self) -> None:
        """Forgets the rotated copy of keys that somebody else has written to."""
        if self.rotated is None or self._keys.is_inference():
            return  # an inference tensor was put in by hand, and nothing is rotated since
        if self._keys._version != self._version:
            self.rotated.forget()


class StaticYaRNLayer(CacheLayerMixin):
    """One layer of fixed size: un-rotated keys and values, written in place, by position.

    Slot `p` holds the token at position `p` of its row, so padding takes none, and the position of
    a key is where it lies. One more slot, the last, takes what is not to be kept.

    Args:
        max_cache_len: slots, `N`.

    Attributes:
        keys: `(B, Hkv, N, D)`, un-rotated; what lies beyond a row's tokens means nothing.
        values: `(B, Hkv, N, D)`, likewise.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False
    rotated = None
    _keys: Any  # (B, Hkv, N + 1, D); None before anything is written
    _values: Any

    def __init__(self, max_cache_len: int) -> None:
        self.max_cache_len = max_cache_len
        super().__init__()

    @property
    def keys(self) -> Any:
        return None if self._keys is None else self._keys[:, :, : self.max_cache_len]

    @keys.setter
    def keys(self, keys: None) -> None:
        self._keys = _nothing("keys", keys)

    @property
    def values(self) -> Any:
        return None if self._values is None else self._values[:, :, : self.max_cache_len]

    @values.setter
    def values(self, values: None) -> None:
        self._values = _nothing("values", values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes buffers for states like these, `(B, Hkv, T, D)` each, unless those there fit."""
        self.max_batch_size = key_states.shape[0]
        with ordinary_tensors():
            self._keys = self._buffer(self._keys, key_states)
            self._values = self._buffer(self._values, value_states)
        mark_static(self._keys, self._values)
        self.is_initialized = True

    def _buffer(self, there: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        if there is not None and (there.device, kind_of(there)) == (states.device, kind_of(states)):
            return there
        shape = (*states.shape[:2], self.max_cache_len + 1, states.shape[-1])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes keys and values, `(B, Hkv, T, D)` each, into slots `(B, T)`."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        for buffer, states in ((self._keys, key_states), (self._values, value_states)):
            buffer.transpose(1, 2)[rows, slots] = states.transpose(1, 2)

    def append(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        slots: torch.Tensor,
        unused: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes likewise; returns the first slots and behind them what was written.

        `unused`, `(B, P)`, is true of those of the first slots that hold nothing of their row. They
        are given as 0: no mask hides what is no number, and may be left of another text.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self._keys.device != key_states.device:
            self.to(key_states.device)
        self.write(key_states, value_states, slots)
        past = unused.shape[1]
        if past == 0:
            return key_states, value_states
        keys = torch.cat((self._keys[:, :, :past], key_states), dim=2)
        values = torch.cat((self._values[:, :, :past], value_states), dim=2)
        for states in (keys, values):
            states[:, :, :past].masked_fill_(unused[:, None, :, None], 0)
        return keys, values

    def columns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens at positions `(B, T)`, 0 where padding: `(B, Hkv, T, D)`."""
        positions = positions.to(self._keys.device)[:, None, :, None]
        keys, values = (
            buffer.gather(2, positions.clamp(min=0).expand(*buffer.shape[:2], -1, buffer.shape[3]))
            for buffer in (self._keys, self._values)
        )
        return keys.masked_fill_(positions < 0, 0), values.masked_fill_(positions < 0, 0)

    def select(self, rows: torch.Tensor) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        if self._keys is None:
            return  # of an index that the model has no layer for
        rows = rows.to(self._keys.device)
        if len(rows) == len(self._keys):
            self._keys.copy_(self._keys[rows])
            self._values.copy_(self._values[rows])
            return
        self._keys, self._values = self._keys[rows], self._values[rows]
        self.max_batch_size = len(rows)
        mark_static(self._keys, self._values)

    def to(self, device: torch.device | str | int) -> None:
        """Moves the keys and the values."""
        if self._keys is None:
            return
        with ordinary_tensors():
            self._keys, self._values = self._keys.to(device), self._values.to(device)
        mark_static(self._keys, self._values)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, which may be made in inference mode."""
        self.__dict__ |= writable(state)
        if self._keys is not None:
            mark_static(self._keys, self._values)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises a TypeError: the cache knows the slots."""
        raise _no_layer_call("update")

    def get_seq_length(self) -> int:
        """Raises a TypeError: the cache knows the length."""
        raise _no_layer_call("get_seq_length")

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Raises a TypeError: a patched model builds no mask by it."""
        raise _no_layer_call("get_mask_sizes")

    def get_max_length(self) -> int:
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # its name up to transformers 5.20


def _no_layer_call(name: str) -> TypeError:
    return TypeError(
        f"a StaticYaRNLayer must be used through its cache, got a call of its {name}(). Call that "
        "of the cache, or the model with it."
    )


def _nothing(name: str, states: Any) -> Any:
    if states is not None:
        raise TypeError(
            f"{name} of a StaticYaRNLayer must stay in their buffer, got others. Write into it, or "
            "use a DynamicYaRNCache() that grows."
        )
    return states


def _check_states(name: str, states: Any) -> None:
    if states is not None and not (isinstance(states, torch.Tensor) and states.dim() == 4):
        is_tensor = isinstance(states, torch.Tensor)
        got = tuple(states.shape) if is_tensor else f"a {type(states).__name__}"
        raise ValueError(f"{name} of a layer must be a tensor (B, Hkv, T, D), got {got}.")


def _told(states: torch.Tensor | None) -> str:
    if states is None:
        return "None"
    shape = tuple(states.shape)
    return f"{shape[2]} in {shape} of {states.dtype} on {states.device}"
