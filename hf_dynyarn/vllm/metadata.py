"""One step of vLLM, sorted for all layers: pieces of one scale, and the tables that turn them.

Once per step the builder cuts each request's queries where the scale changes. Pieces of one query,
which is what decoding has, go together; a longer piece, as prompts have, goes by itself. Pieces
whose tables have room at one time make a wave.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from ..rope import rotary_tables
from ..schedules import Schedule
from .asked import interleaved, of_layers, schedule_of
from .kernels import decode, unpage

# Positions that tables have room for, if the longest text is no longer: 16 MiB for heads of 64
# numbers in float32.
ROOM = 1 << 16

# Numbers in the results of single blocks that decoding holds at a time: 64 MiB, or what the longest
# text takes, if that is more.
RESULTS = 1 << 24

# Tables are made for so many more positions at a time, to serve for as many steps.
AHEAD = 1024


@dataclass(frozen=True)
class Piece:
    """Queries of one request with one scale, the last of the keys that they see.

    Attributes:
        request: its number in the step.
        start: place of the first query among the tokens of the step.
        stop: place after the last one.
        keys: how many keys the last one sees.
        scale: of the queries.
    """

    request: int
    start: int
    stop: int
    keys: int
    scale: float


def pieces_of(
    schedule: Schedule, request: int, start: int, stop: int, length: int
) -> Iterator[Piece]:
    """Cuts the queries `[start, stop)` of a request, its last ones, where the scale changes."""
    past = length - (stop - start)
    positions = torch.arange(past, length, device="cpu")
    scales = schedule.scale(positions[None])[0]
    values, counts = scales.unique_consecutive(return_counts=True)
    for scale, count in zip(values.tolist(), counts.tolist(), strict=True):
        past += count
        yield Piece(request, start, start + count, past, scale)
        start += count


@dataclass(frozen=True)
class Singles:
    """Pieces of one query: what `kernels.decode` takes, and where the queries are.

    Attributes:
        tokens: places of the queries among the tokens of the step, `(B,)`.
        rows: of the tables, for the queries, `(B,)`.
        blocks: as `decode` takes it, like the next three.
        requests: `(N,)`.
        starts: `(N,)`.
        keys: `(N,)`.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    blocks: torch.Tensor
    requests: torch.Tensor
    starts: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class Run:
    """A piece of several queries.

    Attributes:
        tokens: places of the queries among the tokens of the step.
        keys: how many keys the last one sees.
        first: row of the tables for the first key.
        blocks: places in the cache of the blocks that hold them, `(n,)`.
    """

    tokens: slice
    keys: int
    first: int
    blocks: torch.Tensor


@dataclass(frozen=True)
class Wave:
    """Pieces whose tables fit into the room for them at one time.

    Attributes:
        wanted: the tables to make before, length by scale; None where they were made for all
            layers, as there is one wave.
        singles: pieces of one query, as many at a time as there is memory for.
        runs: the others.
    """

    wanted: dict[float, int] | None
    singles: list[Singles]
    runs: list[Run]


@dataclass(frozen=True)
class DynamicYaRNMetadata:
    """One step, for all layers."""

    tables: "Tables"
    waves: list[Wave]


class Tables:
    """Cosines and sines of positions from 0 on, at several scales, in a room of fixed size.

    Attributes:
        cos: `(rows, R)` float32, with `R` half the rotated dimension.
        sin: `(rows, R)` float32.

    Args:
        vllm_config: the engine's.
        device: of the tables.
        spare: rows that may be read beyond the last table, though not used.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, spare: int) -> None:
        self.schedule = schedule_of(vllm_config)
        self.room = max(ROOM, self.length(vllm_config.model_config.max_model_len))
        shape = (self.room + spare, self.schedule.rotary_dim // 2)
        # Whatever the model's dtype is: only what was rotated is rounded to it.
        self.cos, self.sin = torch.zeros(2, *shape, dtype=torch.float32, device=device)
        self._made: dict[float, tuple[int, int]] = {}  # first row and length by scale

    @staticmethod
    def length(keys: int) -> int:
        """How long a table for so many keys is made."""
        return -(-keys // AHEAD) * AHEAD

    def make(self, wanted: dict[float, int], anew: bool = False) -> dict[float, int]:
        """Makes the tables that are not there.

        Args:
            wanted: length of each by its scale; together no longer than the room.
            anew: forget all others first, so that the same request always gets the same rows.

        Returns:
            first row of each, by its scale.
        """
        missing = [
            scale for scale, length in wanted.items() if self._made.get(scale, (0, 0))[1] < length
        ]
        # Not the sum: what a table that was made anew, longer, leaves behind is not used again.
        used = max((first + length for first, length in self._made.values()), default=0)
        if anew or used + sum(wanted[scale] for scale in missing) > self.room:
            self._made, missing, used = {}, list(wanted), 0
        for scale in missing:
            used = self._make(scale, used, wanted[scale])
        return {scale: self._made[scale][0] for scale in wanted}

    def _make(self, scale: float, first: int, length: int) -> int:
        scales, device = torch.tensor([scale], dtype=torch.float64, device="cpu"), self.cos.device
        cos, sin = rotary_tables(
            torch.arange(length, device=device)[None],
            self.schedule.inv_freq(scales).to(device),
            self.schedule.gain(scales).to(device),
            self.cos.dtype,
        )
        self.cos[first : first + length], self.sin[first : first + length] = cos[0], sin[0]
        self._made[scale] = (first, length)
        return first + length


class DynamicYaRNMetadataBuilder(AttentionMetadataBuilder[DynamicYaRNMetadata]):
    """Sorts the queries of a step."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        vllm_config = of_layers(vllm_config, layer_names)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.tables = Tables(vllm_config, device, spare=kv_cache_spec.block_size)
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.at_once = max(1, RESULTS // (heads * kv_cache_spec.head_size))
        self._compile(heads)

    @torch.inference_mode()
    def _compile(self, heads: int) -> None:
        """Runs the kernels: a missing compiler stops the start, and no request waits for it."""
        spec, device = self.kv_cache_spec, self.device
        shape = (2, spec.num_kv_heads, 2, spec.block_size, spec.head_size)
        with torch.inference_mode(False):  # as vLLM makes it: torch tells the two kinds apart
            cache = torch.zeros(shape, dtype=spec.dtype, device=device)
        query = torch.zeros(1, shape[1], heads // shape[1], spec.head_size, device=device)
        zero = torch.zeros(1, dtype=torch.long, device=device)
        # Apart, as sizes are marked on each.
        requests, starts, keys = zero.clone(), zero.clone(), zero + 1
        cos, sin = self.tables.cos, self.tables.sin
        interleave = interleaved(self.vllm_config)
        decode(query, cache, zero, requests, starts, keys, cos, sin, interleave)
        out = cache.new_empty(2, shape[1], 1, *shape[3:])
        rows = slice(spec.block_size)
        unpage(cache, zero.clone(), cos[rows], sin[rows], interleave, out)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> DynamicYaRNMetadata:
        """Called by vLLM once per step."""
        bounds = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = common_attn_metadata.seq_lens.tolist()
        blocks = common_attn_metadata.block_table_tensor.long()
        pieces = [
            piece
            for request, length in enumerate(lengths)
            for piece in self._pieces(request, bounds[request], bounds[request + 1], length)
        ]
        packed = list(self._pack(pieces))
        several = len(packed) > 1
        waves = []
        for wanted, members in packed:
            firsts = self.tables.make(wanted, anew=several)
            singles = [piece for piece in members if piece.stop - piece.start == 1]
            runs = [piece for piece in members if piece.stop - piece.start > 1]
            waves.append(
                Wave(
                    wanted if several else None,
                    [self._singles(few, firsts, blocks) for few in self._few(singles)],
                    [self._run(piece, firsts, blocks) for piece in runs],
                )
            )
        return DynamicYaRNMetadata(self.tables, waves)

    def _pieces(self, request: int, start: int, stop: int, length: int) -> Iterator[Piece]:
        """Cuts the queries `[start, stop)` of a request, its last ones, where the scale changes."""
        return pieces_of(self.tables.schedule, request, start, stop, length)

    def _pack(self, pieces: list[Piece]) -> Iterator[tuple[dict[float, int], list[Piece]]]:
        """Sorts pieces by scale into waves, each with the tables that it wants."""
        wanted: dict[float, int] = {}
        members: list[Piece] = []
        for piece in sorted(pieces, key=lambda piece: piece.scale):
            length = self.tables.length(piece.keys)
            more = {**wanted, piece.scale: max(length, wanted.get(piece.scale, 0))}
            if sum(more.values()) > self.tables.room:
                yield wanted, members
                more, members = {piece.scale: length}, []
            wanted = more
            members.append(piece)
        yield wanted, members

    def _few(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Parts pieces of one query, for decoding holds a result for each of their blocks."""
        few: list[Piece] = []
        count = 0
        for piece in pieces:
            blocks = self._blocks(piece.keys)
            if few and count + blocks > self.at_once:
                yield few
                few, count = [], 0
            few.append(piece)
            count += blocks
        if few:
            yield few

    def _blocks(self, keys: int) -> int:
        """How many blocks so many keys take."""
        return -(-keys // int(self.kv_cache_spec.block_size))

    def _singles(
        self, pieces: list[Piece], firsts: dict[float, int], table: torch.Tensor
    ) -> Singles:
        size = self.kv_cache_spec.block_size
        first, token, length, number = (
            torch.tensor(column, device="cpu")
            for column in zip(
                *((firsts[one.scale], one.start, one.keys, one.request) for one in pieces),
                strict=True,
            )
        )
        counts = -(-length // size)
        requests = torch.arange(len(pieces), device="cpu").repeat_interleave(counts)
        # Places of the blocks in their requests.
        places = torch.arange(len(requests), device="cpu") - (counts.cumsum(0) - counts)[requests]
        keys = (length[requests] - places * size).clamp(max=size)
        starts = first[requests] + places * size
        device = self.device
        blocks = table[number[requests].to(device), places.to(device)]
        return Singles(
            token.to(device),
            (first + length - 1).to(device),
            blocks,
            requests.to(device),
            starts.to(device),
            keys.to(device),
        )

    def _run(self, piece: Piece, firsts: dict[float, int], table: torch.Tensor) -> Run:
        blocks = table[piece.request, : self._blocks(piece.keys)]
        return Run(slice(piece.start, piece.stop), piece.keys, firsts[piece.scale], blocks)
