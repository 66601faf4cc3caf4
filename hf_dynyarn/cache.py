"""`DynamicYaRNCache`: un-rotated keys, values, and the position of every token.

Keys are held as `k_proj` returns them, so that a key can be rotated at whatever scale the query
that reads it has.
Positions are one more buffer: whatever moves the keys (crop, reorder, repeat, select, copy, pickle)
    moves them too.

A forward call on the cache is a transaction. `begin` announces it, each layer's `update` appends
keys and values, and `commit` records the positions once the decoder is through. A call that fails
half-way leaves layers of unequal length; `get_seq_length` goes by the positions, and whatever lies
beyond them is dropped before the cache is next touched.
"""

import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .rope import YaRNSchedule


class DynamicYaRNCache(Cache):
    """A growing KV cache for a model patched with `patch_llama`.

    `layers[i].keys` is `(B, Hkv, T, D)`, un-rotated; `layers[i].values` likewise.

    Attributes:
        positions: `(B, T)` integers, the 0-based position of every held token in its own row or
            document, -1 where it is padding; None while empty.
        schedule: the schedule that filled the cache; None while empty.
        packed: whether a row holds several documents, told apart by positions that restart.
    """

    positions: torch.Tensor | None
    schedule: YaRNSchedule | None
    packed: bool

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._clear()

    @staticmethod
    def check_adoptable(cache: Any) -> None:
        """Raises a TypeError unless the cache is one that `adopt` can take: an empty `DynamicCache`."""
        remedy = "Pass a DynamicYaRNCache, or none: a patched model makes its own."
        plain = type(cache) is DynamicCache and all(
            type(layer) is DynamicLayer for layer in cache.layers
        )
        if not plain or cache.offloading:
            kind = f"an offloaded {type(cache).__name__}" if plain else f"a {type(cache).__name__}"
            raise TypeError(
                f"the cache of a patched model must be a DynamicYaRNCache, got {kind}. {remedy}"
            )
        if cache.get_seq_length() > 0:
            raise TypeError(
                f"the cache of a patched model must hold un-rotated keys, got a {type(cache).__name__} with "
                f"{cache.get_seq_length()} tokens whose keys are already rotated. {remedy}"
            )

    @classmethod
    def adopt(cls, cache: Cache) -> "DynamicYaRNCache":
        """Turns a cache that `check_adoptable` lets through into a `DynamicYaRNCache`, in place;
        leaves ours alone.

        `generate` makes its own `DynamicCache` before the model sees it, and callers keep the one
            they pass: were it only
        replaced, a loop that passes it again would find it empty and silently start over.
        """
        if not isinstance(cache, cls):
            cache.__class__ = cls
            cache.layers, cache.layer_class_to_replicate = [], DynamicLayer
            cache._clear()
        return cache

    @property
    def scales(self) -> list[float]:
        """Scale of each row's newest token; empty while the cache is."""
        if self.positions is None or self.schedule is None:
            return []
        newest = last_positions(self.positions)
        return self.schedule.scale(newest[:, None].cpu())[:, 0].tolist()

    def check_fits(self, schedule: YaRNSchedule, batch: int, layers: int) -> None:
        """Raises a ValueError unless a model with this schedule and number of layers can continue the cache."""
        if self.positions is None:
            return
        if self.schedule != schedule:
            raise ValueError(
                f"a cache must be continued under the options that filled it, {self.schedule}, got {schedule}. Start a "
                "new DynamicYaRNCache, or patch the model with those options."
            )
        if self.positions.shape[0] != batch:
            raise ValueError(
                f"the call must have the batch size of the cache, {self.positions.shape[0]}, got {batch}. Use "
                "cache.batch_repeat_interleave() or cache.batch_select_indices(), or start a new DynamicYaRNCache."
            )
        if len(self.layers) != layers:
            raise ValueError(
                f"a cache must be continued by the model that filled it, with {len(self.layers)} layers, got {layers}. "
                "Start a new DynamicYaRNCache."
            )

    def begin(self, forward: Any) -> None:
        """Opens the cache to the layers of one forward call, for as long as `forward` lives.

        Args:
            forward: any object that the call alone keeps alive, so that an interrupted call closes
                the cache too.
        """
        self._drop_uncommitted()
        self._forward = weakref.ref(forward)

    def commit(self, positions: torch.Tensor, schedule: YaRNSchedule, packed: bool) -> None:
        """Records the tokens that the forward call has appended and closes the cache.

        Args:
            positions: `(B, T)`, those of all tokens held now.
            schedule: the schedule they were computed under.
            packed: whether a row holds several documents.
        """
        self.positions, self.schedule, self.packed = positions, schedule, packed
        self._forward = None

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
            key_states, value_states: `(B, Hkv, T, D)`.
            layer_idx: index of the layer.

        Returns:
            All keys and all values of the layer, `(B, Hkv, L, D)` each.

        Raises:
            TypeError: the model is not patched, so that the keys would be rotated ones.
            ValueError: the new keys do not fit those held.
        """
        if self._forward is None or self._forward() is None:
            raise TypeError(
                "a DynamicYaRNCache must be used with a patched model, which gives it un-rotated keys; got a call from "
                "a model that is not patched. Call patch_llama(model) first, or pass a DynamicCache."
            )
        if layer_idx < len(self.layers) and self.layers[layer_idx].is_initialized:
            held, new = _kind(self.layers[layer_idx].keys), _kind(key_states)
            if held != new:
                raise ValueError(
                    f"new keys must have the dtype, batch, heads and head_dim of those in the cache, {held}, got {new}. "
                    "Start a new DynamicYaRNCache, or call the model as it was called before."
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens held, padding included."""
        return 0 if self.positions is None else self.positions.shape[1]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Cuts tokens off the end, by the rule of the installed transformers.

        Up to 5.17 a positive argument is the number of tokens to keep; from 5.20 on, only a
        negative one is taken: minus the number of tokens to remove.
        """
        self._drop_uncommitted()
        super().crop(*args, **kwargs)
        if self.positions is not None:
            kept = self.layers[0].keys.shape[-2]
            if kept == 0:
                self.reset()
            else:
                self.positions = self.positions[:, :kept]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self._drop_uncommitted()
        super().reorder_cache(beam_idx)
        if self.positions is not None:
            self.positions = self.positions.index_select(0, beam_idx.to(self.positions.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, copies next to each other."""
        self._drop_uncommitted()
        super().batch_repeat_interleave(repeats)
        if self.positions is not None:
            self.positions = self.positions.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`, in that order."""
        self._drop_uncommitted()
        super().batch_select_indices(indices)
        if self.positions is not None:
            self.positions = self.positions[indices]

    def reset(self) -> None:
        """Empties the cache, whatever filled it."""
        self.layers.clear()
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        self._drop_uncommitted()
        return {**self.__dict__, "_forward": None}

    def _clear(self) -> None:
        self.positions, self.schedule, self.packed = None, None, False
        self._forward: weakref.ref[Any] | None = None

    def _drop_uncommitted(self) -> None:
        """Undoes a forward call that did not reach `commit`."""
        self._forward = None
        length = self.get_seq_length()
        if length == 0:
            self.layers.clear()
        for index, layer in enumerate(self.layers):
            held = layer.keys.shape[-2]
            if held < length:
                raise ValueError(
                    f"layer {index} of the cache must hold {length} tokens like the cache itself, got {held}. Cut "
                    "tokens off with cache.crop(), which crops the positions too."
                )
            if held > length:
                layer.keys, layer.values = (
                    layer.keys[..., :length, :],
                    layer.values[..., :length, :],
                )


def last_positions(positions: torch.Tensor) -> torch.Tensor:
    """Position of the newest token of each row that is not padding, -1 where there is none: `(B, T)` to `(B,)`."""
    index = torch.arange(positions.shape[1], device=positions.device)
    newest = torch.where(positions >= 0, index, 0).amax(-1, keepdim=True)
    return positions.gather(1, newest)[:, 0]


def _kind(states: torch.Tensor) -> tuple[object, ...]:
    return (states.dtype, *states.shape[:2], states.shape[-1])
