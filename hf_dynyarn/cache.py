"""`DynamicYaRNCache`: un-rotated keys, values and positions, and a rotated copy of the keys.

Keys are held as `k_proj` returns them, so that a key can be rotated at whatever scale the query
that reads it has. Positions are one more buffer: whatever moves the keys (crop, reorder, repeat,
select, copy, pickle) moves them too.

While the scale of a row stays the same, so do its rotated keys: each layer keeps them beside the
un-rotated ones, and a decoding step rotates the new key only. When the scale of a row changes, that
row is rotated again from the un-rotated keys, so nothing drifts.

A forward call is a transaction. `begin` announces it, each layer's `update` appends keys and
values, and `commit` records the positions once the decoder is through. A call that fails half-way
leaves layers of unequal length; the cache goes by its positions, and drops whatever lies beyond
them before it is next touched.

What a cache looks like in a file or a dict is in `storage.py`.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from . import storage
from .rope import Schedule, rotate
from .versions import cropped_length

# Buffers grow by an eighth, and by this many tokens at least.
LEAST_GROWTH = 256

# Keys rotated at a time: bounds what rotating a whole row takes beside its result.
ROTATED_AT_A_TIME = 1024

UNPATCHED = (
    "a DynamicYaRNCache must be used with a patched model, which gives it un-rotated keys; got a "
    "call from a model that is not patched. Call patch_llama(model) first, or pass a DynamicCache."
)

# cos and sin of one row, or of all rows where it is None, over the keys from `first` to `last`.
Tables = Callable[[int | None, int, int], tuple[torch.Tensor, torch.Tensor]]


class RotatedKeys:
    """The keys of one layer, rotated at one scale per row, for as long as the scales stay."""

    def __init__(self) -> None:
        self._buffer = torch.empty((0, 0, 0, 0))  # (B, Hkv, room, D)
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
        if _kind(self._buffer) != _kind(keys):
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


class DynamicYaRNCache(Cache):
    """A growing KV cache for a model patched with `patch_llama`.

    `layers[i].keys` is `(B, Hkv, T, D)`, un-rotated; `layers[i].values` likewise.

    Args:
        rotated_copy: whether each layer keeps a rotated copy of its keys. With it the cache takes
            1.5 times the memory of a `DynamicCache` and a step rotates one key; without it, 1.0
            times, and each step rotates all keys anew. The results are the same.
        offloading: an option of transformers' caches that this one does not have: False.

    Attributes:
        schedule: the schedule that filled the cache; None while empty.
        packed: whether a row holds several documents, told apart by positions that restart.

    Raises:
        TypeError: `rotated_copy` is not a bool, or `offloading` is asked for.
    """

    schedule: Schedule | None
    packed: bool
    _positions: torch.Tensor | None  # (B, room)
    _length: int
    _forward: "weakref.ref[Any] | None"

    def __init__(self, rotated_copy: bool = True, offloading: bool = False) -> None:
        if not isinstance(rotated_copy, bool):
            raise TypeError(f"rotated_copy must be a bool, got {rotated_copy!r}.")
        if offloading:
            raise TypeError(
                f"offloading must be False, got {offloading!r}: layers of a DynamicYaRNCache stay "
                'on the device of the model while it runs. Between calls, cache.to("cpu") moves '
                "all of it."
            )
        super().__init__(layers=[])
        self.rotated_copy = rotated_copy
        self._clear()

    @staticmethod
    def check_adoptable(cache: Any) -> None:
        """Raises a TypeError unless `adopt` can take the cache: an empty `DynamicCache`."""
        remedy = (
            "Pass a DynamicYaRNCache, or neither a cache nor a cache_implementation: a patched "
            "model makes its own."
        )
        plain = type(cache) is DynamicCache
        stock_layers = (DynamicLayer, DynamicSlidingWindowLayer)
        plain = plain and all(type(layer) in stock_layers for layer in cache.layers)
        if not plain or cache.offloading:
            kind = f"an offloaded {type(cache).__name__}" if plain else f"a {type(cache).__name__}"
            raise TypeError(
                f"the cache of a patched model must be a DynamicYaRNCache, got {kind}. {remedy}"
            )
        if cache.get_seq_length() > 0:
            raise TypeError(
                "the cache of a patched model must hold un-rotated keys, got a DynamicCache with "
                f"{cache.get_seq_length()} tokens whose keys are rotated already. {remedy}"
            )

    @classmethod
    def adopt(cls, cache: Cache) -> "DynamicYaRNCache":
        """Turns what `check_adoptable` lets through into one of ours, in place; leaves ours alone.

        `generate` makes its own `DynamicCache` before the model sees it, and callers keep the one
        they pass: were it only replaced, a loop that passes it again would find it empty and
        silently start over.
        """
        if not isinstance(cache, cls):
            cache.__class__ = cls
            cache.__init__()
        ours: DynamicYaRNCache = cache
        return ours

    @property
    def positions(self) -> torch.Tensor | None:
        """0-based position of every held token in its own row or document, `(B, T)`.

        It is -1 where the token is padding. None while the cache is empty.
        """
        return None if self._positions is None else self._positions[:, : self._length]

    @property
    def scales(self) -> list[float]:
        """Scale of each row's newest token; empty while the cache is."""
        if self.positions is None or self.schedule is None:
            return []
        newest = last_positions(self.positions)
        return self.schedule.scale(newest[:, None].cpu())[:, 0].tolist()

    def check_fits(
        self, schedule: Schedule, batch: int, layers: int, heads: int | None, head_dim: int
    ) -> None:
        """Checks that a model can continue the cache.

        Args:
            schedule: of the model.
            batch: of the call.
            layers: of the model.
            heads: of the keys in each layer; None where it is not known.
            head_dim: of each head.

        Raises:
            ValueError: it cannot.
        """
        if self._positions is None:
            return
        if self.schedule != schedule:
            raise ValueError(
                f"a cache must be continued under the options that filled it, {self.schedule}, got "
                f"{schedule}. Start a new DynamicYaRNCache, or patch the model with those options."
            )
        if self._positions.shape[0] != batch:
            raise ValueError(
                f"the call must have the batch size of the cache, {self._positions.shape[0]}, got "
                f"{batch}. Use cache.batch_repeat_interleave() or cache.batch_select_indices(), or "
                "start a new DynamicYaRNCache."
            )
        if len(self.layers) != layers:
            raise ValueError(
                f"a cache must be continued by the model that filled it, with {len(self.layers)} "
                f"layers, got {layers}. Start a new DynamicYaRNCache."
            )
        for held in (layer.keys.shape for layer in self.layers if layer.is_initialized):
            if held[1] != (heads or held[1]) or held[3] != head_dim:
                raise ValueError(
                    f"a cache must be continued by the model that filled it, with {held[1]} heads "
                    f"of {held[3]} dimensions in its keys, got {heads or held[1]} of {head_dim}. "
                    "Start a new DynamicYaRNCache."
                )

    def begin(self, forward: Any) -> None:
        """Opens the cache to the layers of one forward call, for as long as `forward` lives.

        Args:
            forward: an object that the call alone keeps alive, so that an interrupted call closes
                the cache too.
        """
        self._drop_uncommitted()
        self._forward = weakref.ref(forward)

    def close(self) -> None:
        """Ends a forward call that failed: the cache stays as it was before."""
        self._forward = None

    def commit(self, positions: torch.Tensor, schedule: Schedule, packed: bool) -> None:
        """Records the tokens that the forward call has appended, and closes the cache.

        Args:
            positions: `(B, T)`, of the new tokens.
            schedule: the schedule they were computed under.
            packed: whether a row now holds several documents.
        """
        if self._positions is None:
            self._positions = positions.new_empty((positions.shape[0], 0))
        begin, end = self._length, self._length + positions.shape[1]
        # Where the newest are: the cache may have been on another device.
        held = self._positions.to(positions.device)
        self._positions = with_room(held, begin, end, dim=1)
        self._positions[:, begin:end] = positions
        self._length, self.schedule, self.packed = end, schedule, packed
        self._forward = None

    @torch.compiler.disable
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends un-rotated keys and values to one layer.

        Args:
            key_states: `(B, Hkv, T, D)`.
            value_states: `(B, Hkv, T, D)`.
            layer_idx: index of the layer.
            *args: what transformers passes beside, unread.
            **kwargs: likewise.

        Returns:
            All keys and all values of the layer, `(B, Hkv, L, D)` each.

        Raises:
            TypeError: the model is not patched, so that the keys would be rotated ones.
            ValueError: the new keys do not fit those held.
        """
        if self._forward is None or self._forward() is None:
            raise TypeError(UNPATCHED)
        while len(self.layers) <= layer_idx:
            self.layers.append(DynamicYaRNLayer(self.rotated_copy))
        layer = self.layers[layer_idx]
        if layer.is_initialized and _kind(layer.keys) != _kind(key_states):
            raise ValueError(
                "new keys must have the dtype, batch, heads and head_dim of those in the cache, "
                f"{_kind(layer.keys)}, got {_kind(key_states)}. Start a new DynamicYaRNCache, or "
                "call the model as it was called before."
            )
        if layer.is_initialized and layer.keys.device != key_states.device:
            # Loaded, or moved by `to`, while the layers of a model may be on several devices.
            layer.to(key_states.device)
        keys: torch.Tensor
        keys, values = layer.update(key_states, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens held, padding included."""
        return self._length

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Raises a TypeError: only a model that is not patched builds its mask by it."""
        raise TypeError(UNPATCHED)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Cuts tokens off the end, by the rule of the installed transformers.

        Up to 5.17 a positive argument is the number of tokens to keep; from 5.20 on there are only
        negative ones: minus the number of tokens to remove.
        """
        self._drop_uncommitted()
        length = cropped_length(self._length, *args, **kwargs)
        if length == 0:
            self.reset()
        for layer in self.layers:
            layer.shorten(length)
        self._length = length
        if self.positions is not None and self.packed:
            self.packed = bool(document_starts(self.positions)[:, 1:].any())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, copies next to each other."""
        if self._positions is not None:
            rows = torch.arange(self._positions.shape[0])
            self._select(rows.repeat_interleave(repeats).tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`, by number or by a bool for each row, in that order."""
        if self._positions is not None:
            rows = torch.arange(self._positions.shape[0])
            self._select(rows[torch.as_tensor(indices).cpu()].tolist())

    def reset(self) -> None:
        """Empties the cache, whatever filled it."""
        self.layers.clear()
        self._clear()

    def to(self, device: torch.device | str | int) -> "DynamicYaRNCache":
        """Moves the cache, in place: keys, values, the rotated copy and positions.

        A model on another device takes each layer back to its own when it continues the cache.

        Args:
            device: where to.

        Returns:
            The cache itself.
        """
        if self._forward is not None and self._forward() is not None:
            # A hook of accelerate that moves whatever has a `to` to the device of each layer.
            return self
        if self._positions is not None:
            self._positions = self._positions.to(device)
        for layer in self.layers:
            layer.to(device)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache into a safetensors file, with the options that filled it.

        The file has no spare room and no rotated copy. An older file of that name stays as it is
        until the new one is whole. What an unfinished forward call has appended is left out.

        Args:
            path: of the file.

        Raises:
            OSError: the file could not be written.
        """
        storage.write(path, self.state_dict())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: torch.device | str | int | None = None,
    ) -> "DynamicYaRNCache":
        """Makes a cache of a file that `save` wrote.

        It can be continued by the model that filled it, patched with the same options. That the
        weights are the same is not checked.

        Args:
            path: of the file.
            device: where to put the cache. Default: the CPU, from where it follows the model.

        Raises:
            OSError: there is no such file, or it cannot be read.
            ValueError: the file is damaged, of something else, or of a newer hf_dynyarn.
        """
        return cls.from_state_dict(storage.read(path), device)

    def state_dict(self) -> dict[str, Any]:
        """The cache as plain values, which `torch.load(weights_only=True)` takes.

        Returns:
            Copies on the CPU: `"positions"` `(B, T)`, `"layers.<i>.keys"` and
            `"layers.<i>.values"` `(B, Hkv, T, D)`; and `"hf_dynyarn"`, a dict of the options. What
            an unfinished forward call has appended is left out.
        """
        self._check_lengths()
        length = self._length
        return storage.to_plain(
            storage.Contents(
                schedule=self.schedule if length else None,
                packed=self.packed,
                rotated_copy=self.rotated_copy,
                positions=self.positions if length else None,
                layers=[
                    (layer.keys[:, :, :length], layer.values[:, :, :length])
                    for layer in self.layers
                    if length
                ],
            )
        )

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Any], device: torch.device | str | int | None = None
    ) -> "DynamicYaRNCache":
        """Makes a cache of what `state_dict` returned. It shares no memory with it.

        Args:
            state: the plain form.
            device: where to put the cache. Default: where the tensors are.

        Raises:
            TypeError: `state` is not a dict.
            ValueError: it is not the plain form of a cache, or that of a newer hf_dynyarn.
        """
        contents = storage.from_plain(state)
        cache = cls(rotated_copy=contents.rotated_copy)
        if contents.positions is None:
            return cache
        cache.schedule, cache.packed = contents.schedule, contents.packed
        cache._positions = contents.positions.to(device, copy=True)
        cache._length = contents.positions.shape[1]
        for keys, values in contents.layers:
            layer = DynamicYaRNLayer(cache.rotated_copy)
            layer.keys = keys.to(device, copy=True)
            layer.values = values.to(device, copy=True)
            layer.is_initialized = True
            cache.layers.append(layer)
        return cache

    def __getstate__(self) -> dict[str, Any]:
        self._drop_uncommitted()
        positions = None if self.positions is None else self.positions.clone()
        return {**self.__dict__, "_positions": positions}

    def _clear(self) -> None:
        self._positions, self._length = None, 0
        self.schedule, self.packed = None, False
        self._forward = None

    def _select(self, rows: list[int]) -> None:
        self._drop_uncommitted()
        if self._positions is None or rows == list(range(len(self._positions))):
            return
        self._positions = self._positions[torch.tensor(rows, device=self._positions.device)]
        for layer in self.layers:
            layer.select(rows)

    def _drop_uncommitted(self) -> None:
        """Undoes a forward call that did not reach `commit`."""
        self._forward = None
        if self._length == 0:
            self.layers.clear()
        self._check_lengths()
        for layer in self.layers:
            layer.shorten(self._length)

    def _check_lengths(self) -> None:
        """Raises a ValueError where a layer has fewer tokens than the cache."""
        for index, layer in enumerate(self.layers):
            if layer.get_seq_length() < self._length:
                raise ValueError(
                    f"layer {index} of the cache must hold {self._length} tokens like the cache "
                    f"itself, got {layer.get_seq_length()}. Cut tokens off with cache.crop(), "
                    "which crops the positions too."
                )


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


def _kind(states: torch.Tensor) -> tuple[object, ...]:
    """Dtype, batch, heads and head dimension, with which states can be put beside each other."""
    return (states.dtype, *states.shape[:2], states.shape[-1])
