"""vLLM's attention over un-rotated keys, for any device that torch runs on.

Once per step the builder cuts each request's queries where the scale changes. Pieces of one query,
which is what decoding has, go together through the kernels of `kernels.py`. For a longer piece, as
prompts have, the keys are gathered from the cache into a scratch of fixed size, rotated, and
attended to by torch's own attention.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from ..backends.sdpa import attend_to_last
from ..rope import rotary_tables, rotate
from ..rope_types import DYNAMIC_YARN
from .kernels import decode
from .plugin import BACKEND, interleaved, is_own_dtype, schedule_of

# Positions that tables have room for, if the longest text is no longer: 16 MiB for heads of 64
# numbers in float32.
ROOM = 1 << 16

# Numbers in the results of single blocks that decoding holds at a time: 64 MiB, or what the longest
# text takes, if that is more.
RESULTS = 1 << 24

# Tables are made for so many more positions at a time, to serve for as many steps.
AHEAD = 1024


class DynamicYaRNBackend(AttentionBackend):
    """What vLLM asks about the attention before it makes any.

    A block of the cache is `(Hkv, 2, block_size, D)`: un-rotated keys, and values.
    """

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_name() -> str:
        return str(BACKEND.name)

    @staticmethod
    def get_impl_cls() -> type["DynamicYaRNAttention"]:
        return DynamicYaRNAttention

    @staticmethod
    def get_builder_cls() -> type["DynamicYaRNMetadataBuilder"]:
        return DynamicYaRNMetadataBuilder


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
        rows: of the tables, for all keys.
        blocks: of the keys in the cache, seen as `(blocks * Hkv * 2, block_size, D)`, `(Hkv * n,)`;
            those of the values come one after.
    """

    tokens: slice
    rows: slice
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
        cos: `(rows, R)`, with `R` half the rotated dimension.
        sin: `(rows, R)`.

    Args:
        vllm_config: the engine's.
        device: of the tables.
        spare: rows that may be read beyond the last table, though not used.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, spare: int) -> None:
        self.schedule = schedule_of(vllm_config)
        self.room = max(ROOM, self.length(vllm_config.model_config.max_model_len))
        shape = (self.room + spare, self.schedule.rotary_dim // 2)
        dtype = vllm_config.model_config.dtype
        self.cos = torch.zeros(shape, dtype=dtype, device=device)
        self.sin = torch.zeros(shape, dtype=dtype, device=device)
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
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.tables = Tables(vllm_config, device, spare=kv_cache_spec.block_size)
        key_heads, dim = kv_cache_spec.num_kv_heads, kv_cache_spec.head_size
        self.heads = torch.arange(key_heads, device=device)[:, None]
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.at_once = max(1, RESULTS // (heads * dim))
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
        past = length - (stop - start)
        positions = torch.arange(past, length, device="cpu")
        scales = self.tables.schedule.scale(positions[None])[0]
        values, counts = scales.unique_consecutive(return_counts=True)
        for scale, count in zip(values.tolist(), counts.tolist(), strict=True):
            past += count
            yield Piece(request, start, start + count, past, scale)
            start += count

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
        blocks = (blocks * len(self.heads) + self.heads) * 2
        first = firsts[piece.scale]
        rows = slice(first, first + piece.keys)
        return Run(slice(piece.start, piece.stop), rows, blocks.flatten())


class Scratch:
    """Room for the keys and values of one request in one layer.

    Args:
        size: numbers in the keys of the longest text.
    """

    _shared: ClassVar[WeakValueDictionary[Any, "Scratch"]] = WeakValueDictionary()

    def __init__(self, size: int) -> None:
        self.gathered, self.rotated = torch.empty(2, size, device=torch.get_default_device())

    @classmethod
    def shared(cls, size: int) -> "Scratch":
        """The one of all such layers of a process, which attend one after the other."""
        key = (size, torch.get_default_dtype(), torch.get_default_device())
        scratch = cls._shared.get(key) or cls(size)
        cls._shared[key] = scratch
        return scratch


class DynamicYaRNAttention(AttentionImpl[DynamicYaRNMetadata]):
    """The attention of one layer.

    Raises:
        ValueError: the layer attends in a way that this cannot.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        vllm_config = get_current_vllm_config()
        longest = vllm_config.model_config.max_model_len
        for name, value, refused in (
            ("alibi_slopes", alibi_slopes, alibi_slopes is not None),
            ("sliding_window", sliding_window, (sliding_window or longest) < longest),
            ("logits_soft_cap", logits_soft_cap, bool(logits_soft_cap)),
            ("attn_type", attn_type, attn_type != AttentionType.DECODER),
            (
                "kv_sharing_target_layer_name",
                kv_sharing_target_layer_name,
                kv_sharing_target_layer_name is not None,
            ),
            ("sinks", sinks, sinks is not None),
            ("kv_cache_dtype", kv_cache_dtype, not is_own_dtype(vllm_config, kv_cache_dtype)),
        ):
            if refused:
                raise ValueError(
                    f"{name} of an attention layer of rope_type {DYNAMIC_YARN!r} must be as in a "
                    f"decoder that sees all {longest} tokens before it, got {value!r}. Serve the "
                    "model with another rope_type, or a sliding window with a lower max_model_len."
                )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.interleaved = interleaved(vllm_config)
        size = vllm_config.cache_config.block_size
        self.scratch = Scratch.shared(num_kv_heads * -(-longest // size) * size * head_size)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes keys and values as they are.

        Args:
            layer: the layer.
            key: `(T, Hkv, D)`.
            value: `(T, Hkv, D)`.
            kv_cache: `(blocks, Hkv, block_size, 2 D)`.
            slot_mapping: `(T,)`; -1 marks padding, which goes to vLLM's null block.
        """
        size = kv_cache.shape[2]
        slots = slot_mapping.clamp(min=0)
        cache = self._halves(kv_cache)
        for half, states in enumerate((key, value)):
            cache[slots // size, :, half, slots % size] = states[: len(slots)]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: DynamicYaRNMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends.

        Args:
            layer: the layer.
            query: `(T, Hq, D)`, un-rotated.
            key: of the same tokens; read from the cache instead.
            value: of the same tokens; read from the cache instead.
            kv_cache: `(blocks, Hkv, block_size, 2 D)`.
            attn_metadata: of the step; None while vLLM warms up.
            output: where to write, `(T, Hq, D)`.
            output_scale: not supported, and not asked for by vLLM.
            output_block_scale: not supported, and not asked for by vLLM.
        """
        if attn_metadata is None:
            return output.fill_(0)
        cache = self._halves(kv_cache)
        result = output.view(-1, self.num_heads, self.head_size)
        tables = attn_metadata.tables
        for wave in attn_metadata.waves:
            if wave.wanted is not None:
                tables.make(wave.wanted, anew=True)
            for run in wave.runs:
                result[run.tokens] = self._attend(query[run.tokens], cache, run, tables)
            for singles in wave.singles:
                result[singles.tokens] = self._decode(query[singles.tokens], cache, singles, tables)
        return output

    def _attend(
        self, query: torch.Tensor, cache: torch.Tensor, run: Run, tables: Tables
    ) -> torch.Tensor:
        """Attends for `(T, Hq, D)` of one request, gives the like."""
        cos, sin = tables.cos[None, run.rows], tables.sin[None, run.rows]
        own = cos[:, -len(query) :], sin[:, -len(query) :]
        rotated = rotate(query.transpose(0, 1)[None], *own, self.interleaved)
        keys = self._gather(cache, run.blocks, cos.shape[1])
        out = self.scratch.rotated[: keys.numel()].view(keys.shape)
        keys = rotate(keys, cos, sin, self.interleaved, out=out)
        values = self._gather(cache, run.blocks + 1, cos.shape[1])
        return attend_to_last(self.scale, rotated, keys, values)[0]

    def _gather(self, cache: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` keys, or values, in some blocks: `(1, Hkv, count, D)`."""
        rows = cache.view(-1, *cache.shape[3:])
        shape = (len(blocks), *rows.shape[1:])
        out = self.scratch.gathered[: math.prod(shape)].view(shape)
        states = torch.index_select(rows, 0, blocks, out=out)
        return states.view(1, self.num_kv_heads, -1, self.head_size)[:, :, :count]

    def _decode(
        self, query: torch.Tensor, cache: torch.Tensor, singles: Singles, tables: Tables
    ) -> torch.Tensor:
        """Attends for `(B, Hq, D)` of as many requests, gives the like."""
        own = tables.cos[singles.rows][:, None], tables.sin[singles.rows][:, None]
        rotated = rotate(query[:, :, None], *own, self.interleaved).float() * self.scale
        output = decode(
            rotated.view(len(query), self.num_kv_heads, -1, self.head_size),
            cache,
            singles.blocks,
            singles.requests,
            singles.starts,
            singles.keys,
            tables.cos,
            tables.sin,
            self.interleaved,
        )
        return output.view(query.shape).to(query.dtype)

    def _halves(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache as `(blocks, Hkv, 2, block_size, D)`."""
        return kv_cache.view(*kv_cache.shape[:2], 2, -1, self.head_size)
