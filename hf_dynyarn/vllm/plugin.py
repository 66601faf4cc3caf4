"""Where vLLM meets Dynamic YaRN: who asks for it, what is refused, what is replaced.

vLLM offers plug-ins a registry of operators and one of attention backends. It has no place where
they may judge a config, allow a longer text than the model names, or, on the CPU, choose the
backend: there, three of its public methods are wrapped. No other module depends on how vLLM works
inside, and `TESTED` are the versions that these were seen to work with.
"""

import json
from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from typing import Any

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..models import FAMILIES
from ..models import head_dim as head_dim_of
from ..options import DynamicYaRNConfig
from ..rope_types import DYNAMIC_YARN, make_schedule
from ..schedules import Schedule

TESTED = ("0.32.0",)

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

# vLLM's place for the attention backend of a plug-in. A member of our own making would not reach
# the workers, which learn of it before they load plug-ins.
BACKEND = AttentionBackendEnum.CUSTOM
PATH = f"{__package__}.backend.DynamicYaRNBackend"

# The key under which the rope parameters of a model that was taken over keep what it asks for, as
# JSON. They reach all processes, and vLLM's keys for what it shares and compiles.
WISH = "hf_dynyarn"


def register() -> None:
    """The entry point, called by vLLM once or more in each process."""
    if op_registry_oot.get("RotaryEmbedding") is UnrotatedEmbedding:
        return
    if not BACKEND.is_overridden():
        register_backend(BACKEND, PATH)
    _wrap(ModelConfig, "get_and_verify_max_len", _allow_longer)
    _wrap(VllmConfig, "__post_init__", _take_over)
    if current_platform.is_cpu():
        _wrap(type(current_platform), "get_attn_backend_cls", _choose_backend)
    name = RotaryEmbedding.name
    RotaryEmbedding.register_oot(UnrotatedEmbedding, name="RotaryEmbedding")
    # By which a user turns it on and off, and which has just been replaced.
    UnrotatedEmbedding.name = name


def is_ours(vllm_config: VllmConfig) -> bool:
    """Whether the engine's model was taken over."""
    return WISH in _rope(vllm_config.model_config)


def schedule_of(vllm_config: VllmConfig) -> Schedule:
    """The schedule of a model that was taken over."""
    text_config = vllm_config.model_config.hf_text_config
    return _schedule(text_config, json.loads(text_config.rope_parameters[WISH]))


def is_own_dtype(vllm_config: VllmConfig, kv_cache_dtype: str) -> bool:
    """Whether keys are cached in the dtype of the model."""
    return kv_cache_dtype in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch."))


def interleaved(vllm_config: VllmConfig) -> bool:
    """Whether the pairs of the model's heads lie side by side."""
    return FAMILIES[vllm_config.model_config.hf_text_config.model_type].interleaved


class UnrotatedEmbedding(RotaryEmbedding):
    """vLLM's rotary embedding; in a model that asks for Dynamic YaRN it rotates nothing.

    It stands in for `RotaryEmbedding` in all models, but not for the classes derived from it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self.rotates = not is_ours(vllm_config)
        if self.rotates:
            return
        schedule = schedule_of(vllm_config)
        expected = {
            "rotary_dim": schedule.rotary_dim,
            "base": schedule.rope_theta,
            "is_neox_style": not interleaved(vllm_config),
        }
        got = {name: getattr(self, name) for name in expected}
        if got != expected:
            raise ValueError(
                f"the rotary embedding of a model of rope_type {DYNAMIC_YARN!r} must have "
                f"{expected}, got {got}. Serve the model with another rope_type."
            )
        if vllm_config.attention_config.backend is not BACKEND:
            raise ValueError(
                f"a model of rope_type {DYNAMIC_YARN!r} must be in one VllmConfig alone, got a "
                "second one. Load the model's config again."
            )

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Takes and gives what `RotaryEmbedding` does."""
        if not self.rotates:
            return query, key
        rotated: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
            positions, query, key, **kwargs
        )
        return rotated


def _allow_longer(stock: Callable[..., int], config: ModelConfig, max_model_len: int) -> int:
    """`ModelConfig.get_and_verify_max_len`: a model that stretches has no longest text."""
    if _asks(config):
        _check_model(config)
        text_config = config.hf_text_config
        if max_model_len is not None and max_model_len > 0:
            # vLLM's own name for a length beyond `max_position_embeddings`.
            text_config.model_max_length = max_model_len
    return stock(config, max_model_len)


def _take_over(stock: Callable[..., None], config: VllmConfig, *args: Any, **kwargs: Any) -> None:
    """`VllmConfig.__post_init__`: checks the engine, and makes it ours where the model asks."""
    model_config = config.model_config
    if _asks(model_config):
        _check_model(model_config)
        _check_engine(config)
        config.attention_config.backend = BACKEND
        # vLLM knows no such type. Our embedding stands where it makes one of the default type.
        rope = model_config.hf_text_config.rope_parameters
        model_config.hf_text_config.rope_parameters = {
            **rope,
            "rope_type": "default",
            WISH: json.dumps(rope),
        }
    elif (
        config.attention_config.backend is BACKEND
        and BACKEND.get_path() == PATH
        and not (model_config and is_ours(config))
    ):
        raise ValueError(
            f"attention_backend must be another than {BACKEND.name} for a model that does not ask "
            f"for rope_type {DYNAMIC_YARN!r}. Leave it out."
        )
    stock(config, *args, **kwargs)


def _choose_backend(
    stock: Callable[..., str], selected_backend: AttentionBackendEnum, *args: Any, **kwargs: Any
) -> str:
    """`Platform.get_attn_backend_cls`: on the CPU, vLLM takes its own whatever was selected."""
    if selected_backend is BACKEND and BACKEND.get_path() == PATH:
        return PATH
    return stock(selected_backend, *args, **kwargs)


def _check_model(config: ModelConfig) -> None:
    """Refuses what is no supported model, with the reason.

    Raises:
        ValueError: vLLM's version, the model or its rope parameters are not supported.
        TypeError: the rope parameters have unknown keys, or values of the wrong type.
    """
    if vllm.__version__ not in TESTED:
        raise ValueError(
            f"vLLM must be of version {' or '.join(TESTED)} for rope_type {DYNAMIC_YARN!r}, got "
            f"{vllm.__version__}. Install one of these, or leave the rope_type out."
        )
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
        f"run for {config.runner_type}": config.runner_type != "generate",
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
    _schedule(text_config, rope)


def _check_engine(config: VllmConfig) -> None:
    """Refuses engine options under which the results would be wrong, or were never seen.

    Raises:
        ValueError: one of them is set.
    """
    speculative, parallel = config.speculative_config, config.parallel_config
    kv_cache_dtype = config.cache_config.cache_dtype
    if not is_own_dtype(config, kv_cache_dtype):
        raise ValueError(
            f"kv_cache_dtype must be 'auto' or the model's with rope_type {DYNAMIC_YARN!r}, got "
            f"{kv_cache_dtype!r}. Leave it out."
        )
    for name, got, allowed in (
        ("attention_config.backend_per_kind", config.attention_config.backend_per_kind, (None, {})),
        ("kv_offloading_size", config.cache_config.kv_offloading_size, (None,)),
        ("attention_backend", config.attention_config.backend, (None,)),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, (1,)),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, (1,)),
        # Draft models would use the backend too, and rotate twice.
        ("speculative_config.method", speculative and speculative.method, (None, "ngram")),
        ("kv_transfer_config", config.kv_transfer_config, (None,)),
    ):
        if got not in allowed:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, allowed))} with rope_type "
                f"{DYNAMIC_YARN!r}, got {got!r}. Leave it out."
            )
    if BACKEND.get_path() != PATH:
        raise ValueError(
            f"the attention backend {BACKEND.name} must be {PATH} with rope_type "
            f"{DYNAMIC_YARN!r}, got {BACKEND.get_path()} of another plug-in. Turn that one off "
            "with VLLM_PLUGINS=hf_dynyarn."
        )


def _schedule(text_config: Any, rope: dict[str, Any]) -> Schedule:
    window, dim = text_config.max_position_embeddings, head_dim_of(text_config)
    return make_schedule(rope, dim, window, DynamicYaRNConfig())


def _asks(config: ModelConfig | None) -> bool:
    """Whether a model that was not taken over yet asks for Dynamic YaRN, in whatever spelling."""
    rope = _rope(config)
    of_layers = [one for one in rope.values() if isinstance(one, dict)]
    types = [one.get(name) for one in (rope, *of_layers) for name in ("rope_type", "type")]
    return DYNAMIC_YARN in types


def _rope(config: ModelConfig | None) -> dict[str, Any]:
    """The rope parameters of a model, empty where it has none."""
    rope = config and getattr(config.hf_text_config, "rope_parameters", None)
    return rope if isinstance(rope, dict) else {}


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts `wrapper(stock, ...)` in the place of a method."""
    method = getattr_static(owner, name)
    stock = getattr(owner, name)

    @wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    setattr(owner, name, staticmethod(wrapped) if isinstance(method, classmethod) else wrapped)
