"""Which schedule a model has: what its config says, and what its user asks for."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .models import FAMILIES, family_of, head_dim, windows
from .options import DynamicYaRNConfig
from .rope_types import DYNAMIC_YARN, make_schedule
from .schedules import Schedule
from .versions import rope_parameters


def resolve_schedule(
    model_config: PretrainedConfig,
    config: DynamicYaRNConfig,
    layer_type: str = "full_attention",
) -> Schedule:
    """Fills the defaults of `config` in from the model's config.

    Args:
        model_config: the model's.
        config: the options.
        layer_type: of the layers that it is for; the same for all, but in few families.

    Raises:
        TypeError: the model's config asks for an option that there is not.
        ValueError: the model's rope type is not supported, or an option contradicts the model.
    """
    family = FAMILIES.get(model_config.model_type)
    by_layer_type = family is not None and family.by_layer_type
    rope = rope_parameters(model_config, layer_type if by_layer_type else None)
    if family is not None and family.finetuned and rope["rope_type"] == "yarn":
        rope.setdefault("finetuned", True)
    return make_schedule(
        rope,
        head_dim(model_config),
        model_config.max_position_embeddings,
        config,
    )


def resolve_windowed(decoder: PreTrainedModel, schedule: Schedule) -> Schedule | None:
    """The schedule of layers with a window, where these have rope parameters of their own.

    It is that of their training, whatever the options: no pair in them is ever farther apart.

    Raises:
        ValueError: `schedule`, that of the other layers, would stretch them.
    """
    if not family_of(decoder).by_layer_type:
        return None
    who = f"a model of model_type {decoder.config.model_type!r}, whose layers with a window"
    if schedule.per_forward:
        raise ValueError(
            f'schedule must be "position" for {who} have frequencies of their own and are not '
            'stretched, got "forward". Leave it out.'
        )
    trained = schedule.original_max_position_embeddings
    larger = [window for window in windows(decoder) if window is None or window > trained]
    if larger:
        raise ValueError(
            f"sliding_window must be at most original_max_position_embeddings, {trained}, for "
            f"{who} have frequencies of their own and are not stretched, got {larger[0]}. Leave "
            "it unpatched."
        )
    return resolve_schedule(decoder.config, DynamicYaRNConfig(), "sliding_attention")


def _rope_of_unpatched(
    model_config: PretrainedConfig,
    device: Any = None,
    seq_len: Any = None,
    layer_type: str | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, float]:
    """Frequencies and gain of a model whose config says `dynamic_yarn`, until it is patched.

    transformers asks for them when it makes the model, and, with `seq_len`, when a text is longer
    than `max_position_embeddings`.

    Raises:
        ValueError: with `seq_len`.
    """
    if seq_len is not None:
        raise ValueError(
            f"a model of rope type {DYNAMIC_YARN!r} must be patched to read past its window, got "
            f"{int(seq_len)} tokens in one that is not. Call patch_llama(model) first."
        )
    schedule = resolve_schedule(model_config, DynamicYaRNConfig(), layer_type or "full_attention")
    return schedule.inv_freq(torch.ones((), dtype=torch.float64)).to(device), 1.0


# So that such a model can be made at all. No other model notices.
ROPE_INIT_FUNCTIONS[DYNAMIC_YARN] = _rope_of_unpatched
