"""`patch_llama`: gives a stock transformers model Dynamic YaRN, and takes it away again.

Nothing of transformers is copied or overwritten. On each patched decoder,

    1. `rotary_emb` is swapped for a module that rotates nothing, so that un-rotated keys reach the
       cache;
    2. a forward pre-hook makes the plan of each call and sends it down to the attention layers as a
       keyword, and a forward hook commits the call to the cache;
    3. the attention layers (not the model) read a copy of the config that names
       `dynamic_yarn_attention`.

The model's own config stays as it is. It is where the backend is read from at each call, so
`set_attn_implementation` works on a patched model, nothing of ours is ever saved, and models that
share a config do not notice.

This is the only module that knows models and versions of transformers.
"""

import copy
import gc
import inspect
import threading
import weakref
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, __version__
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel
from transformers.utils import logging

from .attention import ATTENTION_NAME, AttentionPlan, dynamic_yarn_attention, make_plan
from .cache import DynamicYaRNCache
from .rope import DynamicYaRNConfig, YaRNSchedule

logger = logging.get_logger(__name__)

SUPPORTED_MODEL_TYPES = ("llama",)
SUPPORTED_ROPE_TYPES = ("default", "yarn")

# How the plan travels from the decoder to `dynamic_yarn_attention`.
PLAN_KEYWORD = "dynamic_yarn_plan"

TRANSFORMERS = tuple(int(part) for part in __version__.split(".")[:2])

# transformers 5.24 renamed `past_key_values`; the decoder's signature tells which name it has.
CACHE_KEYWORDS = ("cache", "past_key_values")
ARGUMENTS = list(inspect.signature(LlamaModel.forward).parameters)[1:]
CACHE_KEYWORD = next(name for name in CACHE_KEYWORDS if name in ARGUMENTS)

_lock = threading.RLock()
_class_wide: "PatchHandle | None" = None
_patched: "weakref.WeakSet[LlamaModel]" = weakref.WeakSet()


def patch_llama(
    model: nn.Module | None = None, config: DynamicYaRNConfig | None = None, **options: Any
) -> "PatchHandle":
    """Makes a Llama model attend with Dynamic YaRN, past its window as well as within it.

    A patched model takes a `DynamicYaRNCache`, and makes one itself where a stock model makes a
    `DynamicCache`. Up to the window its results are those of the stock model. Patching a model
    again replaces its options.

    Args:
        model: a Llama model, or a wrapper around one. Without it the patch is class-wide: it holds
            for every Llama model of this process, loaded already or later, until `unpatch_llama()`,
            and leaves alone those that were patched by themselves. A model is then checked when it
            is first called.
        config: the options.
        **options: the same options as keywords, in place of `config`.

    Returns:
        A handle whose `remove()` gives back the stock model; also a context manager.

    Raises:
        TypeError: not a model of a supported family, an unknown option, or one of the wrong type.
        ValueError: an option, a rope type or an attention implementation that is not supported.
    """
    config = DynamicYaRNConfig.from_options(config, options)
    with _lock:
        if model is None:
            return _patch_class_wide(config)
        decoder = _find_decoder(model)
        _check_and_patch(decoder, config, class_wide=False)
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
        decoder = _find_decoder(model)
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

    def __init__(self, config: DynamicYaRNConfig, decoder: LlamaModel | None = None) -> None:
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
    """

    def __init__(
        self,
        decoder: LlamaModel,
        config: DynamicYaRNConfig,
        schedule: YaRNSchedule,
        class_wide: bool,
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.class_wide = class_wide
        self.stock_configs = [(layer, layer.config) for layer in _attention_layers(decoder)]
        self.hooks = (
            decoder.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            decoder.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True),
        )

    def before_forward(
        self, decoder: LlamaModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks and plans a call, then opens its cache. A refused call has changed nothing."""
        if self.class_wide and _class_wide is None:  # a copy from a time when it was
            _restore(decoder)
            return args, kwargs
        kwargs = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        names = ("input_ids", "inputs_embeds")
        given = [kwargs[name] for name in names if kwargs.get(name) is not None]
        if len(given) != 1:
            return (), kwargs  # the decoder's own error says it best
        _check_causal(decoder.config, kwargs)
        batch = given[0].shape[0]
        cache = self._cache(decoder, kwargs, batch)
        plan = make_plan(
            schedule=self.schedule,
            cache=cache if isinstance(cache, DynamicYaRNCache) else None,
            inputs=given[0],
            attention_mask=kwargs.get("attention_mask"),
            position_ids=kwargs.get("position_ids"),
            backend=_backend(decoder.config),
            output_attentions=_option(decoder, kwargs, "output_attentions"),
        )
        if cache is not None:
            plan.cache = DynamicYaRNCache.adopt(cache)
            plan.cache.begin(plan)
        kwargs[CACHE_KEYWORD] = plan.cache
        kwargs["position_ids"] = plan.new.clamp(min=0)
        # A 4-D mask goes through the decoder as it is: with this one no stock mask is built. The
        # plan has the real one.
        kwargs["attention_mask"] = given[0].new_empty((batch, 1, 0, 0), dtype=torch.bool)
        kwargs[PLAN_KEYWORD] = plan
        return (), kwargs

    def after_forward(
        self, decoder: LlamaModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Commits the call to its cache, or, after an error (no output), closes the cache."""
        plan = kwargs.get(PLAN_KEYWORD)
        if not isinstance(plan, AttentionPlan) or plan.cache is None:
            return
        if output is None:
            plan.cache.close()
        else:
            plan.cache.commit(plan.new, plan.schedule, plan.packed)

    def _cache(self, decoder: LlamaModel, kwargs: dict[str, Any], batch: int) -> Any:
        """Takes the cache out of `kwargs` and checks it; makes one where a stock model would."""
        given = [kwargs.pop(name) for name in CACHE_KEYWORDS if name in kwargs]
        cache: Any = next((cache for cache in given if cache is not None), None)
        if isinstance(cache, DynamicYaRNCache):
            cache.check_fits(self.schedule, batch, decoder.config.num_hidden_layers)
        elif cache is not None:
            DynamicYaRNCache.check_adoptable(cache)
        # Under checkpointing the layers drop the cache, which the backward pass would fill again;
        # before transformers 5.24 also where there will be no backward pass.
        checkpointing = decoder.training and decoder.gradient_checkpointing
        if checkpointing and (torch.is_grad_enabled() or TRANSFORMERS < (5, 24)):
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


def resolve_schedule(model_config: PretrainedConfig, config: DynamicYaRNConfig) -> YaRNSchedule:
    """Fills the defaults of `config` in from the model's config.

    Raises:
        ValueError: the model's rope type is not supported, or an option contradicts the model.
    """
    rope = _rope_parameters(model_config)
    rope_type = rope["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ValueError(
            f"the rope type of the model must be one of {SUPPORTED_ROPE_TYPES}, got {rope_type!r}. "
            "Load the model with one of these, or leave it unpatched."
        )
    for name, neutral in (
        ("partial_rotary_factor", 1.0),
        ("mscale", None),
        ("mscale_all_dim", None),
    ):
        if rope.get(name) not in (None, neutral):
            raise ValueError(
                f"rope_parameters[{name!r}] of the model must be {neutral}, got {rope[name]!r}."
            )
    trained = rope.get("original_max_position_embeddings") if rope_type == "yarn" else None
    trained = trained or model_config.max_position_embeddings
    window = config.original_max_position_embeddings or trained
    finetuned = bool(rope.get("finetuned")) if config.finetuned is None else config.finetuned
    if finetuned and rope_type != "yarn":
        raise ValueError(
            "finetuned=True needs a model whose rope_parameters have the factor it was trained "
            f"with, got rope type {rope_type!r}. Leave finetuned out."
        )
    factor = rope.get("factor") or model_config.max_position_embeddings / trained
    heads = model_config.num_attention_heads
    return YaRNSchedule(
        head_dim=getattr(model_config, "head_dim", None) or model_config.hidden_size // heads,
        rope_theta=float(rope["rope_theta"]),
        original_max_position_embeddings=window,
        rescale_every=config.rescale_every or max(1, window // 32),
        max_scale=float("inf") if config.max_scale is None else float(config.max_scale),
        min_scale=max(1.0, float(factor)) if finetuned else 1.0,
        per_forward=config.schedule == "forward",
        beta_fast=float(config.beta_fast or rope.get("beta_fast") or 32),
        beta_slow=float(config.beta_slow or rope.get("beta_slow") or 1),
        attention_factor=config.attention_factor or rope.get("attention_factor"),
        truncate=rope.get("truncate", True) if config.truncate is None else config.truncate,
    )


def _rope_parameters(model_config: PretrainedConfig) -> dict[str, Any]:
    """The rope parameters that the model itself goes by, in the spelling of transformers 5."""
    if TRANSFORMERS >= (5, 0):
        return {"rope_type": "default", **model_config.rope_parameters}
    theta, scaling = model_config.rope_theta, model_config.rope_scaling or {}
    newer = getattr(model_config, "rope_parameters", None)
    if newer and newer.get("rope_theta") != theta:
        raise ValueError(
            "the model's config must have rope_theta and rope_scaling, got rope_parameters="
            f"{newer}, which this transformers does not read. Upgrade to transformers 5, with "
            "which the config was written."
        )
    return {"rope_type": scaling.get("type", "default"), "rope_theta": theta, **scaling}


def _backend(model_config: PretrainedConfig) -> str:
    """The attention implementation that the model's config names, if it is one that can serve."""
    backend: str = model_config._attn_implementation or "eager"
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
    lengths = [
        name for name in kwargs if name.startswith("cu_seq_lens") and kwargs[name] is not None
    ]
    if lengths:
        raise ValueError(
            f"packed documents must be told apart by position_ids, got {lengths}. Pass "
            "position_ids that restart at each document instead."
        )


def _option(decoder: LlamaModel, kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return bool(getattr(decoder.config, name) if value is None else value)


def _find_decoder(model: nn.Module) -> LlamaModel:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    decoders = [module for module in model.modules() if isinstance(module, LlamaModel)]
    if len(decoders) > 1:
        raise ValueError(
            f"model must hold one Llama decoder, got {len(decoders)}. Patch them one by one."
        )
    if not decoders or not _is_supported(decoders[0]):
        model_type = getattr(getattr((*decoders, model)[0], "config", None), "model_type", None)
        raise TypeError(
            f"model must be of one of the supported families {SUPPORTED_MODEL_TYPES}, with one "
            f"attention layer of its own in each decoder layer, got {type(model).__name__} of "
            f"model_type {model_type!r}."
        )
    return decoders[0]


def _is_supported(decoder: LlamaModel) -> bool:
    """Whether the decoder is of a supported family, with the attention layers it came with."""
    of_family = decoder.config.model_type in SUPPORTED_MODEL_TYPES
    return of_family and len(_attention_layers(decoder)) == len(decoder.layers)


def _attention_layers(decoder: LlamaModel) -> list[LlamaAttention]:
    return [module for module in decoder.modules() if isinstance(module, LlamaAttention)]


def _patch_of(decoder: LlamaModel) -> _Patch | None:
    patch: _Patch | None = decoder.__dict__.get("_dynamic_yarn")
    return patch


def _check_and_patch(decoder: LlamaModel, config: DynamicYaRNConfig, class_wide: bool) -> None:
    _check_causal(decoder.config, {})
    schedule = resolve_schedule(decoder.config, config)
    _backend(decoder.config)
    replaced = _patch_of(decoder)
    if replaced is not None:
        logger.warning(
            f"patch_llama: the model was patched already; {config} replaces {replaced.config}."
        )
        _restore(decoder)
    AttentionInterface.register(ATTENTION_NAME, dynamic_yarn_attention)
    decoder._dynamic_yarn = _Patch(decoder, config, schedule, class_wide)
    decoder.rotary_emb = UnrotatedEmbedding(decoder.rotary_emb)
    attention_config = copy.copy(decoder.config)
    attention_config._attn_implementation = ATTENTION_NAME
    for layer in _attention_layers(decoder):
        layer.config = attention_config
    _patched.add(decoder)


def _restore(decoder: LlamaModel) -> None:
    patch = _patch_of(decoder)
    if patch is None:
        return
    for hook in patch.hooks:
        hook.remove()
    decoder.rotary_emb = decoder.rotary_emb.stock
    for layer, config in patch.stock_configs:
        layer.config = config
    del decoder._dynamic_yarn


def _patch_class_wide(config: DynamicYaRNConfig) -> PatchHandle:
    global _class_wide
    if _class_wide is not None:
        logger.warning(
            f"patch_llama: Llama was patched already; {config} replaces {_class_wide.config}."
        )
        _remove_class_wide()
    _class_wide = PatchHandle(config)
    # LlamaModel has no __call__ of its own: nothing is overwritten, and deleting it restores all.
    LlamaModel.__call__ = _patch_and_call
    return _class_wide


def _patch_and_call(decoder: LlamaModel, *args: Any, **kwargs: Any) -> Any:
    """`LlamaModel.__call__` under the class-wide patch: patches the model first if it is not."""
    with _lock:
        if _class_wide is not None and _patch_of(decoder) is None and _is_supported(decoder):
            _check_and_patch(decoder, _class_wide.config, class_wide=True)
    return super(LlamaModel, decoder).__call__(*args, **kwargs)


def _remove_class_wide() -> None:
    global _class_wide
    if _class_wide is None:
        return
    _class_wide = None
    del LlamaModel.__call__
    for decoder in _live_decoders():
        patch = _patch_of(decoder)
        if patch is not None and patch.class_wide:
            _restore(decoder)


def _live_decoders() -> list[LlamaModel]:
    """Every patched decoder of this process.

    The garbage collector knows the deep copies, our own set those that were frozen away from it.
    """
    found = {thing for thing in gc.get_objects() if issubclass(type(thing), LlamaModel)}
    return [decoder for decoder in found.union(_patched) if _patch_of(decoder) is not None]
