"""`DynamicYaRNCache`: un-rotated keys, values and positions, as a user holds them.

Keys are held as `k_proj` returns them, so that a key can be rotated at whatever scale the query
that reads it has. Positions are one more buffer: whatever moves the keys (crop, reorder, repeat,
select, copy, pickle) moves them too.

A forward call is a transaction. `begin` announces it, each layer's `update` appends keys and
values, and `commit` records the positions once the decoder is through. A call that fails half-way
leaves layers of unequal length; the cache goes by its positions, and drops whatever lies beyond
them before it is next touched.

How a layer holds its keys is in `layers.py`, what a cache looks like in a file or a dict in
`storage.py`.
"""

import copy
import os
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from . import storage
from .buffers import WeakLink, kind_of, ordinary_tensors, with_room
from .graphs import outside_graphs
from .layers import DynamicYaRNLayer
from .positions import document_starts, last_positions
from .schedules import Schedule
from .versions import cropped_length

UNPATCHED = (
    "a DynamicYaRNCache must be used with a patched model, which gives it un-rotated keys; got a "
    "call from a model that is not patched. Call patch_llama(model) first, or pass a DynamicCache."
)

UNROTATED = (
    "a DynamicYaRNCache must be read by layer, as its keys are un-rotated and no stock cache can "
    "be made of them; got a request for pairs of keys and values. Read cache.layers[i].keys and "
    "cache.layers[i].values."
)


class DynamicYaRNCache(Cache):
    """A KV cache for a model patched with `patch_llama`, growing or of fixed size.

    `layers[i].keys` is `(B, Hkv, T, D)`, un-rotated; `layers[i].values` likewise.

    Args:
        max_cache_len: tokens that each row has room for, padding included. A cache of that fixed
            size is made, a `StaticYaRNCache`, over which a decoding step is one graph of
            `torch.compile`; it takes 1.0 times the memory of a `StaticCache`. Default: it grows.
        rotated_copy: whether each layer keeps a rotated copy of its keys. With it the cache takes
            1.5 times the memory of a `DynamicCache` and a step rotates one key; without it, 1.0
            times, and each step rotates all keys anew. The results are the same.
        offloading: an option of transformers' caches that this one does not have: False.

    Attributes:
        packed: whether a row holds several documents, told apart by positions that restart.

    Raises:
        TypeError: `rotated_copy` is not a bool, or comes with `max_cache_len`; or `offloading` is
            asked for.
        ValueError: `max_cache_len` is less than 1.
    """

    _of_fixed_size: ClassVar[Any]  # the class of those

    layers: Any  # a list of DynamicYaRNLayer, which users may reach into
    packed: bool
    # None or one, in a frozenset: transformers' exporters set each attribute of what they walk
    # through, which no schedule allows, but pass this by.
    _schedule: frozenset[Schedule]
    _positions: torch.Tensor | None  # (B, room)
    _length: int
    _forward: WeakLink | None
    _thread: int  # in which `_forward` began

    def __init_subclass__(cls, of_fixed_size: bool = False) -> None:
        if of_fixed_size:
            DynamicYaRNCache._of_fixed_size = cls

    def __new__(
        cls, *args: Any, max_cache_len: int | None = None, **kwargs: Any
    ) -> "DynamicYaRNCache":
        kind = cls
        if max_cache_len is not None and not issubclass(cls, cls._of_fixed_size):
            if cls is not DynamicYaRNCache:
                raise TypeError(
                    f"max_cache_len must be left out of a {cls.__name__}, whose base class grows, "
                    f"got {max_cache_len!r}. Derive it from {cls._of_fixed_size.__name__}."
                )
            kind = cls._of_fixed_size
        made: DynamicYaRNCache = super().__new__(kind)
        return made

    def __init__(
        self,
        rotated_copy: bool = True,
        offloading: bool = False,
        *,
        max_cache_len: None = None,
    ) -> None:
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

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that filled the cache; None while empty."""
        return next(iter(self._schedule), None)

    @schedule.setter
    def schedule(self, schedule: Schedule | None) -> None:
        self._schedule = frozenset(() if schedule is None else (schedule,))

    @property
    def positions(self) -> torch.Tensor | None:
        """0-based position of every held token in its own row or document, `(B, T)`.

        It is -1 where the token is padding. A copy: the cache goes by its own. None while the cache
        is empty.
        """
        return None if self.held_positions is None else self.held_positions.clone()

    @property
    def held_positions(self) -> torch.Tensor | None:
        """The same, not copied: to read."""
        return None if self._positions is None else self._positions[:, : self._length]

    @property
    def scales(self) -> list[float]:
        """Scale of each row's newest token; empty while the cache is."""
        if self.held_positions is None or self.schedule is None:
            return []
        newest = last_positions(self.held_positions)
        return self.schedule.scale(newest[:, None].cpu())[:, 0].tolist()

    def begin(self, forward: Any) -> None:
        """Opens the cache to the layers of one forward call, for as long as `forward` lives.

        Args:
            forward: an object that the call alone keeps alive, so that an interrupted call closes
                the cache too.

        Raises:
            TypeError: a layer is none of ours.
            ValueError: another thread is in a forward call, or the layers are not as the last call
                has left them.
        """
        running = None if self._forward is None else self._forward()
        if running is not None and self._thread != threading.get_ident():
            raise ValueError(
                "a cache must be in one forward call at a time, got a call while another thread is "
                "in one. Give each its own: copy.deepcopy(cache)."
            )
        self._drop_uncommitted()
        self._forward, self._thread = WeakLink(forward), threading.get_ident()

    def is_open_to(self, forward: Any) -> bool:
        """Whether the forward call that `begin` was told of is this one, and goes on."""
        return self._forward is not None and self._forward() is forward

    def _is_open(self) -> bool:
        return self._forward is not None and self._forward() is not None

    def close(self) -> None:
        """Ends a forward call that failed: the cache stays as it was before."""
        self._forward = None

    def commit(self, positions: torch.Tensor, schedule: Schedule, packed: bool) -> None:
        """Records the tokens that the forward call has appended, and closes the cache.

        Args:
            positions: `(B, T)`, of the new tokens.
            schedule: the schedule they were computed under.
            packed: whether a row now holds several documents.

        Raises:
            ValueError: something within the call has closed the cache, and dropped its tokens.
        """
        self._check_left_alone()
        if self._positions is None:
            self._positions = positions.new_empty((positions.shape[0], 0))
        begin, end = self._length, self._length + positions.shape[1]
        # Where the newest are: the cache may have been on another device.
        held = self._positions.to(positions.device)
        self._positions = with_room(held, begin, end, dim=1)
        self._positions[:, begin:end] = positions
        self._length, self.schedule, self.packed = end, schedule, packed
        self._forward = None

    def _check_left_alone(self) -> None:
        if self._forward is None:
            raise ValueError(
                "a cache must be left alone while a forward call fills it, got a change within one "
                "(by a hook, or a call of the model by a hook). It is as the change has left it, "
                "without the tokens of the call. Change it between two calls, or change a copy: "
                "copy.deepcopy(cache)."
            )

    def key_positions(self) -> torch.Tensor | None:
        """Positions of the keys that a layer gives, `(B, P)`, -1 where padding: to read."""
        return self.held_positions

    @outside_graphs
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends un-rotated keys and values to one layer.

        A layer that runs again in a backward pass appends nothing.

        Args:
            key_states: `(B, Hkv, T, D)`.
            value_states: `(B, Hkv, T, D)`.
            layer_idx: index of the layer.
            *args: what transformers passes beside, unread.
            **kwargs: likewise.

        Returns:
            All keys and all values of the layer, `(B, Hkv, L, D)` each; the new ones alone where
            the layer runs again.

        Raises:
            TypeError: the model is not patched, so that the keys would be rotated ones.
            ValueError: the new keys do not fit those held.
        """
        if not self._is_open():
            if torch._C._current_graph_task_id() == -1:
                raise TypeError(UNPATCHED)
            # In a backward pass: a layer runs again, as under checkpointing. What it appended when
            # it ran first is there; of that, the plan of its call knows.
            return key_states, value_states
        return self._append(key_states, value_states, layer_idx)

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(DynamicYaRNLayer(self.rotated_copy, owner=self))
        layer = self.layers[layer_idx]
        check_alike(layer, key_states, value_states)
        if layer.is_initialized and layer.keys.device != key_states.device:
            # Loaded, or moved by `to`, while the layers of a model may be on several devices.
            layer.to(key_states.device)
        keys: torch.Tensor
        keys, values = layer.append(key_states, value_states)
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
        if self.held_positions is not None and self.packed:
            self.packed = bool(document_starts(self.held_positions)[:, 1:].any())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, copies next to each other."""
        if self.held_positions is not None:
            rows = torch.arange(len(self.held_positions), device="cpu")
            self._select(rows.repeat_interleave(repeats).tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`, by number or by a bool for each row, in that order."""
        if self.held_positions is not None:
            rows = torch.arange(len(self.held_positions), device="cpu")
            self._select(rows[torch.as_tensor(indices, device="cpu")].tolist())

    def reset(self) -> None:
        """Empties the cache, whatever filled it."""
        self._clear()

    def __iter__(self) -> Iterator[Any]:
        """Raises a TypeError, as `cache[i]` and `to_legacy_cache` do.

        Where a stock cache gives pairs of keys and values, the keys are rotated. A stock cache made
        of these would be wrong, and nothing would say so.
        """
        raise TypeError(UNROTATED)

    def __getitem__(self, layer_idx: int) -> Any:
        raise TypeError(UNROTATED)

    def to_legacy_cache(self) -> Any:
        raise TypeError(UNROTATED)

    def to(self, device: torch.device | str | int | None) -> "DynamicYaRNCache":
        """Moves the cache, in place: keys, values, the rotated copy and positions.

        A model on another device takes each layer back to its own when it continues the cache.

        Args:
            device: where to; None leaves it where it is.

        Returns:
            The cache itself.

        Raises:
            TypeError: not a device. A cache keeps the dtype of the model that filled it.
        """
        if self._is_open():
            # A hook of accelerate that moves whatever has a `to` to the device of each layer.
            return self
        if device is None:  # as that hook has it for a model as a whole
            return self
        _check_device(device)
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

        Raises:
            ValueError: layers were taken out from between those of the model that filled it.
        """
        self.check_layers()
        missing = [index for index, layer in enumerate(self.layers) if not layer.is_initialized]
        if missing and self.get_seq_length():
            raise ValueError(
                "a cache must hold keys of each layer up to the last to be saved, got none for "
                f"layer {missing[0]}, which the model does not have. Number its layers anew: set "
                "the layer_idx of each attention."
            )
        return storage.to_plain(self._contents())

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Any], device: torch.device | str | int | None = None
    ) -> "DynamicYaRNCache":
        """Makes a cache of what `state_dict` returned. It shares no memory with it.

        Args:
            state: the plain form.
            device: where to put the cache. Default: where the tensors are.

        Raises:
            TypeError: `state` is not a dict, or `device` no device.
            ValueError: it is not the plain form of a cache, or that of a newer hf_dynyarn.
        """
        if device is not None:
            _check_device(device)
        contents = storage.from_plain(state)
        if contents.max_cache_len is None:
            cache = cls(rotated_copy=contents.rotated_copy)
        else:
            cache = cls._of_fixed_size(max_cache_len=contents.max_cache_len)
        cache._fill(contents, device)
        return cache

    def _contents(self) -> storage.Contents:
        length = self._length
        return storage.Contents(
            schedule=self.schedule if length else None,
            packed=self.packed,
            rotated_copy=self.rotated_copy,
            positions=self.held_positions if length else None,
            layers=[
                (layer.keys[:, :, :length], layer.values[:, :, :length])
                for layer in self.layers
                if length
            ],
        )

    def _fill(self, contents: storage.Contents, device: Any) -> None:
        if contents.positions is None:
            return
        self.schedule, self.packed = contents.schedule, contents.packed
        self._positions = contents.positions.to(device, copy=True)
        self._length = contents.positions.shape[1]
        for keys, values in contents.layers:
            layer = DynamicYaRNLayer(self.rotated_copy)
            layer.keys = keys.to(device, copy=True)
            layer.values = values.to(device, copy=True)
            self.layers.append(layer)

    def __copy__(self) -> "DynamicYaRNCache":
        """As a deep copy: tokens of two caches cannot be in the same layers."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DynamicYaRNCache":
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__getstate__().items():
            copied = name in ("layers", "_positions")
            made.__dict__[name] = value if copied else copy.deepcopy(value, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of: what an unfinished forward call has appended is left out."""
        self.check_layers()
        layers = [layer.copied(self._length) for layer in self.layers] if self._length else []
        return {**self.__dict__, "layers": layers, "_positions": self.positions, "_forward": None}

    def _clear(self) -> None:
        self.layers = []  # another list, which somebody else may hold
        self._positions, self._length = None, 0
        self.schedule, self.packed = None, False
        self._forward, self._thread = None, 0

    def _select(self, rows: list[int]) -> None:
        self._drop_uncommitted()
        if self._positions is None or rows == list(range(len(self._positions))):
            return
        with ordinary_tensors():
            self._positions = self._positions[torch.tensor(rows, device=self._positions.device)]
        for layer in self.layers:
            layer.select(rows)

    def _drop_uncommitted(self) -> None:
        """Undoes a forward call that did not reach `commit`."""
        self._forward = None
        self.check_layers()
        if self._length == 0:
            self.layers = []
        for layer in self.layers:
            layer.shorten(self._length)

    def check_layers(self) -> None:
        """Checks what a user may have done to the list of layers, and to each.

        Raises:
            TypeError: one of them is none of ours.
            ValueError: one of them is another cache's too, is there twice, or lacks tokens, or
                somebody has put more of them in.
        """
        rows = 0 if self._positions is None else self._positions.shape[0]
        seen: set[int] = set()
        for index, layer in enumerate(self.layers):
            name = f"layer {index} of the cache"
            if not isinstance(layer, DynamicYaRNLayer):
                raise TypeError(
                    f"{name} must be a DynamicYaRNLayer, got a {type(layer).__name__}. Call the "
                    "model with a DynamicYaRNCache that makes its own layers."
                )
            if id(layer) in seen or not layer.claim(self):
                raise ValueError(
                    f"{name} must be in one place, got one that is in another cache, or in this "
                    "one twice. Give each cache its own layers: copy.deepcopy(cache)."
                )
            seen.add(id(layer))
            layer.check(name, rows, self._length)


def check_alike(layer: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """Checks that keys and values, `(B, Hkv, T, D)` each, can lie beside those of a layer.

    Raises:
        ValueError: the new ones do not fit those held.
    """
    if not layer.is_initialized:
        return
    for name, states in (("keys", key_states), ("values", value_states)):
        held = kind_of(getattr(layer, name))
        if held != kind_of(states):
            raise ValueError(
                f"new {name} must have the dtype, batch, heads and head_dim of those in the "
                f"cache, {held}, got {kind_of(states)}. Start a new DynamicYaRNCache, or call "
                "the model as it was called before."
            )


def _check_device(device: Any) -> None:
    if not isinstance(device, torch.device | str | int):
        raise TypeError(
            f"device must be a torch.device, the name of one or its number, got {device!r}. A "
            "cache keeps the dtype of the model that filled it."
        )
