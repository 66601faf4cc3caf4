"""The ways to read past the window that are compared, each a stock or patched model and its cache.

All share the weights. Those whose result depends on how a text is cut read it in pieces of one
stair of the scale, about as decoding would.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import CACHE, patched, static_yarn, twin_of, with_rope
from torch import nn
from transformers import Cache, DynamicCache, PretrainedConfig

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig
from hf_dynyarn.resolve import resolve_schedule
from hf_dynyarn.rope import rotary_tables
from hf_dynyarn.schedules import Schedule
from quality.self_extend import group_for, self_extended

PLAIN, OURS, STALE, FORWARD = "plain RoPE", "ours", "dynamic, stale keys", "dynamic, per call"
STATIC = ("static yarn 2", "static yarn 4")
NTK_FACTOR = 2.0  # its base grows by 2 s - 1
NTK, SELF_EXTEND = "dynamic NTK, per position", "Self-Extend"
NAMES = (PLAIN, *STATIC, STALE, FORWARD, NTK, SELF_EXTEND, OURS)


@dataclass
class Rival:
    """A model and the cache that it reads with."""

    model: nn.Module
    make_cache: Callable[[], Cache]
    piece: int  # tokens in one call

    def start(self) -> Cache:
        return self.make_cache()

    @torch.inference_mode()
    def read(self, ids: torch.Tensor, cache: Cache, keep: int = 0) -> torch.Tensor:
        """Appends `(B, T)` tokens to the cache; returns the logits of all, or of the last `keep`.

        They are `(B, T or keep, V)`.
        """
        return self.model(ids, logits_to_keep=keep, **{CACHE: cache}).logits


class StaleEmbedding(nn.Module):
    """Dynamic YaRN with stale keys: they are cached as the scale of their own call turned them.

    Layers with a window keep their own rotation.
    """

    def __init__(self, schedule: Schedule, stock: nn.Module) -> None:
        super().__init__()
        self.schedule, self.stock = schedule, stock

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = ""
    ) -> tuple[torch.Tensor, ...]:
        if layer_type == "sliding_attention":
            return self.stock(x, position_ids, layer_type)
        scale = self.schedule.scale(position_ids)[:, -1]
        tables = rotary_tables(
            position_ids, self.schedule.inv_freq(scale), self.schedule.gain(scale), x.dtype
        )
        return tuple(torch.cat((half, half), dim=-1) for half in tables)


def names_for(config: PretrainedConfig) -> tuple[str, ...]:
    """Those of `NAMES` that a model can serve.

    One scale per call would stretch layers that have a window and frequencies of their own.
    """
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return tuple(name for name in NAMES if not (windowed and name == FORWARD))


def make(stock: nn.Module, name: str, longest: int, **options: int) -> Rival:
    """One of `NAMES`.

    Args:
        stock: the model, which stays as it is.
        name: of the rival.
        longest: how many tokens will be read at most, by which Self-Extend is set.
        **options: of `patch_llama`.
    """
    window = stock.config.max_position_embeddings
    schedule = resolve_schedule(stock.config, DynamicYaRNConfig(**options))
    stair, piece = schedule.rescale_every, min(1024, window)
    if name == PLAIN:
        return Rival(stock, DynamicCache, piece)
    if name in STATIC:
        rope = static_yarn(window, float(name.rsplit(" ", 1)[1]))
        return Rival(with_rope(stock, rope), DynamicCache, piece)
    if name == STALE:
        model = twin_of(stock)
        model.model.rotary_emb = StaleEmbedding(schedule, model.model.rotary_emb)
        return Rival(model, DynamicCache, stair)
    if name == FORWARD:
        return Rival(patched(stock, schedule="forward"), DynamicYaRNCache, stair)
    if name == NTK:
        model = with_rope(stock, {"rope_type": "dynamic", "factor": NTK_FACTOR})
        return Rival(patched(model), DynamicYaRNCache, piece)
    if name == SELF_EXTEND:
        trained = schedule.inv_freq(torch.ones((), dtype=torch.float64))
        model = self_extended(stock, trained, *group_for(window, longest))
        return Rival(model, DynamicCache, piece)
    return Rival(patched(stock, **options), DynamicYaRNCache, piece)
