"""The models that can be patched, and where in them the decoder and its attention layers are.

A model is supported by this table alone: a model of another family may run with the same hooks and
be silently wrong (norms behind the rotation, rotations of its own, positions that enter elsewhere).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel


def _always(layer: Any) -> bool:
    return True


def _no_window(model_config: Any, index: int) -> int | None:
    return None


def _one_window(model_config: Any, index: int) -> int | None:
    window: int | None = model_config.sliding_window
    return window


def _window_by_type(model_config: Any, index: int) -> int | None:
    slides = model_config.layer_types[index] == "sliding_attention"
    return model_config.sliding_window or 0 if slides else None


@dataclass(frozen=True)
class Family:
    """One of transformers' model families.

    Attributes:
        prefix: of its classes: `<prefix>Attention` is its attention.
        decoder: end of the decoder's class, `<prefix><decoder>`. Where it is "TextModel",
            `<prefix>Model` is the decoder beside an encoder of images, over which it attends both
            ways: that is refused.
        rotates: whether an attention layer rotates its queries and keys.
        interleaved: whether the pairs of a head lie side by side.
        drops_cache: whether its `generate()` throws a cache away on the way past the window.
        backends: the attention implementations that can serve it; empty for all that we know.
        finetuned: whether it was trained with the `factor` of its yarn parameters.
        by_layer_type: whether layers with a window have rope parameters of their own.
        partial: whether its attention can rotate a part of a head.
        window: how many keys a query sees by the mask that its decoder makes, from the config and a
            layer's index; None for all.
    """

    prefix: str
    decoder: str = "Model"
    rotates: Callable[[Any], bool] = _always
    interleaved: bool = False
    drops_cache: bool = False
    backends: tuple[str, ...] = ()
    finetuned: bool = False
    by_layer_type: bool = False
    partial: bool = False
    window: Callable[[Any, int], int | None] = _no_window


# By `model_type`.
FAMILIES: dict[str, Family] = {
    "arcee": Family("Arcee"),
    "cohere": Family("Cohere", interleaved=True),
    "cohere2": Family(
        "Cohere2",
        rotates=lambda layer: layer.sliding_window is not None,
        interleaved=True,
        window=_window_by_type,
    ),
    "exaone4": Family(
        "Exaone4",
        rotates=lambda layer: layer.sliding_window is None or layer.is_sliding,
        window=_window_by_type,
    ),
    "gemma": Family("Gemma"),
    "gemma3_text": Family(
        "Gemma3", decoder="TextModel", by_layer_type=True, window=_window_by_type
    ),
    "glm": Family("Glm", interleaved=True, partial=True),
    "glm4": Family("Glm4", interleaved=True, partial=True),
    # Its attention sinks are a column of the logits that only its own eager attention has.
    "gpt_oss": Family("GptOss", backends=("eager",), finetuned=True, window=_window_by_type),
    "granite": Family("Granite"),
    "llama": Family("Llama"),
    "ministral": Family("Ministral", window=_window_by_type),
    "mistral": Family("Mistral", window=_one_window),
    "mixtral": Family("Mixtral", window=_one_window),
    "minimax_m2": Family("MiniMaxM2", partial=True),
    "olmo": Family("Olmo"),
    "olmo2": Family("Olmo2"),
    "olmo3": Family("Olmo3", finetuned=True, by_layer_type=True, window=_window_by_type),
    "phi": Family("Phi", partial=True),
    "phi3": Family("Phi3", drops_cache=True, partial=True, window=_one_window),
    "qwen2": Family("Qwen2", window=_window_by_type),
    "qwen2_moe": Family("Qwen2Moe", window=_window_by_type),
    "qwen3": Family("Qwen3", window=_window_by_type),
    "qwen3_moe": Family("Qwen3Moe", window=_one_window),
    "seed_oss": Family("SeedOss"),
    "smollm3": Family(
        "SmolLM3", rotates=lambda layer: bool(layer.use_rope), window=_window_by_type
    ),
    "starcoder2": Family("Starcoder2", window=_one_window),
}


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The one decoder of a supported family in a model.

    Raises:
        TypeError: there is none, or it is part of a model that attends both ways.
        ValueError: there are several.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    decoders = [module for module in model.modules() if is_decoder(module)]
    if len(decoders) > 1:
        raise ValueError(
            f"model must hold one decoder, got {len(decoders)}. Patch them one by one."
        )
    if not decoders:
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        raise TypeError(
            f"model must be of one of the supported families {tuple(FAMILIES)}, with one attention "
            f"layer of its own in each decoder layer, got {type(model).__name__} of model_type "
            f"{model_type!r}."
        )
    decoder: PreTrainedModel = decoders[0]
    _check_no_images(model, decoder.config.model_type)
    return decoder


def is_decoder(module: Any) -> bool:
    """Whether a module is a decoder of a supported family, with the attention it came with."""
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    if model_type not in FAMILIES or not _is_a(module, model_type, FAMILIES[model_type].decoder):
        return False
    return len(attention_layers(module)) == len(module.layers)


def is_decoder_class(cls: type) -> bool:
    """Whether a class is the decoder of a supported family, not one derived from it."""
    families = FAMILIES.items()
    return _name(cls) in {(_module(key), one.prefix + one.decoder) for key, one in families}


def is_image_model_class(cls: type) -> bool:
    """Whether a class holds such a decoder, and lets it attend both ways over images."""
    wrapped = ((key, one) for key, one in FAMILIES.items() if one.decoder != "Model")
    return _name(cls) in {(_module(key), f"{one.prefix}Model") for key, one in wrapped}


def drops_caches(cls: type) -> bool:
    """Whether a class has a part of `generate()` that throws a cache away."""
    code = {_module(key) for key, family in FAMILIES.items() if family.drops_cache}
    return cls.__module__ in code and "prepare_inputs_for_generation" in vars(cls)


def generates(cls: type) -> bool:
    """Whether a class of a supported family generates text."""
    code = set(map(_module, FAMILIES))
    return cls.__module__ in code and issubclass(cls, GenerationMixin)


def attention_layers(decoder: PreTrainedModel) -> list[Any]:
    """The attention layers of a decoder, first to last."""
    model_type = decoder.config.model_type
    return [module for module in decoder.modules() if _is_a(module, model_type, "Attention")]


def unrotated_layers(decoder: PreTrainedModel) -> frozenset[int]:
    """Indices of the attention layers that rotate nothing."""
    rotates = family_of(decoder).rotates
    layers = attention_layers(decoder)
    return frozenset(layer.layer_idx for layer in layers if not rotates(layer))


def masked_windows(decoder: PreTrainedModel) -> dict[int, int | None]:
    """How many keys a query sees in each layer by the mask that the stock model makes.

    It goes by the place of a layer, which is not its index where others were taken out.

    Args:
        decoder: the decoder.

    Returns:
        By index of the layer, None for all keys. What the attention itself is told may be another
        number: flash attention, which takes no such mask, goes by that.

    Raises:
        ValueError: a layer with a window sees no key.
    """
    window = family_of(decoder).window
    there = enumerate(layer.self_attn for layer in decoder.layers)
    found = {one.layer_idx: window(decoder.config, place) for place, one in there}
    empty = [index for index, size in found.items() if size is not None and size < 1]
    if empty:
        raise ValueError(
            f"sliding_window of the model must be at least 1 in a layer with a window, got "
            f"{decoder.config.sliding_window!r} for layer {empty[0]}. Set it in the config before "
            "the model is made, or leave the model unpatched."
        )
    return found


def told_windows(decoder: PreTrainedModel) -> list[int | None]:
    """How many keys a query sees in each layer with a window, as its attention is told."""
    types = decoder.config.layer_types
    layers = attention_layers(decoder)
    return [one.sliding_window for one in layers if types[one.layer_idx] == "sliding_attention"]


def head_dim(model_config: PretrainedConfig) -> int:
    """Dimensions of an attention head."""
    named: int | None = getattr(model_config, "head_dim", None)
    return named or model_config.hidden_size // model_config.num_attention_heads


def key_heads(model_config: PretrainedConfig) -> tuple[int | None, int]:
    """Number of heads in the keys that a layer caches, and their dimensions.

    The number is None among several processes, which may have split the heads between them.
    """
    split = torch.distributed.is_available() and torch.distributed.is_initialized()
    return None if split else model_config.num_key_value_heads, head_dim(model_config)


def family_of(decoder: PreTrainedModel) -> Family:
    """The family of a decoder."""
    return FAMILIES[decoder.config.model_type]


def check_rotary(decoder: PreTrainedModel) -> None:
    """Checks that a decoder's layers call the rotary function of their family.

    That one rotates nothing by cos = 1 and sin = 0 of shape `(1, 1, 1)`. Another, such as Liger's,
    may read them as tables of full length, and work in place.

    Raises:
        TypeError: the function was replaced.
    """
    module = sys.modules[_module(decoder.config.model_type)]
    rotary = module.apply_rotary_pos_emb
    if _is_wrapped_for_kernels(rotary):
        if "forward" not in vars(rotary):
            return
        rotary = rotary.forward
    if rotary.__module__ != module.__name__:
        raise TypeError(
            f"apply_rotary_pos_emb of {module.__name__} must be its own function, for a patched "
            f"model rotates elsewhere, got that of {rotary.__module__}. Leave it as it is (Liger: "
            "pass rope=False; kernels: load without use_kernels), or leave the model unpatched."
        )


def check_own_code(decoder: PreTrainedModel, layers: list[Any]) -> None:
    """Checks that a decoder and its attention layers run the code of their family, causally.

    Another decoder may make other masks and positions than those of the call, another attention may
    rotate or attend by itself; what a patched model does instead would then be something else. A
    decoder layer, which hands on what it gets, may have code of its own; `dynamic_yarn_attention`
    sees whether it makes masks.

    Args:
        decoder: the decoder.
        layers: its attention layers.

    Raises:
        TypeError: a `forward` is not that of the family, or a layer is not where it belongs.
        ValueError: a layer attends both ways.
    """
    family, code = family_of(decoder), _module(decoder.config.model_type)
    names = (family.prefix + family.decoder, *[family.prefix + "Attention"] * len(layers))
    for module, name in zip((decoder, *layers), names, strict=True):
        # A wrapper on a module itself, such as accelerate's, calls the forward of its class.
        forward = getattr(module.forward, "__func__", type(module).forward)
        if (forward.__module__, forward.__qualname__) != (code, f"{name}.forward"):
            raise TypeError(
                f"forward() of {name} must be its own, from which a patched model takes masks, "
                f"positions and rotation, got {forward.__module__}.{forward.__qualname__}. Leave "
                "the model unpatched."
            )
    both_ways = [layer.layer_idx for layer in layers if not getattr(layer, "is_causal", True)]
    if both_ways:
        raise ValueError(
            f"a patched model must attend causally, got is_causal=False in layers {both_ways}. "
            "Leave it unpatched."
        )


def check_places(decoder: PreTrainedModel) -> None:
    """Checks that no foreign module stands between a decoder layer and its attention.

    Wrappers of torch only call what they hold; an adaption prompt of peft also rotates by itself.

    Raises:
        TypeError: one does.
    """
    model_type = decoder.config.model_type
    for holder in decoder.modules():
        held = any(_is_a(module, model_type, "Attention") for module in holder.children())
        foreign = type(holder).__module__.split(".")[0] != "torch"
        if held and foreign and not _is_a(holder, model_type, "DecoderLayer"):
            raise TypeError(
                "an attention layer of a patched model must be in its decoder layer, got one in a "
                f"{type(holder).__name__} of {type(holder).__module__}. Take it out, or leave the "
                "model unpatched."
            )


def _is_wrapped_for_kernels(rotary: Any) -> bool:
    """Whether a function is in the module that the package `kernels`, where installed, makes of it.

    A model loaded with `use_kernels=True` replaces the `forward` of that module.
    """
    return isinstance(rotary, nn.Module) and type(rotary).__module__.startswith("kernels.")


def cache_droppers(model: nn.Module) -> list[Any]:
    """The modules of a model whose `generate()` throws a cache away on the way past the window."""
    code = {_module(model_type) for model_type, family in FAMILIES.items() if family.drops_cache}
    prepares = (
        (m, getattr(type(m), "prepare_inputs_for_generation", None)) for m in model.modules()
    )
    return [module for module, prepare in prepares if getattr(prepare, "__module__", None) in code]


def _check_no_images(model: nn.Module, model_type: str) -> None:
    if FAMILIES[model_type].decoder == "Model":
        return
    wrappers = [module for module in model.modules() if _is_a(module, model_type, "Model")]
    if wrappers:
        raise TypeError(both_ways_over_images(wrappers[0], model_type))


def both_ways_over_images(wrapper: nn.Module, model_type: str) -> str:
    """Why a decoder in a model that reads images is not served."""
    return (
        f"a patched model must attend causally, got one around a {type(wrapper).__name__}, which "
        f"attends both ways over images. Load its text model alone (model_type {model_type!r}), or "
        "leave it unpatched."
    )


def _name(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__name__


def _module(model_type: str) -> str:
    name = model_type.removesuffix("_text")  # which lies in the file of the whole
    return f"transformers.models.{name}.modeling_{name}"


def _is_a(module: nn.Module, model_type: str, suffix: str) -> bool:
    """Whether a module is of a class of the family, or of one derived from it.

    By name, for importing the classes would import the code of all families.
    """
    wanted = (_module(model_type), FAMILIES[model_type].prefix + suffix)
    return any(_name(base) == wanted for base in type(module).__mro__)
