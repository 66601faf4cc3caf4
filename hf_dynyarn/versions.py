"""What depends on the installed transformers: no other module asks for its version."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, __version__, modeling_rope_utils
from transformers.cache_utils import DynamicLayer
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OLDEST, NEWEST = (4, 57), (5, 24)

TRANSFORMERS = tuple(int(part) for part in __version__.split(".")[:2])

# transformers 5.24 renamed `past_key_values`; older spellings reach the decoder all the same.
CACHE_KEYWORDS = ("cache", "past_key_values")

# Likewise, what `create_masks_for_generate` is told the size of a call by.
INPUTS_OF_MASKS = ("inputs_embeds", "input_embeds")

# Under gradient checkpointing the layers drop the cache; older ones also where there will be no
# backward pass.
CHECKPOINTING_NEEDS_GRADIENTS = TRANSFORMERS >= (5, 24)


def warn_if_unknown() -> None:
    """Warns where the installed transformers is none that this package was tested with."""
    if not OLDEST <= TRANSFORMERS <= NEWEST:
        warnings.warn(
            f"hf_dynyarn was tested with transformers {_dotted(OLDEST)} to {_dotted(NEWEST)}, got "
            f"{__version__}: results may be wrong.",
            stacklevel=3,
        )


def arguments_of(decoder: PreTrainedModel) -> list[str]:
    """Names of the positional arguments of a decoder's forward."""
    return list(inspect.signature(type(decoder).forward).parameters)[1:]


def check_keywords(decoder: PreTrainedModel) -> None:
    """Raises a TypeError where a decoder takes no keyword it does not know, to hand it on."""
    parameters = inspect.signature(type(decoder).forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise TypeError(
            f"{type(decoder).__name__} must hand keywords on to its layers, which it does not in "
            f"transformers {__version__}. Upgrade transformers."
        )


def rotary_embeddings(decoder: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """The places of a decoder's rotary embeddings: the module that holds each, and its name there.

    On transformers 4, families with other frequencies in layers with a window have two.
    """
    names = ("rotary_emb", "rotary_emb_local")
    several = getattr(decoder, "rotary_embs", {})
    places = [(decoder, name) for name in names if hasattr(decoder, name)]
    return places + [(several, name) for name in several]


def register_rope_type(
    name: str,
    compute: Callable[..., tuple[torch.Tensor, float]],
    required: set[str],
    known: set[str],
) -> None:
    """Makes models of a rope type of ours possible, and their configs checked as those of others.

    Args:
        name: of the type.
        compute: gives frequencies and gain, with the signature of transformers' own.
        required: rope parameters without which a config raises a KeyError.
        known: the other ones; more are warned of.
    """
    ROPE_INIT_FUNCTIONS[name] = compute
    rules = ({"rope_type", *required}, {"rope_theta", "partial_rotary_factor", *known})

    def validate_parameters(self: Any, rope: dict[str, Any], ignore_keys: Any = None) -> None:
        self._check_received_keys(name, set(rope), *map(set, rules), ignore_keys=ignore_keys)

    def validate_config(model_config: Any, ignore_keys: Any = None) -> None:
        check: Any = modeling_rope_utils._check_received_keys
        check(name, set(model_config.rope_scaling), *map(set, rules), ignore_keys=ignore_keys)

    mixin: Any = getattr(modeling_rope_utils, "RotaryEmbeddingConfigMixin", None)
    if mixin is not None:
        setattr(mixin, f"_validate_{name}_rope_parameters", validate_parameters)
    else:
        modeling_rope_utils.ROPE_VALIDATION_FUNCTIONS[name] = validate_config


def stock_rotation(
    decoder: PreTrainedModel, layer_type: str | None
) -> tuple[torch.Tensor, float] | None:
    """Frequencies `(D/2,)` and gain that a decoder's own rotary embedding starts with.

    Where it has no data (on the meta device), they are those that it would be made with.

    Args:
        decoder: the decoder, patched or not.
        layer_type: of the layers that are asked about, in families that tell them apart.

    Returns:
        Radians per token, and a factor on cos and sin; None where no layer is of the type.
    """
    places = {name: getattr(holder, name) for holder, name in rotary_embeddings(decoder)}
    local = "rotary_emb_local" if layer_type == "sliding_attention" else "rotary_emb"
    module = places.get(layer_type or "") or places.get(local) or places["rotary_emb"]
    module = getattr(module, "stock", module)
    prefix = "" if hasattr(module, "inv_freq") else f"{layer_type}_"
    if not hasattr(module, f"{prefix}inv_freq"):
        return None
    rope_type = (
        module.rope_type if isinstance(module.rope_type, str) else module.rope_type[layer_type]
    )
    # Past the window these put others in their place, and take them back.
    name = "original_inv_freq" if rope_type in ("dynamic", "longrope") else "inv_freq"
    inv_freq, gain = getattr(module, prefix + name), getattr(module, f"{prefix}attention_scaling")
    if inv_freq.is_meta:
        inv_freq, gain = _rotation_anew(module, rope_type, layer_type if prefix else None)
    return inv_freq, float(gain)


def _rotation_anew(
    module: Any, rope_type: str, layer_type: str | None
) -> tuple[torch.Tensor, float]:
    """What a rotary embedding computes when it is made, on the CPU."""
    compute = getattr(module, "rope_init_fn", None)  # on transformers 4
    if compute is None and rope_type == "default":
        compute = module.compute_default_rope_parameters
    compute = compute or ROPE_INIT_FUNCTIONS[rope_type]
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    with torch.device("cpu"):
        made: tuple[torch.Tensor, float] = compute(module.config, device="cpu", **kwargs)
    return made


def rope_parameters(
    model_config: PretrainedConfig, layer_type: str | None = None
) -> dict[str, Any]:
    """The rope parameters that the model itself goes by, in the spelling of transformers 5.

    Args:
        model_config: the model's.
        layer_type: of the layers that are asked about, in families that tell them apart.

    Raises:
        ValueError: they differ from layer to layer where they must not, or the reverse; or the
            installed transformers does not read them.
    """
    if TRANSFORMERS >= (5, 0):
        rope = model_config.rope_parameters
        if layer_type is not None:
            rope = _of_layer_type(model_config, layer_type)
        rope = {"rope_type": "default", **rope}
        if "rope_theta" not in rope:
            raise ValueError(
                "the model must have the same rope_parameters in each layer, got "
                f"{sorted(model_config.rope_parameters)}. Leave it unpatched."
            )
        return rope
    theta, scaling = model_config.rope_theta, getattr(model_config, "rope_scaling", None) or {}
    newer = getattr(model_config, "rope_parameters", None)
    if newer and newer.get("rope_theta") != theta:
        raise ValueError(
            "the model's config must have rope_theta and rope_scaling, got rope_parameters="
            f"{newer}, which this transformers does not read. Upgrade to transformers 5, with "
            "which the config was written."
        )
    if layer_type == "sliding_attention":
        # Not in the config but in the code of each family: unscaled, and Gemma 3 has another base.
        theta, scaling = getattr(model_config, "rope_local_base_freq", theta), {}
    rope = {"rope_type": scaling.get("type", "default"), "rope_theta": theta, **scaling}
    rope.setdefault("partial_rotary_factor", getattr(model_config, "partial_rotary_factor", None))
    trained = getattr(model_config, "original_max_position_embeddings", None)
    if rope["rope_type"] == "longrope" and trained:
        factor = model_config.max_position_embeddings / trained
        rope |= {"original_max_position_embeddings": trained, "factor": factor}
    return rope


def _of_layer_type(model_config: PretrainedConfig, layer_type: str) -> dict[str, Any]:
    """The rope parameters of a type of layers on transformers 5."""
    rope = model_config.rope_parameters
    if layer_type not in rope:
        # OLMo 3 on transformers 5.0 and some time after.
        raise ValueError(
            f"rope_parameters of a model of model_type {model_config.model_type!r} must be by "
            f"layer type, got {sorted(rope)}: transformers {__version__} stretches its layers "
            "with a window too, which were not trained so. Upgrade transformers."
        )
    own = dict(rope[layer_type])
    if own.get("rope_type") == "yarn":
        # Where stock looks for it: beside the layer types, not within them.
        own["truncate"] = rope.get("truncate", True)
    return own


def cropped_length(length: int, *args: Any, **kwargs: Any) -> int:
    """What `Cache.crop` leaves of `length` tokens, as the installed transformers has it."""
    stock = DynamicLayer()
    stock.keys = stock.values = torch.empty(1, device="cpu").expand(1, 1, length, 1)
    stock.is_initialized = True
    stock.crop(*args, **kwargs)
    return int(stock.keys.shape[2])


def is_paged(cache: Any) -> bool:
    """Whether a cache is that of continuous batching, which is of no class of caches."""
    return type(cache).__name__ == "PagedAttentionCache"


def flash_attention(backend: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Calls transformers' flash attention by the name of its implementation."""
    # The name of this parameter on transformers 4 and 5; the other goes unread.
    names = {"implementation": backend, "attn_implementation": backend}
    output: torch.Tensor = _flash_attention_forward(*args, **kwargs, **names)
    return output


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
