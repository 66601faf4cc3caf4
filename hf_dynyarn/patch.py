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

Which models can be patched, and where their parts are, is in `models.py`; what depends on the
version of transformers, in `versions.py`.
"""

import copy
import gc
import threading
import weakref
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from .attention import ATTENTION_NAME, AttentionPlan, dynamic_yarn_attention, make_plan
from .cache import DynamicYaRNCache
from .models import (
    FAMILIES,
    attention_layers,
    cache_droppers,
    check_rotary,
    family_of,
    find_decoder,
    head_dim,
    is_decoder,
    key_heads,
    unrotated_layers,
    windows,
)
from .rope import DYNAMIC_YARN, DynamicYaRNConfig, Schedule, make_schedule
from .versions import (
    CACHE_KEYWORDS,
    CHECKPOINTING_NEEDS_GRADIENTS,
    arguments_of,
    check_keywords,
    rope_parameters,
    rotary_embeddings,
)

logger = logging.get_logger(__name__)

# How the plan travels from the decoder to `dynamic_yarn_attention`.
PLAN_KEYWORD = "dynamic_yarn_plan"

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
        patch = _patch_of(decoder)
        if patch is not None and patch.class_wide:
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


class UnrotatedEmbedding(nn.Module):
    """Stands in for a rotary embedding: cos = 1, sin = 0, so that the model rotates nothing.

    The stock module lives on inside, to follow the model to other devices and dtypes until it is
    put back.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(
        self, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, `(1, 1, 1)`: integers, which leave any states their dtype."""
        one = torch.ones((1, 1, 1), dtype=torch.int8, device=x.device)
        return one, one - one


class _Patch:
    """The hooks of one patched decoder, and what it takes to undo them.

    A deep copy of the model gets a deep copy of this.

    `torch.compile` leaves both hooks alone, as it does the cache's `update` and
    `dynamic_yarn_attention`, and compiles what lies between: these depend on lengths and scales,
    for each of which it would compile them anew.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        config: DynamicYaRNConfig,
        schedule: Schedule,
        windowed: Schedule | None,
        model: nn.Module | None,
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.windowed = windowed
        self.class_wide = model is None
        self.arguments = arguments_of(decoder)
        self.unrotated = unrotated_layers(decoder)
        self.stock_configs = [(layer, layer.config) for layer in attention_layers(decoder)]
        self.cache_droppers = [] if model is None else cache_droppers(model)
        self.hooks = (
            decoder.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            decoder.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True),
        )

    @torch.compiler.disable
    def before_forward(
        self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks and plans a call, then opens its cache. A refused call has changed nothing."""
        if self.class_wide and _class_wide is None:  # a copy from a time when it was
            _restore(decoder)
            return args, kwargs
        kwargs = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        names = ("input_ids", "inputs_embeds")
        given = [kwargs[name] for name in names if kwargs.get(name) is not None]
        if len(given) != 1:
            return (), kwargs  # the decoder's own error says it best
        _check_causal(decoder.config, kwargs)
        check_rotary(decoder)
        batch = given[0].shape[0]
        cache = self._cache(decoder, kwargs, batch)
        plan = make_plan(
            schedule=self.schedule,
            cache=cache if isinstance(cache, DynamicYaRNCache) else None,
            inputs=given[0],
            attention_mask=kwargs.get("attention_mask"),
            position_ids=kwargs.get("position_ids"),
            backend=_backend(decoder),
            output_attentions=_option(decoder, kwargs, "output_attentions"),
            unrotated=self.unrotated,
            interleaved=family_of(decoder).interleaved,
            windowed=self.windowed,
        )
        if cache is not None:
            plan.cache = DynamicYaRNCache.adopt(cache)
            plan.cache.begin(plan)
        name = next(name for name in CACHE_KEYWORDS if name in self.arguments)
        kwargs[name] = plan.cache
        kwargs["position_ids"] = plan.new.clamp(min=0)
        # A 4-D mask goes through the decoder as it is: with this one no stock mask is built. The
        # plan has the real one.
        kwargs["attention_mask"] = given[0].new_empty((batch, 1, 0, 0), dtype=torch.bool)
        kwargs[PLAN_KEYWORD] = plan
        return (), kwargs

    @torch.compiler.disable
    def after_forward(
        self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Commits the call to its cache, or, after an error (no output), closes the cache."""
        plan = kwargs.get(PLAN_KEYWORD)
        if not isinstance(plan, AttentionPlan) or plan.cache is None:
            return
        if output is None:
            plan.cache.close()
        else:
            plan.cache.commit(plan.new, plan.schedule, plan.packed)

    def _cache(self, decoder: PreTrainedModel, kwargs: dict[str, Any], batch: int) -> Any:
        """Takes the cache out of `kwargs` and checks it; makes one where a stock model would."""
        given = [kwargs.pop(name) for name in CACHE_KEYWORDS if name in kwargs]
        cache: Any = next((cache for cache in given if cache is not None), None)
        if isinstance(cache, DynamicYaRNCache):
            layers = decoder.config.num_hidden_layers
            cache.check_fits(self.schedule, batch, layers, *key_heads(decoder.config))
        elif cache is not None:
            DynamicYaRNCache.check_adoptable(cache)
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
        if cache is None and _option(decoder, kwargs, "use_cache"):
            return DynamicYaRNCache()
        return cache


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


def _resolve_windowed(decoder: PreTrainedModel, schedule: Schedule) -> Schedule | None:
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


def _backend(decoder: PreTrainedModel) -> str:
    """The attention implementation that the model's config names, if it is one that can serve."""
    backend: str = decoder.config._attn_implementation or "eager"
    allowed = family_of(decoder).backends
    if allowed and backend not in allowed:
        raise ValueError(
            f"the attention implementation of a patched {decoder.config.model_type} must be one of "
            f"{allowed}, got {backend!r}. Call model.set_attn_implementation({allowed[0]!r}) first."
        )
    if backend in ("eager", "sdpa") or ("flash" in backend and "paged" not in backend):
        return backend
    raise ValueError(
        "the attention implementation of a patched model must be eager, sdpa or a flash attention, "
        f'got {backend!r}. Call model.set_attn_implementation("sdpa") first.'
    )


def _check_causal(model_config: PretrainedConfig, kwargs: dict[str, Any]) -> None:
    if not getattr(model_config, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ValueError(
            "a patched model must attend causally, got is_causal=False. Leave it unpatched, or "
            "pass a 4-D attention_mask."
        )
    if getattr(model_config, "use_bidirectional_attention", None):
        raise ValueError(
            "a patched model must attend causally, got use_bidirectional_attention="
            f"{model_config.use_bidirectional_attention!r} in its config. Leave it unpatched."
        )
    lengths = [
        name for name in kwargs if name.startswith("cu_seq_lens") and kwargs[name] is not None
    ]
    if lengths:
        raise ValueError(
            f"packed documents must be told apart by position_ids, got {lengths}. Pass "
            "position_ids that restart at each document instead."
        )


def _option(decoder: PreTrainedModel, kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return bool(getattr(decoder.config, name) if value is None else value)


def _patch_of(decoder: PreTrainedModel) -> _Patch | None:
    patch: _Patch | None = decoder.__dict__.get("_dynamic_yarn")
    return patch


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
    check_keywords(decoder)
    _check_causal(decoder.config, {})
    check_rotary(decoder)
    schedule = resolve_schedule(decoder.config, config)
    windowed = _resolve_windowed(decoder, schedule)
    _backend(decoder)
    replaced = _patch_of(decoder)
    if replaced is not None:
        logger.warning(
            f"patch_llama: the model was patched already; {config} replaces {replaced.config}."
        )
        _restore(decoder)
    AttentionInterface.register(ATTENTION_NAME, dynamic_yarn_attention)
    patch = _Patch(decoder, config, schedule, windowed, model)
    decoder._dynamic_yarn = patch
    for holder, name in rotary_embeddings(decoder):
        setattr(holder, name, UnrotatedEmbedding(getattr(holder, name)))
    attention_config = copy.copy(decoder.config)
    attention_config._attn_implementation = ATTENTION_NAME
    for layer in attention_layers(decoder):
        layer.config = attention_config
    for wrapper in patch.cache_droppers:
        prepare = GenerationMixin.prepare_inputs_for_generation
        wrapper.prepare_inputs_for_generation = MethodType(prepare, wrapper)
    _patched.add(decoder)


def _restore(decoder: PreTrainedModel) -> None:
    patch = _patch_of(decoder)
    if patch is None:
        return
    for hook in patch.hooks:
        hook.remove()
    for holder, name in rotary_embeddings(decoder):
        setattr(holder, name, getattr(holder, name).stock)
    for layer, config in patch.stock_configs:
        layer.config = config
    for wrapper in patch.cache_droppers:
        del wrapper.prepare_inputs_for_generation
    del decoder._dynamic_yarn


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


def _patch_and_call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.__call__` under the class-wide patch: patches a decoder if it is not yet."""
    with _lock:
        if _class_wide is not None and _patch_of(model) is None and is_decoder(model):
            _check_and_patch(model, _class_wide.config, None)
    return super(PreTrainedModel, model).__call__(*args, **kwargs)


def _remove_class_wide() -> None:
    global _class_wide
    if _class_wide is None:
        return
    _class_wide = None
    del PreTrainedModel.__call__
    for decoder in _live_decoders():
        patch = _patch_of(decoder)
        if patch is not None and patch.class_wide:
            _restore(decoder)


def _live_decoders() -> list[PreTrainedModel]:
    """Every patched decoder of this process.

    The garbage collector knows the deep copies, our own set those that were frozen away from it.
    """
    found = {thing for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)}
    return [decoder for decoder in found.union(_patched) if _patch_of(decoder) is not None]
