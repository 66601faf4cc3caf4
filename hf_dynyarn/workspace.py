"""What the layers of one forward call share, one after the other: tables, and room for keys."""

from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from .rope import rotary_tables
from .rotated import RotatedKeys
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
        self._turns: dict[object, tuple[torch.Tensor, ...]] = {}
        self._scratch: dict[torch.device, RotatedKeys] = {}
        self._bounds: dict[object, dict[str, Any]] = {}

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

    def turn(self, segment: Segment, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Scale `(B, T)`, frequencies `(B, T, D/2)` and gain `(B, T)` of a segment's queries."""
        wanted = (segment.start, segment.trained, device)
        if wanted not in self._turns:
            scale = torch.tensor(segment.scales, dtype=torch.float64, device="cpu")
            self._turns[wanted] = tuple(
                torch.stack([part] * (segment.stop - segment.start), dim=1).to(device)
                for part in (scale, segment.inv_freq, segment.gain)
            )
        return self._turns[wanted]

    def scratch(self, device: torch.device) -> RotatedKeys:
        """A place for the rotated keys of one layer, for this call alone."""
        scratch = self._scratch.setdefault(device, RotatedKeys())
        scratch.forget()  # another layer's keys
        return scratch

    def bounds(self, segment: Segment, first: int, device: torch.device) -> dict[str, Any]:
        """Bounds of the documents that a segment has side by side, as flash kernels take them.

        Args:
            segment: the segment, of one row.
            first: first key that it is given.
            device: of the result.

        Returns:
            `cu_seq_lens_q` and `cu_seq_lens_k`, `(N + 1,)` int32, and the longest, `max_length_q`
            and `max_length_k`; nothing where there is one document.
        """
        if not segment.begins:
            return {}
        wanted = (segment.start, segment.stop, first, device)
        if wanted not in self._bounds:
            ends = (*segment.begins, segment.stop)
            # The first document may have begun earlier, with keys that lie before the segment.
            queries = [0, *(end - segment.start for end in ends)]
            keys = [0, *(self._past + end - first for end in ends)]
            self._bounds[wanted] = {
                "cu_seq_lens_q": torch.tensor(queries, dtype=torch.int32, device=device),
                "cu_seq_lens_k": torch.tensor(keys, dtype=torch.int32, device=device),
                "max_length_q": max(stop - start for start, stop in pairwise(queries)),
                "max_length_k": max(stop - start for start, stop in pairwise(keys)),
            }
        return self._bounds[wanted]
