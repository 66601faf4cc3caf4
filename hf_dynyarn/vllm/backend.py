"""vLLM's attention over un-rotated keys, in torch: what CPUs run, and what vLLM asks about either.

Where the device has Triton, `fused_layer.py` stands in. What a step holds is in `metadata.py`.
Pieces of one query go through the kernels of `kernels.py`. For a longer piece one of these writes
rotated keys and values into a scratch of fixed size, and torch's own attention does the rest.
"""

import math
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..backends import fused
from ..backends.sdpa import attend_to_last
from ..rope import rotate
from ..rope_types import DYNAMIC_YARN
from .asked import BACKEND, interleaved, is_of_draft, is_own_dtype
from .kernels import decode, unpage
from .metadata import DynamicYaRNMetadata, DynamicYaRNMetadataBuilder, Run, Singles, Tables


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

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= fused.MOST_NUMBERS or not fused.has_kernels(
            current_platform.device_type
        )

    @staticmethod
    def get_name() -> str:
        return str(BACKEND.name)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        if fused.has_kernels(current_platform.device_type):
            from .fused_layer import FusedAttention

            return FusedAttention
        return DynamicYaRNAttention

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        if fused.has_kernels(current_platform.device_type):
            from .fused_metadata import FusedMetadataBuilder

            return FusedMetadataBuilder
        return DynamicYaRNMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Whether each request has as many queries is looked up on the host.
        return False


class Scratch:
    """Room for the keys and values of one request in one layer.

    Args:
        size: numbers in the keys of the longest text.
    """

    _shared: ClassVar[WeakValueDictionary[Any, "Scratch"]] = WeakValueDictionary()

    def __init__(self, size: int) -> None:
        self.both = torch.empty(2 * size, device=torch.get_default_device())

    @classmethod
    def shared(cls, size: int) -> "Scratch":
        """The one of all such layers of a process, which attend one after the other."""
        key = (size, torch.get_default_dtype(), torch.get_default_device())
        scratch = cls._shared.get(key) or cls(size)
        cls._shared[key] = scratch
        return scratch


class DynamicYaRNAttention(AttentionImpl[Any]):
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
        self.of_draft = is_of_draft(vllm_config)
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
        last = run.first + run.keys
        cos, sin = (table[None, last - len(query) : last] for table in (tables.cos, tables.sin))
        rotated = rotate(query.transpose(0, 1)[None], cos, sin, self.interleaved).to(query.dtype)
        keys, values = self._keys_and_values(cache, run, tables)
        return attend_to_last(self.scale, rotated, keys, values)[0]

    def _keys_and_values(
        self, cache: torch.Tensor, run: Run, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of a run, `(1, Hkv, keys, D)` each."""
        size = cache.shape[3]
        shape = (2, self.num_kv_heads, len(run.blocks), size, self.head_size)
        out = self.scratch.both[: math.prod(shape)].view(shape)
        rows = slice(run.first, run.first + len(run.blocks) * size)
        unpage(cache, run.blocks, tables.cos[rows], tables.sin[rows], self.interleaved, out)
        keys, values = out.flatten(2, 3)[:, None, :, : run.keys]
        return keys, values

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
