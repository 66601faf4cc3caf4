"""Which models of vLLM ask for Dynamic YaRN, and what they ask for.

A config that asks is taken over once, by `plugin.py`; from then on the wish lies in it under a key
of ours. What builds a draft carries a mark, as vLLM builds a draft head under the config of its
target.
"""

import copy
import json
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..models import FAMILIES
from ..models import head_dim as head_dim_of
from ..options import DynamicYaRNConfig
from ..rope_types import DYNAMIC_YARN, make_schedule
from ..schedules import Schedule

# vLLM's place for the attention backend of a plug-in. A member of our own making would not reach
# the workers, which learn of it before they load plug-ins.
BACKEND = AttentionBackendEnum.CUSTOM
PATH = f"{__package__}.backend.DynamicYaRNBackend"

# The key under which the rope parameters of a model that was taken over keep what it asks for, as
# JSON. They reach all processes, and vLLM's keys for what it shares and compiles. A config of vLLM
# that has it in `additional_config` is the one that a draft is built with.
WISH = "hf_dynyarn"


def asks(config: ModelConfig | None) -> bool:
    """Whether a model that was not taken over yet asks for Dynamic YaRN, in whatever spelling."""
    rope = rope_of(config)
    of_layers = [one for one in rope.values() if isinstance(one, dict)]
    types = [one.get(name) for one in (rope, *of_layers) for name in ("rope_type", "type")]
    return DYNAMIC_YARN in types


def is_ours(vllm_config: VllmConfig) -> bool:
    """Whether the model that the config builds was taken over."""
    return WISH in rope_of(model_of(vllm_config))


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
    text_config = model_of(vllm_config).hf_text_config
    return schedule_from(text_config, json.loads(text_config.rope_parameters[WISH]))


def is_own_dtype(vllm_config: VllmConfig, kv_cache_dtype: str) -> bool:
    """Whether keys are cached in the dtype of the model."""
    return kv_cache_dtype in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch."))


def interleaved(vllm_config: VllmConfig) -> bool:
    """Whether the pairs of the model's heads lie side by side."""
    text_config = model_of(vllm_config).hf_text_config
    # A draft head wraps the config of its family.
    return FAMILIES[getattr(text_config, "model", text_config).model_type].interleaved


def model_of(vllm_config: VllmConfig) -> Any:
    """The model that the config builds."""
    if is_of_draft(vllm_config):
        return vllm_config.speculative_config.draft_model_config
    return vllm_config.model_config


def rope_of(config: ModelConfig | None) -> dict[str, Any]:
    """The rope parameters of a model, empty where it has none."""
    rope = config and getattr(config.hf_text_config, "rope_parameters", None)
    return rope if isinstance(rope, dict) else {}


def schedule_from(text_config: Any, rope: dict[str, Any]) -> Schedule:
    window, dim = text_config.max_position_embeddings, head_dim_of(text_config)
    return make_schedule(rope, dim, window, DynamicYaRNConfig())
