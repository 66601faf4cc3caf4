"""What the plug-in stands on in vLLM: names, and the parameters that they must take.

A version of vLLM is judged by what is found in it, not by its number. `missing` looks at the one
that is installed; the tests read the sources of others by the same table.
"""

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

Needs = dict[str, dict[str, tuple[str, ...]]]

# By module, and by name in it. The parameters are those that are passed or taken by the plug-in.
NEEDS: Needs = {
    "vllm.config.model": {
        "ModelConfig.get_and_verify_max_len": ("self", "max_model_len"),
        "ModelConfig.using_transformers_backend": ("self",),
        "ModelConfig.get_num_attention_heads": ("self", "parallel_config"),
        "ModelConfig.is_multimodal_model": (),
        "ModelConfig.is_encoder_decoder": (),
        "ModelConfig.use_mla": (),
        "ModelConfig.disable_sliding_window": (),
        "ModelConfig.max_model_len": (),
        "ModelConfig.spec_target_max_model_len": (),
    },
    "vllm.config.vllm": {
        "VllmConfig.__post_init__": ("self",),
        "VllmConfig.additional_config": (),
        "VllmConfig.kv_transfer_config": (),
        "VllmConfig.use_v2_model_runner": (),
        "get_current_vllm_config": (),
    },
    "vllm.config.attention": {
        "AttentionConfig.backend": (),
        "AttentionConfig.backend_per_kind": (),
    },
    "vllm.config.cache": {
        "CacheConfig.cache_dtype": (),
        "CacheConfig.block_size": (),
        "CacheConfig.kv_offloading_size": (),
    },
    "vllm.config.compilation": {
        "CompilationConfig.pass_config": (),
        "CompilationConfig.static_forward_context": (),
        "CompilationConfig.max_cudagraph_capture_size": (),
        "PassConfig": (),
    },
    "vllm.config.parallel": {
        "ParallelConfig.decode_context_parallel_size": (),
        "ParallelConfig.prefill_context_parallel_size": (),
    },
    "vllm.config.scheduler": {"SchedulerConfig.max_num_seqs": ()},
    "vllm.config.speculative": {
        "SpeculativeConfig": (),
        "SpeculativeConfig.method": (),
        "SpeculativeConfig.draft_model_config": (),
        "SpeculativeConfig.attention_backend": (),
        "SpeculativeConfig.kv_cache_dtype": (),
        "SpeculativeConfig.parallel_drafting": (),
        "SpeculativeConfig.uses_draft_model": ("self",),
    },
    "vllm.platforms.interface": {
        "Platform.get_attn_backend_cls": (
            "cls",
            "selected_backend",
            "attn_selector_config",
            "num_heads",
        ),
    },
    "vllm.model_executor.custom_op": {
        "CustomOp.register_oot": ("cls", "_decorated_op_cls", "name"),
        "op_registry_oot": (),
    },
    "vllm.model_executor.layers.rotary_embedding.base": {
        "RotaryEmbedding.__init__": (
            "self",
            "head_size",
            "rotary_dim",
            "max_position_embeddings",
            "base",
            "is_neox_style",
            "dtype",
        ),
        "RotaryEmbedding.forward_native": ("self", "positions", "query", "key"),
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum.CUSTOM": (),
        "AttentionBackendEnum.is_overridden": ("self",),
        "AttentionBackendEnum.get_path": ("self",),
        "register_backend": ("backend", "class_path"),
    },
    "vllm.utils.platform_utils": {"is_pin_memory_available": ()},
    "vllm.v1.attention.backend": {
        "AttentionBackend.get_supported_kernel_block_sizes": ("kv_cache_spec",),
        "AttentionBackend.supported_kv_cache_layouts": ("cls",),
        "AttentionBackend.supports_head_size": ("cls", "head_size"),
        "AttentionBackend.get_impl_cls": (),
        "AttentionBackend.get_builder_cls": (),
        "AttentionBackend.forward_includes_kv_cache_update": (),
        "AttentionBackend.supports_device_cpu_query_lens_mismatch": ("cls",),
        "AttentionCGSupport.UNIFORM_BATCH": (),
        "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE": (),
        "AttentionImpl.__init__": (
            "self",
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "alibi_slopes",
            "sliding_window",
            "kv_cache_dtype",
            "logits_soft_cap",
            "attn_type",
            "kv_sharing_target_layer_name",
        ),
        "AttentionImpl.forward": (
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
        "AttentionLayer": (),
        "AttentionMetadataBuilder.__init__": (
            "self",
            "kv_cache_spec",
            "layer_names",
            "vllm_config",
            "device",
        ),
        "AttentionMetadataBuilder.build": (
            "self",
            "common_prefix_len",
            "common_attn_metadata",
            "fast_build",
        ),
        "AttentionMetadataBuilder.get_cudagraph_support": ("cls", "vllm_config", "kv_cache_spec"),
        "AttentionMetadataBuilder.reorder_batch_threshold": (),
        "AttentionType.DECODER": (),
        "CommonAttentionMetadata.num_reqs": (),
        "CommonAttentionMetadata.query_start_loc": (),
        "CommonAttentionMetadata.query_start_loc_cpu": (),
        "CommonAttentionMetadata.seq_lens": (),
        "CommonAttentionMetadata.seq_lens_cpu_upper_bound": (),
        "CommonAttentionMetadata.block_table_tensor": (),
        "MultipleOf": (),
        "max_decode_query_len": ("vllm_config",),
    },
    "vllm.v1.attention.backends.utils": {
        "split_decodes_and_prefills": ("common_attn_metadata", "decode_threshold"),
    },
    "vllm.v1.kv_cache_interface": {
        "AttentionSpec.num_kv_heads": (),
        "AttentionSpec.head_size": (),
        "AttentionSpec.block_size": (),
        "AttentionSpec.dtype": (),
    },
    "vllm.v1.kv_cache_layout": {"KVCacheLayout.LBHNC": ()},
    "vllm.v1.spec_decode.llm_base_proposer": {
        "SpecDecodeBaseProposer._create_draft_vllm_config": ("self",),
    },
}


@cache
def missing() -> list[str]:
    """Names that the installed vLLM lacks, or that take other parameters there."""
    return [
        f"{module}.{name}"
        for module, names in NEEDS.items()
        for name, parameters in names.items()
        if not _is_there(module, name, parameters)
    ]


def _is_there(module: str, name: str, parameters: tuple[str, ...]) -> bool:
    try:
        owner: Any = import_module(module)
    except ImportError:
        return False
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    found = getattr(owner, last, None)
    if found is None:  # attributes of dataclasses need no default
        return last in getattr(owner, "__dataclass_fields__", {}) or hasattr(owner, last)
    if not parameters:
        return True
    taken = list(signature(found).parameters)
    wanted = [one for one in parameters if one not in ("self", "cls")]
    return [one for one in taken if one in wanted] == wanted
