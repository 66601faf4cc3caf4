"""`patch_llama`: gives a stock transformers model Dynamic YaRN, and takes it away again.

Nothing of transformers is copied or overwritten. On each patched decoder,

    1. its rotary embeddings are swapped for modules that rotate nothing, so that un-rotated keys
       reach the cache;
    2. a forward pre-hook makes the plan of each call and sends it down to the attention layers as a
       keyword, and a forward hook commits the call to the cache;
    3. the attention layers (not the model) read a copy of the config that names
       `dynamic_yarn_attention`.

The model's own config stays as it is. It is where the backend is read from at each call, so
`set_attn_implementation` works on a patched model, nothing of ours is ever saved, and models that
share a config do not notice.

The hooks are in `hooks.py`; which models can be patched, and where their parts are, in `models.py`;
what depends on the version of transformers, in `versions.py`.
"""

import gc
import threading
import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .hooks import Patch, backend_of, check_causal, patch_of
from .models import (
    attention_layers,
    check_own_code,
    check_places,
    check_rotary,
    family_of,
    find_decoder,
    is_decoder,
    masked_windows,
)
from .options import DynamicYaRNConfig
from .resolve import resolve_windowed, schedule_of
from .versions import check_keywords

logger = logging.get_logger(__name__)

_lock = threading.RLock()

_class_wide: "PatchHandle | None" = None

_patched: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


def patch_llama(
    model: nn.Module | None = None, config: DynamicYaRNConfig | None = None, **options: Any
) -> "PatchHandle":
    """Makes a model attend with Dynamic YaRN, past its window as well as within it.

    A patched model takes a `DynamicYaRNCache`, and makes one itself where a stock model makes a
    `DynamicCache`. Up to the window its results are those of the stock model. Patching a model
    again replaces its options.

    Args:
        model: a model of a supported family (`hf_dynyarn.models.FAMILIES`), or a wrapper around
            one. Without it the patch is class-wide: it holds for every such model of this process,
            loaded already or later, until `unpatch_llama()`, and leaves alone those that were
            patched by themselves. A model is then checked when it is first called.
        config: the options.
        **options: the same options as keywords, in place of `config`.

    Returns:
        A handle whose `remove()` gives back the stock model; also a context manager.

    Raises:
        TypeError: not a model of a supported family, or one whose rotary function was replaced; an
            unknown option, or one of the wrong type.
        ValueError: an option, a rope type or an attention implementation that is not supported.
    """
    config = DynamicYaRNConfig.from_options(config, options)
    with _lock:
        if model is None:
            return _patch_class_wide(config)
        decoder = find_decoder(model)
        _check_and_patch(decoder, config, model)
        return PatchHandle(config, decoder)


def unpatch_llama(model: nn.Module | None = None) -> None:
    """Gives back the stock model, or, without a model, every stock model of this process.

    Args:
        model: a model that was patched by itself; nothing happens if it is not patched.

    Raises:
        TypeError: not a model of a supported family.
        ValueError: the model is patched class-wide only: its next call would patch it again.
    """
    with _lock:
        if model is None:
            _remove_class_wide()
            for decoder in _live_decoders():
                _restore(decoder)
            return
        decoder = find_decoder(model)
        patch = patch_of(decoder)
        if patch is not None and patch.in_force is not None:
            raise ValueError(
                "model must have been patched by itself, got one under the class-wide patch. Call "
                "unpatch_llama() without a model, or the remove() of the handle that patch_llama() "
                "returned."
            )
        _restore(decoder)


class PatchHandle:
    """Undoes a `patch_llama`: by `remove()`, or at the end of a `with` block.

    A patch that has replaced this one goes with it. Removing twice does nothing more.

    Attributes:
        config: the options of the patch.
    """

    def __init__(self, config: DynamicYaRNConfig, decoder: PreTrainedModel | None = None) -> None:
        self.config = config
        self._removed = False
        # Weak, so that a handle somebody keeps does not keep the model's memory.
        self._decoder = None if decoder is None else weakref.ref(decoder)

    def remove(self) -> None:
        """Gives back the stock model; for a class-wide patch, all the models that it patched."""
        with _lock:
            if self._removed:
                return
            self._removed = True
            if self._decoder is None:
                _remove_class_wide()
            elif (decoder := self._decoder()) is not None:
                _restore(decoder)

    def __enter__(self) -> "PatchHandle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def _check_and_patch(
    decoder: PreTrainedModel, config: DynamicYaRNConfig, model: nn.Module | None
) -> None:
    """Patches a decoder for the model that holds it, or class-wide for whichever does."""
    if model is None and family_of(decoder).drops_cache:
        raise ValueError(
            f"a model of model_type {decoder.config.model_type!r} must be patched by itself, for "
            "its generate() would throw the cache away, got a class-wide patch. Call "
            "patch_llama(model)."
        )
    layers = attention_layers(decoder)
    check_keywords(decoder)
    check_causal(decoder.config, {})
    check_own_code(decoder, layers)
    check_places(decoder)
    check_rotary(decoder)
    schedule = schedule_of(decoder, config)
    windowed = resolve_windowed(decoder, schedule)
    masked_windows(decoder, layers)
    backend_of(decoder)
    replaced = patch_of(decoder)
    if replaced is not None:
        logger.warning(
            f"patch_llama: the model was patched already; {config} replaces {replaced.config}."
        )
        replaced.remove(decoder)
    in_force = _is_class_wide if model is None else None
    Patch(decoder, config, schedule, windowed, model, in_force)
    _patched.add(decoder)


def _restore(decoder: PreTrainedModel) -> None:
    patch = patch_of(decoder)
    if patch is not None:
        patch.remove(decoder)


def _patch_class_wide(config: DynamicYaRNConfig) -> PatchHandle:
    global _class_wide
    if _class_wide is not None:
        logger.warning(
            f"patch_llama: all models were patched; {config} replaces {_class_wide.config}."
        )
        _remove_class_wide()
    _class_wide = PatchHandle(config)
    # It has no __call__ of its own: nothing is overwritten, and deleting it restores all.
    PreTrainedModel.__call__ = _patch_and_call
    return _class_wide


def _is_class_wide() -> bool:
    return _class_wide is not None


def _patch_and_call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.__call__` under the class-wide patch: patches a decoder if it is not yet."""
    with _lock:
        if _class_wide is not None and patch_of(model) is None and is_decoder(model):
            _check_and_patch(model, _class_wide.config, None)
    return super(PreTrainedModel, model).__call__(*args, **kwargs)


def _remove_class_wide() -> None:
    global _class_wide
    if _class_wide is None:
        return
    _class_wide = None
    del PreTrainedModel.__call__
    for decoder in _live_decoders():
        patch = patch_of(decoder)
        if patch is not None and patch.in_force is not None:
            _restore(decoder)


def _live_decoders() -> list[PreTrainedModel]:
    """Every patched decoder of this process.

    The garbage collector knows the deep copies, our own set those that were frozen away from it.
    """
    found = {thing for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)}
    return [decoder for decoder in found.union(_patched) if patch_of(decoder) is not None]
