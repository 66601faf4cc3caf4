"""The ways to read past the window that are compared, each a stock or patched model and its cache.

All share the weights. Those whose result depends on how a text is cut read it in pieces of one
stair of the scale, about as decoding would.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import CACHE, patched, static_yarn, with_rope
from torch import nn
from transformers import Cache, DynamicCache

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig
from hf_dynyarn.resolve import resolve_schedule
from hf_dynyarn.rope import rotary_tables
from hf_dynyarn.schedules import Schedule

PLAIN, OURS, STALE, FORWARD = "plain RoPE", "ours", "dynamic, stale keys", "dynamic, per call"
STATIC = ("static yarn 2", "static yarn 4")
NAMES = (PLAIN, *STATIC, STALE, FORWARD, OURS)


@dataclass
class Rival:
    """A model and the cache that it reads with."""

    model: nn.Module
    make_cache: Callable[[], Cache]
    piece: int  # tokens in one call

    def start(self) -> Cache:
        return self.make_cache()

    @torch.inference_mode()
    def read(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Appends `(B, T)` tokens to the cache; returns their logits, `(B, T, V)`."""
        return self.model(ids, **{CACHE: cache}).logits


class StaleEmbedding(nn.Module):
    """Dynamic YaRN with stale keys: they are cached as the scale of their own call turned them."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = self.schedule.scale(position_ids)[:, -1]
        tables = rotary_tables(
            position_ids, self.schedule.inv_freq(scale), self.schedule.gain(scale), x.dtype
        )
        return tuple(torch.cat((half, half), dim=-1) for half in tables)


def make(stock: nn.Module, name: str, **options: int) -> Rival:
    """One of `NAMES`; the options are those of `patch_llama`."""
    window = stock.config.max_position_embeddings
    schedule = resolve_schedule(stock.config, DynamicYaRNConfig(**options))
    stair, piece = schedule.rescale_every, min(1024, window)
    if name == PLAIN:
        return Rival(stock, DynamicCache, piece)
    if name in STATIC:
        rope = static_yarn(window, float(name.rsplit(" ", 1)[1]))
        return Rival(with_rope(stock, rope), DynamicCache, piece)
    if name == STALE:
        model = with_rope(stock, {"rope_type": "default"})
        model.model.rotary_emb = StaleEmbedding(schedule)
        return Rival(model, DynamicCache, stair)
    if name == FORWARD:
        return Rival(patched(stock, schedule="forward"), DynamicYaRNCache, stair)
    return Rival(patched(stock, **options), DynamicYaRNCache, piece)
