"""The hooks of one patched decoder: what happens before, in place of, and after its own code.

Before it, the plan of the call is made and sent down to the attention layers as a keyword. In place
of its rotary embeddings stand modules that rotate nothing, so that un-rotated keys reach the cache.
After it, the call is committed to the cache.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from transformers import AttentionInterface, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from .attention import ATTENTION_NAME, dynamic_yarn_attention
from .cache import DynamicYaRNCache
from .documents import BOUNDS, bounds_of_call
from .graphs import check_not_recorded, outside_graphs
from .handover import (
    WithoutMasks,
    adopt,
    cache_of_call,
    check_shapes,
    drop_kept_cache,
    given_cache,
    option,
    stand_in,
)
from .models import (
    attention_layers,
    cache_droppers,
    check_own_code,
    check_rotary,
    family_of,
    key_heads,
    masked_windows,
    unrotated_layers,
)
from .options import DynamicYaRNConfig
from .plan import AttentionPlan, make_plan
from .schedules import Schedule
from .static import StaticYaRNCache
from .step import MOST_TOKENS, Step, make_step
from .versions import CACHE_KEYWORDS, arguments_of, is_paged, rotary_embeddings

# A decoder's own names of what it computes with, one of which a call gives.
INPUTS = ("input_ids", "inputs_embeds")

# How the plan travels from the decoder to `dynamic_yarn_attention`.
PLAN_KEYWORD = "dynamic_yarn_plan"


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


class WeakModules:
    """Modules that are not kept alive; in a copy of a model, their copies."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = WeakSet(modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self._modules),)


class Patch:
    """The hooks of one patched decoder, and what it takes to undo them.

    A deep copy of the model gets a deep copy of this.

    `torch.compile` follows the hooks of a step over a cache of fixed size. What is planned depends
    on lengths and scales, for each of which it would compile anew: the making of plans, the cache's
    `update` and attention by a plan stay outside its graphs.

    Args:
        decoder: the decoder.
        config: the options.
        schedule: the schedule that they make.
        windowed: that of layers which keep the scale they were trained at, where it is another.
        model: what holds the decoder; None where that is not known.
        in_force: of a patch that can end while this does not know of the decoder, such as a copy:
            whether it has not. None where the patch is of this decoder alone.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        config: DynamicYaRNConfig,
        schedule: Schedule,
        windowed: Schedule | None,
        model: nn.Module | None,
        in_force: Callable[[], bool] | None = None,
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.windowed = windowed
        self.in_force = in_force
        self.arguments = arguments_of(decoder)
        self.unrotated = unrotated_layers(decoder)
        # Of a family whose eager attention has more than others: only that serves it.
        self.own_eager = family_of(decoder).backends == ("eager",)
        self.stock_configs = [(layer, layer.config) for layer in attention_layers(decoder)]
        self.cache_droppers = [] if model is None else cache_droppers(model)
        modules = [] if model is None else model.modules()
        self.generators = WeakModules(one for one in modules if isinstance(one, GenerationMixin))
        self.hooks = (
            decoder.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            decoder.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True),
        )
        self._replace_parts(decoder)

    def _replace_parts(self, decoder: PreTrainedModel) -> None:
        AttentionInterface.register(ATTENTION_NAME, dynamic_yarn_attention)
        for holder, name in rotary_embeddings(decoder):
            setattr(holder, name, UnrotatedEmbedding(getattr(holder, name)))
        attention_config = copy.copy(decoder.config)
        attention_config._attn_implementation = ATTENTION_NAME
        for layer, _ in self.stock_configs:
            layer.config = attention_config
        for generator in self.generators:
            stock = getattr(generator, "create_masks_for_generate", create_masks_for_generate)
            generator.create_masks_for_generate = WithoutMasks(stock)
        for wrapper in self.cache_droppers:
            prepare = GenerationMixin.prepare_inputs_for_generation
            wrapper.prepare_inputs_for_generation = MethodType(prepare, wrapper)
        decoder._dynamic_yarn = self  # last: another thread takes it for patched from here on

    def remove(self, decoder: PreTrainedModel) -> None:
        """Gives back the stock decoder."""
        for hook in self.hooks:
            hook.remove()
        for holder, name in rotary_embeddings(decoder):
            setattr(holder, name, getattr(holder, name).stock)
        for layer, config in self.stock_configs:
            layer.config = config
        for generator in self.generators:
            del generator.create_masks_for_generate
            drop_kept_cache(generator)
        for wrapper in self.cache_droppers:
            del wrapper.prepare_inputs_for_generation
        del decoder._dynamic_yarn

    def before_forward(
        self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks and plans a call, then opens its cache. A refused call has changed nothing."""
        if self.in_force is not None and not self.in_force():
            self._expire(decoder)
            return args, kwargs
        kwargs = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        given = [kwargs[name] for name in INPUTS if kwargs.get(name) is not None]
        if len(given) != 1:
            return (), kwargs  # the decoder's own error says it best
        if is_paged(given_cache(kwargs)):
            refuse_continuous_batching(decoder)
        check_causal(decoder.config, kwargs)
        if self._is_step(decoder, given[0], kwargs):
            return (), self._handed_on(self._step(decoder, given[0], kwargs), given[0], kwargs)
        return (), self._planned(decoder, given[0], kwargs)

    @outside_graphs
    def _planned(
        self, decoder: PreTrainedModel, inputs: torch.Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        return self._handed_on(self._plan(decoder, inputs, kwargs), inputs, kwargs)

    def _handed_on(
        self, forward: AttentionPlan | Step, inputs: torch.Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """What the decoder is called with."""
        name = next(name for name in CACHE_KEYWORDS if name in self.arguments)
        kwargs = {key: value for key, value in kwargs.items() if key not in CACHE_KEYWORDS}
        kwargs[name] = forward.cache
        kwargs["position_ids"] = forward.new.clamp(min=0)
        if isinstance(forward, Step) and "cache_position" in self.arguments:
            # Older decoders would make it of what the cache says, which a graph does not know.
            kwargs["cache_position"] = forward.cache.filled.next_columns(forward.new.shape[1])
        # A 4-D mask goes through the decoder as it is: with this one no stock mask is built. The
        # plan has the real one.
        shape = (inputs.shape[0], 1, 0, 0)
        kwargs["attention_mask"] = inputs.new_empty(shape, dtype=torch.bool)
        kwargs[PLAN_KEYWORD] = forward
        return kwargs

    def after_forward(
        self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Commits the call to its cache, or, after an error (no output), closes the cache."""
        forward = kwargs.get(PLAN_KEYWORD)
        if isinstance(forward, Step) and output is not None:
            forward.cache.commit_step(forward.new)
        elif isinstance(forward, AttentionPlan | Step) and forward.cache is not None:
            self._end(forward, forward.cache, output)

    def _is_step(
        self, decoder: PreTrainedModel, inputs: torch.Tensor, kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call goes on in a cache of fixed size, with few tokens and nothing special."""
        cache = given_cache(kwargs)
        return (
            isinstance(cache, StaticYaRNCache)
            and isinstance(inputs, torch.Tensor)
            and 1 <= inputs.shape[1] <= MOST_TOKENS
            and cache.takes_step(inputs.shape[0], self.schedule)
            and not (decoder.training or torch.is_grad_enabled() or torch.jit.is_tracing())  # type: ignore[attr-defined]
            and not (self.own_eager or option(decoder, kwargs, "output_attentions"))
            and all(kwargs.get(name) is None for name in BOUNDS)
        )

    def _step(self, decoder: PreTrainedModel, inputs: torch.Tensor, kwargs: dict[str, Any]) -> Step:
        layers = [layer for layer, _ in self.stock_configs]
        if not torch.compiler.is_compiling():
            check_own_code(decoder, layers)
            check_rotary(decoder)
        windows = masked_windows(decoder)
        cache = given_cache(kwargs)
        check_shapes(cache, len(decoder.layers), *key_heads(decoder.config))
        step = make_step(
            cache=cache,
            schedule=self.schedule,
            windowed=self.windowed,
            unrotated=self.unrotated,
            interleaved=family_of(decoder).interleaved,
            windows=None if "flash" in backend_of(decoder) else windows,
            inputs=inputs,
            attention_mask=kwargs.get("attention_mask"),
            position_ids=kwargs.get("position_ids"),
        )
        step.cache.begin_step(step)
        return step

    def _plan(
        self, decoder: PreTrainedModel, inputs: torch.Tensor, kwargs: dict[str, Any]
    ) -> AttentionPlan:
        check_not_recorded(inputs)
        layers = [layer for layer, _ in self.stock_configs]
        check_own_code(decoder, layers)
        check_rotary(decoder)
        backend = backend_of(decoder)
        windows = masked_windows(decoder)
        given = cache_of_call(decoder, kwargs, self.schedule, inputs.shape[0])
        cache = stand_in(given)
        mask, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
        bounds = bounds_of_call(kwargs, 0 if cache is None else cache.get_seq_length())
        if isinstance(cache, StaticYaRNCache):
            mask, position_ids = cache.place(inputs, mask, position_ids, bounds)
        plan = make_plan(
            schedule=self.schedule,
            cache=cache,
            inputs=inputs,
            attention_mask=mask,
            position_ids=position_ids,
            bounds=bounds,
            backend=backend,
            output_attentions=option(decoder, kwargs, "output_attentions"),
            unrotated=self.unrotated,
            interleaved=family_of(decoder).interleaved,
            windowed=self.windowed,
            windows=None if "flash" in backend else windows,
        )
        if cache is not None:
            plan.cache = adopt(given, cache)
            plan.cache.begin(plan)
        return plan

    @outside_graphs
    def _end(self, forward: AttentionPlan | Step, cache: DynamicYaRNCache, output: Any) -> None:
        if output is None or isinstance(forward, Step):
            cache.close()
        else:
            cache.commit(forward.new, forward.schedule, forward.packed)

    @outside_graphs
    def _expire(self, decoder: PreTrainedModel) -> None:
        self.remove(decoder)


def patch_of(decoder: nn.Module) -> Patch | None:
    """The patch of a decoder, if it has one."""
    patch: Patch | None = decoder.__dict__.get("_dynamic_yarn")
    return patch


def backend_of(decoder: PreTrainedModel) -> str:
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


def refuse_continuous_batching(model: nn.Module) -> NoReturn:
    """Says that a model cannot batch continuously.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a patched model must cache keys un-rotated, and continuous batching pages them rotated: "
        f"it is not supported, got a call of it for a {type(model).__name__}. Instead of "
        "generate_batch(), use model.generate() on a padded batch, or unpatch_llama(model) first."
    )


def check_causal(model_config: PretrainedConfig, kwargs: dict[str, Any]) -> None:
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
