"""vLLM's attention over un-rotated keys, in torch operations for any device.

Once per step the builder sorts the step's queries into `Read`s, each of which reads the keys of
some requests from the paged cache, and `Run`s of queries that share them and one scale. In each
layer, a read gathers its blocks into a scratch of fixed size, and each of its runs rotates the
keys there with its own frequencies and attends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
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

from ..attention import attend_to_last
from ..rope import rotary_tables, rotate
from .plugin import BACKEND, interleaved, schedule_of

# Positions for which a table is made at once, so that it is not made anew in each step.
TABLE = 1024

# Tables that are kept, in lengths of the longest text.
KEPT_TABLES = 8


class DynamicYaRNBackend(AttentionBackend):
    """What vLLM asks about the attention before it makes any.

    A block of the cache is `(Hkv, block_size, 2 D)`: beside the key of a token lies its value.
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
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type["DynamicYaRNAttention"]:
        return DynamicYaRNAttention

    @staticmethod
    def get_builder_cls() -> type["DynamicYaRNMetadataBuilder"]:
        return DynamicYaRNMetadataBuilder


@dataclass(frozen=True)
class Run:
    """Queries with one scale: of one request, or one of each request of a read.

    Attributes:
        tokens: their places among the tokens of the step, `(B * T,)`.
        keys: how many keys they see at most.
        cos: of the keys, `(1, keys, D/2)`.
        sin: of the keys, `(1, keys, D/2)`.
        own: cos and sin of the queries, `(B, T, D/2)` each.
        mask: `(B, 1, 1, keys)`, True at the keys that a request has; None where all have all.
    """

    tokens: torch.Tensor
    keys: int
    cos: torch.Tensor
    sin: torch.Tensor
    own: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Read:
    """Requests with the same number of blocks.

    Attributes:
        blocks: rows of the cache seen as `(blocks * Hkv, block_size, 2 D)`, `(B, Hkv, n)`.
        runs: of their queries.
    """

    blocks: torch.Tensor
    runs: list[Run]


@dataclass(frozen=True)
class DynamicYaRNMetadata:
    """One step, for all layers.

    Attributes:
        tokens: number of tokens in the step.
        reads: in any order.
    """

    tokens: int
    reads: list[Read]


class Tables:
    """Cosines and sines of the positions from 0 on, by scale; the least recently used ones go.

    Args:
        vllm_config: the engine's.
        device: of the tables.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.schedule = schedule_of(vllm_config)
        self.dtype, self.device = vllm_config.model_config.dtype, device
        self.longest = vllm_config.model_config.max_model_len
        self._kept: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, scale: float, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives cos and sin, `(1, length, D/2)` each."""
        tables = self._kept.pop(scale, None)
        if tables is None or tables[0].shape[1] < length:
            tables = self._make(scale, min(-(-length // TABLE) * TABLE, self.longest))
        self._kept[scale] = tables  # the last one
        sizes = (cos.shape[1] for cos, _ in self._kept.values())
        excess = sum(sizes) - KEPT_TABLES * self.longest
        while excess > 0:
            excess -= self._kept.pop(next(iter(self._kept)))[0].shape[1]
        return tables[0][:, :length], tables[1][:, :length]

    def _make(self, scale: float, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.tensor([scale], dtype=torch.float64)
        return rotary_tables(
            torch.arange(length, device=self.device)[None],
            self.schedule.inv_freq(scales).to(self.device),
            self.schedule.gain(scales).to(self.device),
            self.dtype,
        )


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
        self.tables = Tables(vllm_config, device)
        self.heads = torch.arange(kv_cache_spec.num_kv_heads, device=device)[:, None]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> DynamicYaRNMetadata:
        """Called by vLLM once per step."""
        bounds = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = common_attn_metadata.seq_lens.tolist()
        requests = list(zip(range(len(lengths)), bounds, bounds[1:], lengths, strict=False))
        single = [
            (request, start, length)
            for request, start, stop, length in requests
            if stop == start + 1
        ]
        reads = list(self._reads_of_one(single, common_attn_metadata.block_table_tensor))
        for request, start, stop, length in requests:
            if stop > start + 1:
                row = common_attn_metadata.block_table_tensor[request : request + 1]
                runs = list(self._runs(start, stop, length))
                reads.append(Read(self._blocks(row, length), runs))
        return DynamicYaRNMetadata(common_attn_metadata.num_actual_tokens, reads)

    def _reads_of_one(
        self, requests: list[tuple[int, int, int]], table: torch.Tensor
    ) -> Iterator[Read]:
        """Batches requests with one query each: number, place of the query, length."""
        size, longest = self.kv_cache_spec.block_size, self.tables.longest
        positions = torch.tensor([[length - 1 for _, _, length in requests]])
        scales = self.tables.schedule.scale(positions)[0].tolist()
        pairs = zip(requests, scales, strict=True)
        kinds = [(-(-length // size), scale) for (_, _, length), scale in pairs]
        ordered = sorted(zip(kinds, requests, strict=True))
        for (blocks, scale), group in groupby(ordered, key=lambda one: one[0]):
            members = [request for _, request in group]
            # As many as fit into the scratch.
            count = max(1, longest // (blocks * size))
            for first in range(0, len(members), count):
                yield self._read_of_one(members[first : first + count], scale, table)

    def _read_of_one(
        self, requests: list[tuple[int, int, int]], scale: float, table: torch.Tensor
    ) -> Read:
        numbers, places, lengths = (
            torch.tensor(column, device=self.device) for column in zip(*requests, strict=True)
        )
        keys = max(length for _, _, length in requests)
        cos, sin = self.tables.get(scale, keys)
        mask = None
        if any(length < keys for _, _, length in requests):
            mask = torch.arange(keys, device=self.device) < lengths[:, None]
            mask = mask[:, None, None]
        own = cos[0, lengths - 1][:, None], sin[0, lengths - 1][:, None]
        run = Run(places, keys, cos, sin, own, mask)
        return Read(self._blocks(table[numbers], keys), [run])

    def _runs(self, start: int, stop: int, length: int) -> Iterator[Run]:
        """Cuts the queries `[start, stop)` of a request, its last ones, where the scale changes."""
        past = length - (stop - start)
        scales = self.tables.schedule.scale(torch.arange(past, length)[None])[0]
        values, counts = scales.unique_consecutive(return_counts=True)
        for scale, count in zip(values.tolist(), counts.tolist(), strict=True):
            keys = past + count
            cos, sin = self.tables.get(scale, keys)
            tokens = torch.arange(start, start + count, device=self.device)
            yield Run(tokens, keys, cos, sin, (cos[:, past:], sin[:, past:]))
            start, past = start + count, keys

    def _blocks(self, table: torch.Tensor, keys: int) -> torch.Tensor:
        """The blocks of `keys` tokens, for each head: `(B, Hkv, n)`."""
        count = -(-keys // self.kv_cache_spec.block_size)
        return table[:, None, :count] * len(self.heads) + self.heads


class Scratch:
    """What one read gathers and one run rotates, of one layer.

    Args:
        heads: key heads.
        tokens: how many at most.
        head_dim: dimension of a head.
    """

    _shared: ClassVar[WeakValueDictionary[Any, "Scratch"]] = WeakValueDictionary()

    def __init__(self, heads: int, tokens: int, head_dim: int) -> None:
        self.gathered = torch.empty(heads * tokens * 2 * head_dim)
        self.rotated = torch.empty(heads * tokens * head_dim)

    @classmethod
    def shared(cls, *shape: int) -> "Scratch":
        """The one of all layers of this shape, which attend one after the other."""
        key = (*shape, torch.get_default_dtype(), torch.get_default_device())
        scratch = cls._shared.get(key) or cls(*shape)
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
        ):
            if refused:
                raise ValueError(
                    f"{name} of an attention layer of rope_type 'dynamic_yarn' must be as in a "
                    f"decoder that sees all {longest} tokens before it, got {value!r}. Serve the "
                    "model with another rope_type, or a sliding window with a lower max_model_len."
                )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.interleaved = interleaved(vllm_config)
        size = vllm_config.cache_config.block_size
        self.scratch = Scratch.shared(num_kv_heads, -(-longest // size) * size, head_size)

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
        states = torch.cat((key, value), dim=-1)[: len(slots)]
        kv_cache[slots // size, :, slots % size] = states

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
        rows = kv_cache.view(-1, *kv_cache.shape[2:])  # (blocks * Hkv, block_size, 2 D)
        result = output.view(-1, self.num_heads, self.head_size)
        for read in attn_metadata.reads:
            keys, values = self._gather(rows, read.blocks)
            for run in read.runs:
                queries = query[run.tokens].view(len(keys), -1, *query.shape[1:]).transpose(1, 2)
                queries = rotate(queries, *run.own, self.interleaved)
                rotated = self._rotate(keys[:, :, : run.keys], run)
                attended = self._attend(queries, rotated, values[:, :, : run.keys], run.mask)
                result[run.tokens] = attended.flatten(0, 1)
        return output

    def _gather(
        self, rows: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some blocks, `(B, Hkv, n * block_size, D)` each."""
        size, width = rows.shape[1:]
        gathered = self.scratch.gathered[: blocks.numel() * size * width].view(-1, size, width)
        torch.index_select(rows, 0, blocks.flatten(), out=gathered)
        keys, values = gathered.view(*blocks.shape[:2], -1, width).split(self.head_size, -1)
        return keys, values

    def _rotate(self, keys: torch.Tensor, run: Run) -> torch.Tensor:
        out = self.scratch.rotated[: keys.numel()].view(keys.shape)
        return rotate(keys, run.cos, run.sin, self.interleaved, out=out)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends for `(B, Hq, T, D)`, gives `(B, T, Hq, D)`."""
        if query.shape[2] > 1:
            return attend_to_last(self.scale, query, key, value)
        # The query heads of a group as more queries of their key head.
        grouped = query.view(len(query), self.num_kv_heads, -1, self.head_size)
        output = scaled_dot_product_attention(grouped, key, value, mask, scale=self.scale)
        return output.reshape(len(query), 1, self.num_heads, self.head_size)
