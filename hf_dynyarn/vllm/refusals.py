"""What the plug-in refuses, each with what was expected, what came and what to do.

Versions of vLLM that lack a name in `needs.py`, models whose layers rotate in another way, options
of the engine under which results would be wrong or were never seen, drafts that were never run.
"""

from typing import Any

import vllm
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.logger import init_logger

from ..rope_types import DYNAMIC_YARN
from .asked import BACKEND, PATH, is_own_dtype, schedule_from
from .needs import missing

# Versions that the tests ran on.
TESTED = ("0.32.0",)

logger = init_logger(f"vllm.{__name__}")

# The families, by `model_type`, that vLLM has a class for in which all layers rotate, and alike.
SERVED = (
    "cohere",
    "gemma",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)

# How drafts may come about: those that have a model of their own, and all that were run.
DRAFTS = ("draft_model", "eagle", "eagle3")
METHODS = ("ngram", *DRAFTS)


def check_model(config: ModelConfig) -> None:
    """Refuses what is no supported model, with the reason.

    Raises:
        ValueError: vLLM's version, the model or its rope parameters are not supported.
        TypeError: the rope parameters have unknown keys, or values of the wrong type.
    """
    _check_version()
    text_config = config.hf_text_config
    if text_config.model_type not in SERVED:
        raise ValueError(
            f"rope_type {DYNAMIC_YARN!r} in vLLM must be of a model of the families {SERVED}, "
            f"got model_type {text_config.model_type!r}. Leave the rope_type out."
        )
    for name, refused in {
        "one of images": config.is_multimodal_model,
        "an encoder-decoder": config.is_encoder_decoder,
        "one with multi-head latent attention": config.use_mla,
        **{
            f"one with {name}": getattr(text_config, name, None) is not None
            for name in ("dual_chunk_attention_config", "llama_4_scaling", "layer_rope_theta")
        },
        "one whose sliding window is disabled": config.disable_sliding_window
        and bool(getattr(text_config, "sliding_window", None)),
        "served through transformers (model_impl)": config.using_transformers_backend(),
        f"run for {config.runner_type}": config.runner_type not in ("generate", "draft"),
    }.items():
        if refused:
            raise ValueError(
                f"a model of rope_type {DYNAMIC_YARN!r} must be a causal language model of vLLM's "
                f"own that generates text, got {name}. Leave the rope_type out."
            )
    rope = text_config.rope_parameters
    if rope.get("rope_type") != DYNAMIC_YARN or "rope_theta" not in rope:
        raise ValueError(
            f"rope_parameters must be {{'rope_type': {DYNAMIC_YARN!r}, 'rope_theta': ..., ...}}, "
            f"the same for all layers, got {rope}."
        )
    schedule_from(text_config, rope)


def _check_version() -> None:
    """Refuses a vLLM that lacks what the plug-in stands on; warns of one that was never run.

    Raises:
        ValueError: names are missing, or take other parameters.
    """
    if lacks := missing():
        raise ValueError(
            f"vLLM must have {', '.join(lacks)} as version {' or '.join(TESTED)} has for rope_type "
            f"{DYNAMIC_YARN!r}, got version {vllm.__version__}. Install one of these, or leave the "
            "rope_type out."
        )
    if vllm.__version__ not in TESTED:
        logger.warning_once(
            "hf_dynyarn was run with vLLM %s, and never with %s, which has all that it stands on.",
            " and ".join(TESTED),
            vllm.__version__,
        )


def check_engine(config: VllmConfig) -> None:
    """Refuses engine options under which the results would be wrong, or were never seen.

    Raises:
        ValueError: one of them is set.
    """
    parallel = config.parallel_config
    kv_cache_dtype = config.cache_config.cache_dtype
    if not is_own_dtype(config, kv_cache_dtype):
        raise ValueError(
            f"kv_cache_dtype must be 'auto' or the model's with rope_type {DYNAMIC_YARN!r}, got "
            f"{kv_cache_dtype!r}. Leave it out."
        )
    _check_each(
        ("attention_config.backend_per_kind", config.attention_config.backend_per_kind, (None, {})),
        ("kv_offloading_size", config.cache_config.kv_offloading_size, (None,)),
        ("attention_backend", config.attention_config.backend, (None,)),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, (1,)),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, (1,)),
        ("kv_transfer_config", config.kv_transfer_config, (None,)),
    )
    if BACKEND.get_path() != PATH:
        raise ValueError(
            f"the attention backend {BACKEND.name} must be {PATH} with rope_type "
            f"{DYNAMIC_YARN!r}, got {BACKEND.get_path()} of another plug-in. Turn that one off "
            "with VLLM_PLUGINS=hf_dynyarn."
        )


def check_draft(config: SpeculativeConfig) -> None:
    """Refuses drafts that were never run, of a model that stretches or by one.

    Raises:
        ValueError: the drafts are of such a kind.
    """
    _check_each(
        ("speculative_config.method", config.method, METHODS),
        ("speculative_config.parallel_drafting", config.parallel_drafting, (False,)),
        ("speculative_config.attention_backend", config.attention_backend, (None,)),
        ("speculative_config.kv_cache_dtype", config.kv_cache_dtype, (None,)),
    )


def _check_each(*options: tuple[str, Any, tuple[Any, ...]]) -> None:
    """Refuses the first option, `(name, what was passed, what may be)`, that may not be so."""
    for name, got, allowed in options:
        if got not in allowed:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, allowed))} with rope_type "
                f"{DYNAMIC_YARN!r}, got {got!r}. Leave it out."
            )
