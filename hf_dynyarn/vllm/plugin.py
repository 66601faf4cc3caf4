"""Where vLLM meets Dynamic YaRN: what is replaced, and where.

vLLM offers plug-ins a registry of operators and one of attention backends. It has no place where
they may judge a config, allow a longer text than the model names, or, on the CPU, choose the
backend: there, three of its public methods are wrapped, and one of its own where there is a draft.
No other module depends on how vLLM works inside. What they stand on is listed in `needs.py`.
"""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from inspect import getattr_static
from typing import Any

import torch
from vllm.config import ModelConfig, PassConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..rope_types import DYNAMIC_YARN
from .asked import (
    BACKEND,
    PATH,
    WISH,
    asks,
    interleaved,
    is_of_draft,
    is_ours,
    rope_of,
    schedule_of,
)
from .refusals import DRAFTS, check_draft, check_engine, check_model


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
    if not asks(config):
        return stock(config, max_model_len)
    check_model(config)
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
    model_config, speculative = config.model_config, config.speculative_config
    if speculative and (asks(model_config) or WISH in rope_of(speculative.draft_model_config)):
        check_draft(speculative)
    if asks(model_config):
        check_model(model_config)
        check_engine(config)
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
    if not (is_ours(config) or WISH in rope_of(speculative.draft_model_config)):
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
    if WISH in rope_of(draft):
        attention = replace(attention, backend=BACKEND)
    return replace(config, attention_config=attention, additional_config={**additional, WISH: True})


def _choose_backend(
    stock: Callable[..., str], selected_backend: AttentionBackendEnum, *args: Any, **kwargs: Any
) -> str:
    """`Platform.get_attn_backend_cls`: on the CPU, vLLM takes its own whatever was selected."""
    if selected_backend is BACKEND and BACKEND.get_path() == PATH:
        return PATH
    return stock(selected_backend, *args, **kwargs)


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
