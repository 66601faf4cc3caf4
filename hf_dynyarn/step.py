"""One decoding step over a static cache: all on the device, so that a graph can hold it.

A step has few new tokens, and reads nothing back to the host: positions, scales, frequencies and
gains are tensors, and no decision depends on their values. `torch.compile` makes one graph of a
step, for texts of any length, at any scale and with any padding.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from .backends import fused
from .cache import check_alike
from .schedules import Schedule
from .static import StaticYaRNCache

# New tokens of a row that a step takes; of more, a call is planned.
MOST_TOKENS = fused.MOST_QUERIES

# Scale `(B, T)`, frequencies `(B, T, R)` and gain `(B, T)` of the new tokens.
Turn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class Step:
    """What every layer of one step needs to know; made by `make_step`.

    Attributes:
        cache: what the step fills and reads.
        schedule: the schedule in force.
        windowed: that of layers which keep the scale they were trained at.
        unrotated: indices of the layers that rotate nothing.
        interleaved: how the pairs of a head lie, see `rotate`.
        windows: how many keys a query sees in each layer; None where a layer is told.
        new: `(B, T)`, positions of the new tokens, -1 where padding.
        order: `(B, T)`, the new tokens with padding first; None where none is, or one token.
    """

    cache: StaticYaRNCache
    schedule: Schedule
    windowed: Schedule
    unrotated: frozenset[int]
    interleaved: bool
    windows: dict[int, int | None] | None
    new: torch.Tensor
    order: torch.Tensor | None
    _turns: dict[str, Turn] = field(default_factory=dict)

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        told: int | None,
    ) -> torch.Tensor:
        """Writes the new keys and values of a layer into the cache, and attends over all of them.

        Args:
            layer: an attention layer.
            query: `(B, Hq, T, D)`, un-rotated.
            key: `(B, Hkv, T, D)`, un-rotated.
            value: `(B, Hkv, T, D)`.
            scaling: factor on the logits.
            told: how many keys a query sees, as the layer is told, or None for all.

        Returns:
            `(B, T, Hq, D)`
        """
        window = told if self.windows is None else self.windows[layer.layer_idx]
        held = self.cache.layers[layer.layer_idx]
        check_alike(held, key, value)
        slots = torch.where(self.new < 0, held.max_cache_len, self.new).to(key.device)
        held.write(key, value, slots)
        if self.order is not None:
            query = query.gather(2, self.order[:, None, :, None].expand_as(query))
        scale, inv_freq, gain = (part.to(key.device) for part in self._turn(layer, window))
        lengths = self.cache.filled.lengths + (self.new >= 0).sum(-1)
        output = fused.decode(
            query,
            held.keys,
            held.values,
            scaling,
            lengths.to(key.device),
            torch.zeros_like(lengths, device=key.device),
            scale,
            inv_freq,
            gain,
            window=window,
            interleaved=self.interleaved,
        )
        if self.order is not None:
            places = self.order[:, :, None, None].expand_as(output)
            output = torch.empty_like(output).scatter_(1, places, output)
        return output

    def _turn(self, layer: Any, window: int | None) -> Turn:
        """How far keys are turned in a layer, computed once for all that are alike."""
        within = window is not None and window <= self.schedule.original_max_position_embeddings
        kind = "none" if layer.layer_idx in self.unrotated else "trained" if within else "stretched"
        if kind not in self._turns:
            self._turns[kind] = self._make_turn(kind)
        return self._turns[kind]

    def _make_turn(self, kind: str) -> Turn:
        schedule = self.schedule if kind == "stretched" else self.windowed
        positions = self.new if self.order is None else self.new.gather(1, self.order)
        scale = schedule.scale(positions.clamp(min=0))
        if kind != "stretched":
            scale = torch.full_like(scale, schedule.min_scale)
        constants = () if schedule is not self.schedule else self.cache.constants
        inv_freq, gain = schedule.inv_freq(scale, *constants), schedule.gain(scale)
        if kind == "none":
            inv_freq, gain = torch.zeros_like(inv_freq), torch.ones_like(gain)
        return scale, inv_freq, gain


def make_step(
    cache: StaticYaRNCache,
    schedule: Schedule,
    windowed: Schedule | None,
    unrotated: frozenset[int],
    interleaved: bool,
    windows: dict[int, int | None] | None,
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> Step:
    """Finds the positions of the new tokens of a step.

    Args:
        cache: which has its buffers. Only read.
        schedule: the schedule in force.
        windowed: that of layers which keep the scale they were trained at. Default: `schedule`.
        unrotated: indices of the layers that rotate nothing.
        interleaved: how the pairs of a head lie, see `rotate`.
        windows: see `Step`.
        inputs: `input_ids` or `inputs_embeds`, `(B, T, ...)`, `T` at most `MOST_TOKENS`.
        attention_mask: `(B, T)` or `(B, tokens held + T)` with 0 for padding, or None.
        position_ids: `(B or 1, T)`, or None.

    Raises:
        ValueError: see `StaticPositions.following`.
    """
    tokens = inputs.shape[1]
    new = cache.filled.following(tokens, attention_mask, position_ids)
    order = None
    if attention_mask is not None and tokens > 1:
        order = (new >= 0).int().argsort(dim=-1, stable=True)
    return Step(cache, schedule, windowed or schedule, unrotated, interleaved, windows, new, order)
