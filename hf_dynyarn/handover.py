"""Which cache a call gets: ours, a stock one that becomes ours, a new one, none, or a refusal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .cache import DynamicYaRNCache
from .models import key_heads
from .schedules import Schedule
from .static import StaticYaRNCache
from .versions import CACHE_KEYWORDS, CHECKPOINTING_NEEDS_GRADIENTS, INPUTS_OF_MASKS


def given_cache(kwargs: dict[str, Any]) -> Any:
    """The cache that a call was given, under whichever of its names; None for none."""
    return next((kwargs[name] for name in CACHE_KEYWORDS if kwargs.get(name) is not None), None)


def cache_of_call(
    decoder: PreTrainedModel, kwargs: dict[str, Any], schedule: Schedule, batch: int
) -> Any:
    """Checks the cache that a call was given; makes one where a stock model would."""
    cache = given_cache(kwargs)
    if isinstance(cache, DynamicYaRNCache):
        check_fits(cache, schedule, batch, len(decoder.layers), *key_heads(decoder.config))
    elif cache is not None:
        check_adoptable(cache)
    if schedule.per_forward and isinstance(cache, StaticCache | StaticYaRNCache):
        raise ValueError(
            'schedule must be "position" over a cache of fixed size, whose steps do not know how '
            'long a call is, got "forward". Leave it out, or use a DynamicYaRNCache() that grows.'
        )
    # Under checkpointing the layers drop the cache, which the backward pass would fill again.
    checkpointing = decoder.training and decoder.gradient_checkpointing
    if checkpointing and (torch.is_grad_enabled() or not CHECKPOINTING_NEEDS_GRADIENTS):
        useless = cache is not None and not torch.is_grad_enabled()
        if useless or (cache is not None and cache.get_seq_length() > 0):
            raise ValueError(
                "a model that checkpoints gradients in training mode must be called without a "
                f"cache, got a {type(cache).__name__} with {cache.get_seq_length()} tokens. "
                "Call model.eval(), or pass use_cache=False."
            )
        return None
    if cache is None and option(decoder, kwargs, "use_cache"):
        return DynamicYaRNCache()
    return cache


def check_adoptable(cache: Any) -> None:
    """Raises a TypeError unless `adopt` can take the cache: an empty stock one, not offloaded."""
    remedy = (
        "Pass a DynamicYaRNCache, with max_cache_len for one of fixed size, or no cache: a patched "
        "model makes its own."
    )
    stock_layers = {
        DynamicCache: (DynamicLayer, DynamicSlidingWindowLayer),
        StaticCache: (StaticLayer, StaticSlidingWindowLayer),
    }.get(type(cache), ())
    plain = bool(stock_layers) and all(type(layer) in stock_layers for layer in cache.layers)
    if not plain or cache.offloading:
        kind = f"an offloaded {type(cache).__name__}" if plain else f"a {type(cache).__name__}"
        raise TypeError(
            f"the cache of a patched model must be a DynamicYaRNCache, got {kind}. {remedy}"
        )
    if cache.get_seq_length() > 0:
        raise TypeError(
            f"the cache of a patched model must hold un-rotated keys, got a {type(cache).__name__} "
            f"with {int(cache.get_seq_length())} tokens whose keys are rotated already. {remedy}"
        )
    if type(cache) is StaticCache and all(layer.is_sliding for layer in cache.layers):
        raise TypeError(
            "the cache of a patched model keeps all keys of layers with a window too, so that its "
            "size must be given, got a StaticCache whose layers all have one and do not tell it. "
            "Pass a DynamicYaRNCache(max_cache_len=...)."
        )


def stand_in(cache: Any) -> DynamicYaRNCache | None:
    """Ours for a cache: itself, or what `adopt` may turn a stock one into; None for none."""
    if cache is None or isinstance(cache, DynamicYaRNCache):
        return cache
    if type(cache) is StaticCache:
        return DynamicYaRNCache(max_cache_len=max(layer.max_cache_len for layer in cache.layers))
    return DynamicYaRNCache()


def adopt(cache: Cache, ours: DynamicYaRNCache) -> DynamicYaRNCache:
    """Turns a stock cache into ours, in place; leaves one of ours alone.

    `generate` makes its own cache before the model sees it, and callers keep the one they pass:
    were it only replaced, a loop that passes it again would find it empty and silently start over.
    """
    if cache is not ours:
        cache.__class__ = type(ours)
        cache.__dict__ = ours.__dict__
    adopted: DynamicYaRNCache = cache
    return adopted


class WithoutMasks:
    """A `create_masks_for_generate` that leaves it to a patched model to read the padding.

    For a cache that can be compiled, `generate` makes 4-D masks, which do not say what is padding.

    Args:
        stock: what the model has of it.
    """

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = given_cache(kwargs)
        if not isinstance(cache, StaticCache | StaticYaRNCache):
            return self.stock(*args, **kwargs)
        mask = kwargs.get("attention_mask")
        inputs = next(kwargs[name] for name in INPUTS_OF_MASKS if name in kwargs)
        if mask is None or mask.dim() != 2 or not cache.get_seq_length():
            return mask
        # Of the new tokens alone: of one shape for all steps, as the rest of a step's arguments.
        return mask[:, -inputs.shape[1] :].clone(memory_format=torch.contiguous_format)


def drop_kept_cache(model: nn.Module) -> None:
    """Takes from a model a cache of ours that its `generate` would use again."""
    if isinstance(vars(model).get("_cache"), DynamicYaRNCache):
        del model._cache


def check_fits(
    cache: DynamicYaRNCache,
    schedule: Schedule,
    batch: int,
    layers: int,
    heads: int | None,
    head_dim: int,
) -> None:
    """Checks that a model can continue a cache.

    Args:
        cache: the cache.
        schedule: of the model.
        batch: of the call.
        layers: of the model.
        heads: of the keys in each layer; None where it is not known.
        head_dim: of each head.

    Raises:
        TypeError: a layer of the cache is none of ours.
        ValueError: it cannot.
    """
    positions = cache.held_positions
    if positions is None:
        return
    cache.check_layers()
    if cache.schedule != schedule:
        raise ValueError(
            f"a cache must be continued under the options that filled it, {cache.schedule}, got "
            f"{schedule}. Start a new DynamicYaRNCache, or patch the model with those options."
        )
    if positions.shape[0] != batch:
        raise ValueError(
            f"the call must have the batch size of the cache, {positions.shape[0]}, got "
            f"{batch}. Use cache.batch_repeat_interleave() or cache.batch_select_indices(), or "
            "start a new DynamicYaRNCache."
        )
    check_shapes(cache, layers, heads, head_dim)


def check_shapes(cache: DynamicYaRNCache, layers: int, heads: int | None, head_dim: int) -> None:
    """Checks that a filled cache has the layers and heads of a model, see `check_fits`.

    Raises:
        ValueError: it has not.
    """
    filled = [layer.keys.shape for layer in cache.layers if layer.is_initialized]
    if len(filled) != layers:
        raise ValueError(
            f"a cache must be continued by the model that filled it, with {len(filled)} layers, "
            f"got {layers}. Start a new DynamicYaRNCache."
        )
    for held in filled:
        if held[1] != (heads or held[1]) or held[3] != head_dim:
            raise ValueError(
                f"a cache must be continued by the model that filled it, with {held[1]} heads "
                f"of {held[3]} dimensions in its keys, got {heads or held[1]} of {head_dim}. "
                "Start a new DynamicYaRNCache."
            )


def option(decoder: PreTrainedModel, kwargs: dict[str, Any], name: str) -> bool:
    """What a call asks for, else what the model's config does."""
    value = kwargs.get(name)
    return bool(getattr(decoder.config, name) if value is None else value)
