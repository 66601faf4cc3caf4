"""What the layers of one forward call share, one after the other: tables, and room for keys."""

from functools import cached_property

import torch

from .layers import RotatedKeys
from .rope import rotary_tables
from .segments import Segment

Tables = tuple[torch.Tensor, torch.Tensor]


class Workspace:
    """Rotary tables that are made once for all layers, and a place for one layer's rotated keys.

    Args:
        held: `(B, P)`, positions of the keys held before the call, -1 where padding.
        new: `(B, T)`, positions of the new tokens, likewise.
    """

    def __init__(self, held: torch.Tensor, new: torch.Tensor) -> None:
        self._held, self._new, self._past = held, new, held.shape[1]
        self._tables: dict[bool, tuple[Segment, dict[object, Tables]]] = {}
        self._scratch: dict[torch.device, RotatedKeys] = {}

    @cached_property
    def positions(self) -> torch.Tensor:
        """Of all keys, `(B, P + T)`. Made when first asked for: a step mostly does without."""
        return torch.cat((self._held, self._new), dim=1)

    def tables(
        self,
        segment: Segment,
        device: torch.device,
        dtype: torch.dtype,
        row: int | None,
        first: int,
        last: int,
    ) -> Tables:
        """Gives cos and sin of keys `[first, last)` at the segment's scales, for all layers.

        Args:
            segment: the segment.
            device: of the result.
            dtype: of the result.
            row: one row, or None for all.
            first: first key.
            last: key after the last one.

        Returns:
            cos and sin, `(B or 1, last - first, D/2)` each.
        """
        # A call of many segments keeps the tables of one, and of one for layers as trained.
        owner, tables = self._tables.get(segment.trained, (None, {}))
        if owner is not segment:
            tables = {}
            self._tables[segment.trained] = (segment, tables)
        wanted = (device, dtype, row, first, last)
        if wanted not in tables:
            rows = slice(None) if row is None else slice(row, row + 1)
            new_only = first >= self._past
            positions = self._new if new_only else self.positions
            offset = self._past if new_only else 0
            tables[wanted] = rotary_tables(
                positions[rows, first - offset : last - offset].to(device),
                # From the CPU: without waiting for what the device still has to do.
                segment.inv_freq[rows].to(device, non_blocking=True),
                segment.gain[rows].to(device, non_blocking=True),
                dtype,
            )
        return tables[wanted]

    def scratch(self, device: torch.device) -> RotatedKeys:
        """A place for the rotated keys of one layer, for this call alone."""
        scratch = self._scratch.setdefault(device, RotatedKeys())
        scratch.forget()  # another layer's keys
        return scratch
