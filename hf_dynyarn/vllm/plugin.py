"""Where vLLM meets Dynamic YaRN: who asks for it, what is refused, what is replaced.

vLLM offers plug-ins a registry of operators and one of attention backends. It has no place where
they may judge a config, allow a longer text than the model names, or, on the CPU, choose the
backend: there, three of its public methods are wrapped. No other module depends on how vLLM works
inside. What they stand on is listed in `needs.py`: a version that lacks some of it is refused, and
one that was never run warns.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from inspect import getattr_static
from typing import Any

import torch
import vllm
from vllm.config import ModelConfig, PassConfig, VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..models import FAMILIES
from ..models import head_dim as head_dim_of
from ..options import DynamicYaRNConfig
from ..rope_types import DYNAMIC_YARN, make_schedule
from ..schedules import Schedule
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

# vLLM's place for the attention backend of a plug-in. A member of our own making would not reach
# the workers, which learn of it before they load plug-ins.
BACKEND = AttentionBackendEnum.CUSTOM
PATH = f"{__package__}.backend.DynamicYaRNBackend"

# The key under which the rope parameters of a model that was taken over keep what it asks for, as
# JSON. They reach all processes, and vLLM's keys for what it shares and compiles. A config of vLLM
# that has it in `additional_config` is the one that a draft is built with.
WISH = "hf_dynyarn"

# How drafts may come about: those that have a model of their own, and all that were run.
DRAFTS = ("draft_model", "eagle", "eagle3")
METHODS = (None, "ngram", *DRAFTS)


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
    """Whether the model that the config builds was taken over."""
    return WISH in _rope(_model_of(vllm_config))


def is_of_draft(vllm_config: VllmConfig) -> bool:
    """Whether the config is the one that a draft is built with, not the engine's."""
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and WISH in additional


def of_layers(vllm_config: VllmConfig, layer_names: list[str]) -> VllmConfig:
    """The engine's config, with a draft in the place of its model if all layers are the draft's."""
    layers = vllm_config.compilation_config.static_forward_context
    if not all(getattr(layers[name].impl, "of_draft", False) for name in layer_names):
        return vllm_config
    of_draft = copy.copy(vllm_config)
    of_draft.model_config = vllm_config.speculative_config.draft_model_config
    of_draft.additional_config = {WISH: True}
    return of_draft


def schedule_of(vllm_config: VllmConfig) -> Schedule:
    """The schedule of a model that was taken over."""
    text_config = _model_of(vllm_config).hf_text_config
    return _schedule(text_config, json.loads(text_config.rope_parameters[WISH]))


def is_own_dtype(vllm_config: VllmConfig, kv_cache_dtype: str) -> bool:
    """Whether keys are cached in the dtype of the model."""
    return kv_cache_dtype in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch."))


def interleaved(vllm_config: VllmConfig) -> bool:
    """Whether the pairs of the model's heads lie side by side."""
    text_config = _model_of(vllm_config).hf_text_config
    # A draft head wraps the config of its family.
    return FAMILIES[getattr(text_config, "model", text_config).model_type].interleaved


def fuses_rotation(name: str) -> bool:
    """Whether a field of vLLM's `PassConfig` turns on a pass that looks for a rotation."""
    return "rope" in name and name.startswith(("fuse_", "enable_"))


class UnrotatedEmbedding(RotaryEmbedding):
    """vLLM's rotary embedding; in a model that asks for Dynamic YaRN it rotates nothing.

    It stands in for `RotaryEmbedding` in all models, but not for the classes derived from it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        # In a process where vLLM only unpickles its config.
        _prepare_for_draft(vllm_config)
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
    if not _asks(config):
        return stock(config, max_model_len)
    _check_model(config)
    text_config = config.hf_text_config
    of_draft = config.runner_type == "draft"
    if of_draft and max_model_len is None:
        max_model_len = config.spec_target_max_model_len
    if max_model_len is not None and max_model_len > 0:
        # vLLM's own name for a length beyond `max_position_embeddings`.
        text_config.model_max_length = max_model_len
    length = stock(config, max_model_len)
    if of_draft:
        # At once: vLLM then wraps the config of a head, and overwrites its window.
        window = text_config.max_position_embeddings
        text_config.rope_parameters.setdefault("original_max_position_embeddings", window)
        _take_over_model(config)
    return length


def _take_over(stock: Callable[..., None], config: VllmConfig, *args: Any, **kwargs: Any) -> None:
    """`VllmConfig.__post_init__`: checks the engine, and makes it ours where the model asks."""
    model_config = config.model_config
    if _asks(model_config):
        _check_model(model_config)
        _check_engine(config)
        config.attention_config.backend = BACKEND
        _take_over_model(model_config)
        _turn_off_fusions(config)
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
    if model_config:
        _prepare_for_draft(config)


def _take_over_model(config: ModelConfig) -> None:
    """Lets vLLM make an embedding of its default type, where ours stands: it knows no such type."""
    rope = config.hf_text_config.rope_parameters
    wish = {"rope_type": "default", WISH: json.dumps(rope)}
    config.hf_text_config.rope_parameters = {**rope, **wish}


def _turn_off_fusions(config: VllmConfig) -> None:
    """Turns off the passes that look for a rotation in the graph, as there is none."""
    passes = config.compilation_config.pass_config
    for field in fields(PassConfig):
        if fuses_rotation(field.name):
            setattr(passes, field.name, False)


def _prepare_for_draft(config: VllmConfig) -> None:
    """Wraps how vLLM makes the config of a draft, once and only where there is one.

    A head is built under the config of its target, in whose place only the backend is left out.
    """
    speculative = config.speculative_config
    if not (speculative and speculative.method in DRAFTS):
        return
    if not (is_ours(config) or WISH in _rope(speculative.draft_model_config)):
        return
    if config.use_v2_model_runner:
        raise ValueError(
            f"a draft of, or for, a model of rope_type {DYNAMIC_YARN!r} must be run by vLLM's "
            "first model runner, got its second. Set VLLM_USE_V2_MODEL_RUNNER=0, or leave the "
            "draft out."
        )
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    method = SpecDecodeBaseProposer._create_draft_vllm_config
    if not hasattr(method, "__wrapped__"):
        _wrap(SpecDecodeBaseProposer, "_create_draft_vllm_config", _config_of_draft)


def _config_of_draft(stock: Callable[..., VllmConfig], proposer: Any) -> VllmConfig:
    """`SpecDecodeBaseProposer._create_draft_vllm_config`: marks it, and chooses its backend."""
    config = stock(proposer)
    if is_of_draft(config):
        return config
    additional = config.additional_config if isinstance(config.additional_config, dict) else {}
    draft = config.speculative_config.draft_model_config
    attention = config.attention_config
    if WISH in _rope(draft):
        attention = replace(attention, backend=BACKEND)
    return replace(config, attention_config=attention, additional_config={**additional, WISH: True})


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
    _schedule(text_config, rope)


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
        ("speculative_config.method", speculative and speculative.method, METHODS),
        (
            "speculative_config.parallel_drafting",
            speculative and speculative.parallel_drafting,
            (None, False),
        ),
        (
            "speculative_config.attention_backend",
            speculative and speculative.attention_backend,
            (None,),
        ),
        ("speculative_config.kv_cache_dtype", speculative and speculative.kv_cache_dtype, (None,)),
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


def _model_of(vllm_config: VllmConfig) -> Any:
    """The model that the config builds."""
    if is_of_draft(vllm_config):
        return vllm_config.speculative_config.draft_model_config
    return vllm_config.model_config


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
    """Puts `wrapper(stock, ...)` in the place of a method, if there is one: see `needs.py`."""
    if not hasattr(owner, name):
        return
    method = getattr_static(owner, name)
    stock = getattr(owner, name)

    @wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    setattr(owner, name, staticmethod(wrapped) if isinstance(method, classmethod) else wrapped)
