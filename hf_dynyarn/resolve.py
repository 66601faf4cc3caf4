"""Which schedule a model has: what its config says, what its code makes of it, and its user asks.

The config alone does not decide how a model rotates: its code ignores some keys, and a config may
be edited after the model was made. So the frequencies that we make of it are compared with those
that the model's own rotary embedding holds.
"""

import math
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .models import (
    FAMILIES,
    family_of,
    head_dim,
    masked_windows,
    told_windows,
)
from .options import DynamicYaRNConfig
from .rope_types import DYNAMIC_YARN, WISHES, make_schedule
from .schedules import Schedule
from .versions import register_rope_type, rope_parameters, stock_rotation

# Between float32 computations of the same frequencies on different devices.
ROUNDING = 1e-5


def resolve_schedule(
    model_config: PretrainedConfig,
    config: DynamicYaRNConfig,
    layer_type: str = "full_attention",
    pairs: int | None = None,
) -> Schedule:
    """Fills the defaults of `config` in from the model's config.

    Args:
        model_config: the model's.
        config: the options.
        layer_type: of the layers that it is for; the same for all, but in few families.
        pairs: how many pairs of a head the model rotates. Default: as its config says.

    Raises:
        TypeError: the model's config asks for an option that there is not.
        ValueError: the model's rope type is not supported, or an option contradicts the model.
    """
    family = FAMILIES.get(model_config.model_type)
    by_layer_type = family is not None and family.by_layer_type
    rope = rope_parameters(model_config, layer_type if by_layer_type else None)
    if family is not None and family.finetuned and rope["rope_type"] == "yarn":
        rope.setdefault("finetuned", True)
    dim = head_dim(model_config)
    rotated = int(dim * (rope.get("partial_rotary_factor") or 1.0))
    if pairs not in (None, math.ceil(rotated / 2)):
        # The code of most families does not read the key from transformers 5 on.
        dim, rope["partial_rotary_factor"] = 2 * pairs, None
    return make_schedule(
        rope,
        dim,
        model_config.max_position_embeddings,
        config,
    )


def schedule_of(
    decoder: PreTrainedModel, config: DynamicYaRNConfig, layer_type: str = "full_attention"
) -> Schedule:
    """The schedule of a decoder: that of its config, once it is seen to be that of its code.

    Args:
        decoder: the decoder.
        config: the options.
        layer_type: see `resolve_schedule`.

    Raises:
        TypeError: see `resolve_schedule`.
        ValueError: see `resolve_schedule`; or the decoder rotates in another way than its config
            says.
    """
    by_layer_type = family_of(decoder).by_layer_type
    stock = stock_rotation(decoder, layer_type if by_layer_type else None)
    if stock is None:
        return resolve_schedule(decoder.config, config, layer_type)
    inv_freq, gain = stock
    pairs = inv_freq.shape[-1]
    schedule = resolve_schedule(decoder.config, config, layer_type, pairs)
    _check_part(decoder, pairs)
    rope_type = rope_parameters(decoder.config, layer_type if by_layer_type else None)["rope_type"]
    # Stock's yarn is at its factor throughout, which a fine-tuned model of ours is never below.
    as_stock = DynamicYaRNConfig(finetuned=True if rope_type == "yarn" else None)
    trained = resolve_schedule(decoder.config, as_stock, layer_type, pairs)
    who = f"the stock module of {layer_type} layers" if by_layer_type else "the stock module"
    _check_rotation(trained, inv_freq.detach().cpu(), gain, who)
    return schedule


def _check_part(decoder: PreTrainedModel, pairs: int) -> None:
    dim = head_dim(decoder.config)
    if 2 * pairs < dim and not family_of(decoder).partial:
        raise ValueError(
            f"the model must rotate all {dim} dimensions of a head, got {2 * pairs}, by a "
            f"partial_rotary_factor that attention of model_type {decoder.config.model_type!r} "
            "cannot follow. Leave the key out of its config, or the model unpatched."
        )


def _check_rotation(trained: Schedule, inv_freq: torch.Tensor, gain: float, who: str) -> None:
    """Compares what the config makes of a model with what its own module holds."""
    scale = torch.tensor(trained.min_scale, dtype=torch.float64, device="cpu")
    remedy = "Make the model anew from its config, or leave it unpatched."
    # A model that went through a narrower dtype took its frequencies along.
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    through = (dtype for dtype in dtypes if torch.equal(inv_freq.to(dtype).to(inv_freq), inv_freq))
    dtype = next(through, torch.float32)
    bounds = torch.finfo(dtype)
    expected = trained.inv_freq(scale).to(dtype).double()
    tolerance = max(bounds.eps, ROUNDING) * expected + bounds.tiny * bounds.eps
    differs = (expected - inv_freq.double()).abs() > tolerance
    if differs.any():
        pair = int(differs.nonzero()[0])
        raise ValueError(
            f"the frequencies of {who} must be those of the model's config, {expected[pair]:.6g} "
            f"radians per token in pair {pair}, got {inv_freq[pair]:.6g}. {remedy}"
        )
    wanted = float(trained.gain(scale))
    if abs(wanted - gain) > ROUNDING * wanted:
        raise ValueError(
            f"the gain of {who} must be that of the model's config, {wanted:.6g}, got {gain:.6g}. "
            f"{remedy}"
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
    masked = masked_windows(decoder).values()
    windows = [*told_windows(decoder), *(window for window in masked if window is not None)]
    larger = [window for window in windows if window is None or window > trained]
    if larger:
        raise ValueError(
            f"sliding_window must be at most original_max_position_embeddings, {trained}, for "
            f"{who} have frequencies of their own and are not stretched, got {larger[0]}. Leave "
            "it unpatched."
        )
    return schedule_of(decoder, DynamicYaRNConfig(), "sliding_attention")


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
    one = torch.ones((), dtype=torch.float64, device="cpu")
    device = device or torch.get_default_device()  # where transformers' own would be
    return schedule.inv_freq(one).to(device), 1.0


# So that such a model can be made at all. No other model notices.
register_rope_type(
    DYNAMIC_YARN,
    _rope_of_unpatched,
    required={"original_max_position_embeddings"},
    known=set(WISHES),
)
