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
share a config do not notice. A class-wide patch is found by models through the classes of their
families (`reach.py`), for as long as it holds.

The hooks are in `hooks.py`; which models can be patched, and where their parts are, in `models.py`;
what depends on the version of transformers, in `versions.py`.
"""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from .handover import WithoutMasks, drop_kept_cache
from .hooks import Patch, backend_of, check_causal, patch_of, refuse_continuous_batching
from .models import (
    FAMILIES,
    attention_layers,
    both_ways_over_images,
    check_own_code,
    check_places,
    check_rotary,
    drops_caches,
    find_decoder,
    generates,
    is_decoder,
    is_decoder_class,
    is_image_model_class,
    masked_windows,
)
from .options import DynamicYaRNConfig
from .reach import Reach
from .resolve import resolve_windowed, schedule_of
from .versions import check_keywords

logger = logging.get_logger(__name__)

_lock = threading.RLock()

_class_wide: "PatchHandle | None" = None
_reach: Reach | None = None
_token = ""  # of the class-wide patch in force, by which it knows the models that it leaves alone

_seen: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


def patch_llama(
    model: nn.Module | None = None, config: DynamicYaRNConfig | None = None, **options: Any
) -> "PatchHandle":
    """Makes a model attend with Dynamic YaRN, past its window as well as within it.

    A patched model takes a `DynamicYaRNCache`, and makes one itself where a stock model makes a
    `DynamicCache`. Up to the window its results are those of the stock model, or, where its config
    says `yarn` without `finetuned`, of that model before yarn. Patching a model again replaces its
    options.

    Args:
        model: a model of a supported family (`hf_dynyarn.models.FAMILIES`), or a wrapper around
            one. Without it the patch is class-wide: it holds for every such model of this process,
            loaded already or later, until `unpatch_llama()`, and leaves alone those that were
            patched by themselves. A model is then checked when it is first called: one that cannot
            be served stays as it is, with one warning that says why.
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
            handle = _patch_class_wide(config)
        else:
            decoder = find_decoder(model)
            _check_and_patch(decoder, config, model)
            handle = PatchHandle(config, decoder)
        _guard()
        return handle


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
            for decoder in _live_models():
                _restore(decoder)
            _lift_guard()
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
        _lift_guard()


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
            _lift_guard()

    def __enter__(self) -> "PatchHandle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def _check_and_patch(
    decoder: PreTrainedModel, config: DynamicYaRNConfig, model: nn.Module | None
) -> None:
    """Patches a decoder for the model that holds it, or class-wide for whichever does."""
    layers = attention_layers(decoder)
    check_keywords(decoder)
    check_causal(decoder.config, {})
    check_own_code(decoder, layers)
    check_places(decoder)
    check_rotary(decoder)
    schedule = schedule_of(decoder, config)
    windowed = resolve_windowed(decoder, schedule)
    masked_windows(decoder)
    backend_of(decoder)
    replaced = patch_of(decoder)
    if replaced is not None:
        logger.warning(
            f"patch_llama: the model was patched already; {config} replaces {replaced.config}."
        )
        replaced.remove(decoder)
    in_force = _is_class_wide if model is None else None
    Patch(decoder, config, schedule, windowed, model, in_force)
    _seen.add(decoder)


def _restore(decoder: PreTrainedModel) -> None:
    patch = patch_of(decoder)
    if patch is not None:
        patch.remove(decoder)


def _patch_class_wide(config: DynamicYaRNConfig) -> PatchHandle:
    global _class_wide, _reach, _token
    if _class_wide is not None:
        logger.warning(
            f"patch_llama: all models were patched; {config} replaces {_class_wide.config}."
        )
        _remove_class_wide()
    _token = uuid4().hex  # a pickled model takes it to other processes
    _class_wide = PatchHandle(config)
    _reach = Reach(_attributes_of)
    return _class_wide


def _is_class_wide() -> bool:
    return _class_wide is not None


def _attributes_of(cls: type) -> dict[str, Any]:
    """What a class-wide patch puts on a class."""
    if is_decoder_class(cls):
        return {"__call__": _call_after(_patch_or_leave, cls)}
    if is_image_model_class(cls):
        return {"__call__": _call_after(_leave_decoder_in, cls)}
    attributes: dict[str, Any] = {}
    if drops_caches(cls):
        stock = vars(cls)["prepare_inputs_for_generation"]
        attributes["prepare_inputs_for_generation"] = _prepare_instead_of(stock)
    if generates(cls):
        stock = getattr(cls, "create_masks_for_generate", create_masks_for_generate)
        attributes["create_masks_for_generate"] = _masks_instead_of(stock)
    return attributes


def _call_after(look: Callable[[Any], None], owner: Any) -> Callable[..., Any]:
    """The `__call__` of a class: looks at a model when it is first called.

    `torch.compile` can follow it but for that look, after which a model that is left alone is one
    graph as before.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _was_seen(self):
            look(self)
        return super(owner, self).__call__(*args, **kwargs)

    return call


def _prepare_instead_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A `prepare_inputs_for_generation` that leaves the cache of a patched model alone."""

    @wraps(stock)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        decoder = self.get_decoder()
        if not _was_seen(decoder):
            _patch_or_leave(decoder)  # before its first call, when the cache would be gone
        patched = patch_of(decoder) is not None
        chosen = GenerationMixin.prepare_inputs_for_generation if patched else stock
        return chosen(self, *args, **kwargs)

    return prepare


def _masks_instead_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A `create_masks_for_generate` that makes none for a patched model."""
    none = WithoutMasks(stock)

    @wraps(stock)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        decoder = self.get_decoder()
        if not _was_seen(decoder):
            _patch_or_leave(decoder)  # before its first call, when the masks would be there
        chosen = stock if patch_of(decoder) is None else none
        return chosen(*args, **kwargs)

    return create


def _was_seen(model: nn.Module) -> bool:
    """Whether a model is patched, or is left alone by the class-wide patch in force."""
    patched = getattr(model, "_dynamic_yarn", None) is not None
    return patched or getattr(model, "_dynamic_yarn_left", None) == _token


@torch.compiler.disable
def _patch_or_leave(decoder: PreTrainedModel) -> None:
    """Patches a decoder class-wide, or, where it cannot be served, leaves it and says why."""
    with _lock:
        if _class_wide is None or _was_seen(decoder):
            return
        if decoder.config.model_type not in FAMILIES:
            _leave(decoder)
            return
        try:
            _check_and_patch(find_decoder(decoder), _class_wide.config, None)
        except (TypeError, ValueError) as error:
            _leave(decoder, str(error))


@torch.compiler.disable
def _leave_decoder_in(model: PreTrainedModel) -> None:
    """Leaves the decoder of a model that reads images, whose masks are not causal, and says why."""
    with _lock:
        if _class_wide is None or _was_seen(model):
            return
        for decoder in filter(is_decoder, model.modules()):
            patch = patch_of(decoder)
            if patch is not None and patch.in_force is not None:  # it was called by itself
                patch.remove(decoder)
            if patch is None or patch.in_force is not None:
                _leave(decoder)
        _leave(model, both_ways_over_images(model, decoder.config.model_type))


def _leave(model: PreTrainedModel, why: str | None = None) -> None:
    model._dynamic_yarn_left = _token
    _seen.add(model)
    if why is not None:
        logger.warning(f"patch_llama: a {type(model).__name__} is left as it is: {why}")


def _batch_if_stock(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.init_continuous_batching` while any model is patched.

    Continuous batching itself runs in a thread, which keeps an error for those who ask.
    """
    for module in model.modules():
        unseen = _class_wide is not None and is_decoder(module) and not _was_seen(module)
        if patch_of(module) is not None or unseen:
            refuse_continuous_batching(model)
    return super(PreTrainedModel, model).init_continuous_batching(*args, **kwargs)


def _guard() -> None:
    # As with __call__: nothing is overwritten.
    PreTrainedModel.init_continuous_batching = _batch_if_stock


def _lift_guard() -> None:
    """Takes the guard off once nothing is patched."""
    guarded = "init_continuous_batching" in vars(PreTrainedModel)
    # Looking through all there is takes long, and is mostly not needed.
    needed = _class_wide is not None or any(map(patch_of, _seen))
    if guarded and not needed and not any(map(patch_of, _live_models())):
        del PreTrainedModel.init_continuous_batching


def _remove_class_wide() -> None:
    global _class_wide, _reach
    if _reach is None:
        return
    _reach.remove()
    _class_wide = _reach = None
    for model in _live_models():
        patch = patch_of(model)
        if patch is not None and patch.in_force is not None:
            patch.remove(model)
        vars(model).pop("_dynamic_yarn_left", None)
        drop_kept_cache(model)


def _live_models() -> list[PreTrainedModel]:
    """Every model of this process that we may have changed.

    The garbage collector knows the deep copies, our own set those that were frozen away from it.
    """
    found = {thing for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)}
    return list(found.union(_seen))
