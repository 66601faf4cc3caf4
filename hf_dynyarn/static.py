"""`DynamicYaRNCache(max_cache_len=N)`: of fixed size, so that a decoding step is one graph.

Slot `p` of a row holds the token at position `p`, so padding takes no room between tokens, and the
position of a key is where it lies. Buffers keep their addresses and are written in place; how far
they are filled is a tensor beside them, which a step never reads back (see `step.py`).

Longer calls, as prompts are, go by a plan like those over a cache that grows. What they attend to
are the slots in use, those beyond a row's end being padding to it, and the new tokens behind them.
"""

import copy
from typing import Any

import torch

from . import storage
from .backends import fused
from .buffers import ordinary_tensors
from .cache import DynamicYaRNCache, check_alike
from .layers import StaticYaRNLayer
from .positions import StaticPositions
from .schedules import Schedule
from .versions import cropped_length


class StaticYaRNCache(DynamicYaRNCache, of_fixed_size=True):
    """A KV cache of fixed size; `DynamicYaRNCache(max_cache_len=N)` makes one.

    `layers[i].keys` is `(B, Hkv, N, D)`, un-rotated, by position; `layers[i].values` likewise.

    Args:
        rotated_copy: not for this kind of cache, whose keys are turned while they are read.
        offloading: an option of transformers' caches that this one does not have: False.
        max_cache_len: tokens that each row has room for, padding included, `N`.

    Attributes:
        held: how far the cache is filled; None before the first call.
        constants: what `inv_freq` of the schedule goes by, on the device.

    Raises:
        TypeError: `max_cache_len` is no integer, or a rotated copy or offloading is asked for.
        ValueError: `max_cache_len` is less than 1.
    """

    held: StaticPositions | None
    constants: tuple[torch.Tensor, ...]

    def __init__(
        self, rotated_copy: bool | None = None, offloading: bool = False, *, max_cache_len: int
    ) -> None:
        if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int):
            raise TypeError(f"max_cache_len must be an int or None, got {max_cache_len!r}.")
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len must be at least 1 token, got {max_cache_len}.")
        if rotated_copy:
            raise TypeError(
                "rotated_copy must be left out of a cache with max_cache_len, whose keys are "
                f"turned while they are read, got {rotated_copy!r}. Leave one of the two out."
            )
        self._room = max_cache_len
        self._in_step = False
        super().__init__(False, offloading)

    @property
    def max_cache_len(self) -> int:
        """Tokens that each row has room for, padding included."""
        return self._room

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile its steps: yes."""
        return True

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The same as `max_cache_len`."""
        return self._room

    get_max_cache_shape = get_max_length  # its name up to transformers 5.20

    @property
    def filled(self) -> StaticPositions:
        """How far the cache is filled, once it was called with."""
        if self.held is None:
            raise ValueError("a cache must have been called with, got one that was not.")
        return self.held

    @property
    def held_positions(self) -> torch.Tensor | None:
        return None if self.held is None or not self._count() else self.held.taken()

    def key_positions(self) -> torch.Tensor | None:
        return None if self.held is None else self.held.by_slot()

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Number of tokens held, padding included; a tensor in a graph."""
        if self.held is None:
            return 0
        return self.held.count if torch.compiler.is_compiling() else self._count()

    def takes_step(self, rows: int, schedule: Schedule) -> bool:
        """Whether the buffers are there, of a model with that schedule and batch, for the kernel.

        What that one lacks, such as float64, is planned.
        """
        return (
            self.held is not None
            and self.held.columns.shape[0] == rows
            and self.schedule == schedule
            and all(fused.takes(one.keys, one.values) for one in self.layers if one.is_initialized)
        )

    def begin_step(self, step: Any) -> None:
        """Opens the cache to the layers of one step, for as long as `step` lives."""
        if not torch.compiler.is_compiling():
            super().begin(step)
        self._in_step = True

    def commit_step(self, positions: torch.Tensor) -> None:
        """Records the tokens of a step, `(B, T)`, and closes the cache."""
        if not torch.compiler.is_compiling():
            self._check_left_alone()
        self.filled.append(positions)
        self.close()

    def close(self) -> None:
        self._in_step = False
        if not torch.compiler.is_compiling():
            self._forward = None

    def place(
        self,
        inputs: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        bounds: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Turns what a call says of columns into what is so by slot.

        Args:
            inputs: `(B, T, ...)`.
            mask: `(B, T)` or `(B, tokens held + T)`, 0 for padding; or None.
            position_ids: `(B or 1, T)` or None.
            bounds: of packed documents, which have no place here.

        Returns:
            Mask `(B, slots in use + T)`, or None, and positions `(B, T)` of the new tokens.

        Raises:
            ValueError: there is no room, or something does not fit the cache.
        """
        if bounds is not None:
            raise ValueError(
                "a cache with max_cache_len must hold one document in each row, got bounds of "
                "packed ones. Use a DynamicYaRNCache() that grows, or rows of a batch."
            )
        rows, tokens = inputs.shape[:2]
        if not self._count():
            self._vacate()
        if self.held is None or len(self.held.columns) != rows:
            self.layers = []
            with ordinary_tensors():
                self.held = StaticPositions(rows, self._room, inputs.device)
        held = self.held
        new = held.following(tokens, mask, position_ids)
        slots = held.by_slot()
        if mask is not None or (slots is not None and (slots < 0).any()):
            parts = (new,) if slots is None else (slots, new)
            mask = torch.cat(parts, dim=1) >= 0
        return mask, new.clamp(min=0)

    def begin(self, forward: Any) -> None:
        super().begin(forward)
        self._slots = torch.where(forward.new < 0, self._room, forward.new)
        self._unused = forward.held < 0

    def commit(self, positions: torch.Tensor, schedule: Schedule, packed: bool) -> None:
        self._check_left_alone()
        while not self.layers[-1].is_initialized:
            self.layers.pop()  # of the model that filled the cache before it was emptied
        self.filled.append(positions)
        if self.schedule != schedule:
            with ordinary_tensors():
                self.constants = schedule.constants(positions.device)
        self.schedule = schedule  # the very one of the model, which graphs go by
        self._forward = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes un-rotated keys and values into one layer; in a step, attention itself does.

        Args:
            key_states: `(B, Hkv, T, D)`.
            value_states: `(B, Hkv, T, D)`.
            layer_idx: index of the layer.
            *args: what transformers passes beside, unread.
            **kwargs: likewise.

        Returns:
            Keys and values of the slots in use and of the new tokens, `(B, Hkv, L, D)` each; in a
            step, of the new ones.

        Raises:
            TypeError: the model is not patched, so that the keys would be rotated ones.
            ValueError: gradients are wanted, or the new keys do not fit those held.
        """
        if self._in_step and (torch.compiler.is_compiling() or self._is_open()):
            return key_states, value_states
        return super().update(key_states, value_states, layer_idx)

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.requires_grad or value_states.requires_grad:
            raise ValueError(
                "a cache with max_cache_len must be filled without gradients, which its buffers "
                "cannot hold, got keys that require them. Call the model under torch.no_grad(), or "
                "use a DynamicYaRNCache() that grows."
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(StaticYaRNLayer(self._room))
        layer: StaticYaRNLayer = self.layers[layer_idx]
        check_alike(layer, key_states, value_states)
        device = key_states.device
        slots, unused = self._slots.to(device), self._unused.to(device)
        return layer.append(key_states, value_states, slots, unused)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self._drop_uncommitted()
        if self.held is not None:
            self.held.shorten(cropped_length(self._count(), *args, **kwargs))
            if not self._count():
                self._vacate()

    def reset(self) -> None:
        """Empties the cache, whatever filled it; buffers that fit what comes next stay in place."""
        self._drop_uncommitted()
        if self.held is not None:
            self.held.shorten(0)
        self._vacate()

    def buffers(self) -> dict[str, torch.Tensor]:
        """All tensors that a step reads and writes, by name.

        Registered as buffers of a module, they let `torch.export` export a step over this cache.
        """
        if self.held is None:
            return {}
        found = dict(vars(self.held))
        for index, layer in enumerate(self.layers):
            found |= {f"keys_{index}": layer._keys, f"values_{index}": layer._values}
        return found

    def to(self, device: torch.device | str | int | None) -> "StaticYaRNCache":
        super().to(device)
        if device is not None and self.held is not None and self._forward is None:
            self.held.to(device)
            self.constants = tuple(part.to(device) for part in self.constants)
        return self

    def check_layers(self) -> None:
        """Checks what a user may have done to the list of layers.

        Raises:
            TypeError: one of them is none of ours.
        """
        for index, layer in enumerate(self.layers):
            if type(layer) is not StaticYaRNLayer:
                raise TypeError(
                    f"layer {index} of the cache must be a StaticYaRNLayer, got a "
                    f"{type(layer).__name__}. Call the model with a "
                    "DynamicYaRNCache(max_cache_len=...) that makes its own layers."
                )

    def _contents(self) -> storage.Contents:
        positions = self.held_positions
        return storage.Contents(
            schedule=None if positions is None else self.schedule,
            packed=False,
            rotated_copy=False,
            max_cache_len=self._room,
            positions=positions,
            layers=[] if positions is None else [one.columns(positions) for one in self.layers],
        )

    def _fill(self, contents: storage.Contents, device: Any) -> None:
        if contents.positions is None or contents.schedule is None:
            return
        positions = contents.positions.to(device)
        with ordinary_tensors():
            self.held = StaticPositions(len(positions), self._room, positions.device)
        self.held.append(positions)
        self.schedule = contents.schedule
        self.constants = contents.schedule.constants(positions.device)
        slots = torch.where(positions < 0, self._room, positions)
        for keys, values in contents.layers:
            layer = StaticYaRNLayer(self._room)
            layer.append(keys.to(device), values.to(device), slots, slots[:, :0] > 0)
            self.layers.append(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StaticYaRNCache":
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ |= {k: copy.deepcopy(v, memo) for k, v in self.__getstate__().items()}
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_forward": None, "_in_step": False}

    def _clear(self) -> None:
        super()._clear()
        self.held, self.constants = None, ()

    def _vacate(self) -> None:
        """Makes the cache anybody's: the next call is planned, and takes the buffers that fit."""
        self.schedule, self.constants = None, ()
        for layer in self.layers:
            layer.is_initialized = False

    def _count(self) -> int:
        return 0 if self.held is None else int(self.held.count)

    def _select(self, rows: list[int]) -> None:
        self._drop_uncommitted()
        if self.held is None or rows == list(range(len(self.held.columns))):
            return
        with ordinary_tensors():
            index = torch.tensor(rows, device=self.held.columns.device)
            self.held.select(index)
            for layer in self.layers:
                layer.select(index)

    def _drop_uncommitted(self) -> None:
        """What a failed call has written lies beyond what is held."""
        self.close()
        self.check_layers()
