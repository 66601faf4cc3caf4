"""Self-Extend (Jin et al. 2024, arXiv:2401.01325) over un-rotated keys.

A query at position q and a key at k are turned by the model's own frequencies, over a distance of

    (1) q - k                                   where q - k < w: exact among w neighbours
    (2) (q // G + w - w // G) - k // G          elsewhere: counted in groups of G tokens

so that up to (L0 - w) G + w tokens no distance is larger than the trained window L0. It goes by
positions alone, and over keys that are cached un-rotated any cut of a text gives the same.

It is no schedule of the package: those turn all keys that a query sees by one set of frequencies,
and the rotated copy, the kernels and the steps over static caches rest on that. Here each key is
turned twice, and each query attends over both in one softmax.
"""

import math

import torch
from common import twin_of
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_dynyarn.models import attention_layers
from hf_dynyarn.rope import rotary_tables, rotate

NAME = "self_extend"
TILE = 256  # queries at a time, each with a row of the mask


class UnrotatedEmbedding(nn.Module):
    """Rotates nothing, but in layers with a window, which never see farther than in training."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> tuple:
        if layer_type == "sliding_attention":
            return self.stock(x, position_ids, layer_type)
        one = x.new_ones((1, 1, 1))
        return one, one - one


def group_for(window: int, longest: int) -> tuple[int, int]:
    """Neighbours and group size `(w, G)` for texts up to `longest` tokens, by its authors' rule.

    Neighbours are an eighth of the window, and all distances lie within half of it.
    """
    neighbours = window // 8
    return neighbours, max(1, math.ceil((longest - neighbours) / (window // 2 - neighbours)))


def self_extended(model, inv_freq: torch.Tensor, neighbours: int, group: int):
    """The same weights (not copied) in a model that attends by (1) and (2), rows without padding.

    Args:
        model: a stock model.
        inv_freq: `(D/2,)`, the model's own, radians per token.
        neighbours: `w`, in tokens.
        group: `G`, in tokens.
    """
    twin = twin_of(model)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    twin.config._attn_implementation = NAME
    twin.model.rotary_emb = UnrotatedEmbedding(twin.model.rotary_emb)
    for layer in attention_layers(twin.model):
        layer.self_extend = (inv_freq, neighbours, group)
    return twin


def attention(module, query, key, value, attention_mask, scaling, **kwargs) -> tuple:
    """What transformers calls in each layer."""
    if getattr(module, "sliding_window", None) is not None:
        stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return stock(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return attend(query, key, value, scaling, *module.self_extend).transpose(1, 2), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    inv_freq: torch.Tensor,
    neighbours: int,
    group: int,
) -> torch.Tensor:
    """Attends over un-rotated keys.

    Args:
        query: `(B, Hq, T, D)`, of the last tokens.
        key: `(B, Hkv, L, D)`.
        value: `(B, Hkv, L, D)`.
        scaling: factor on the logits.
        inv_freq: see `self_extended`, like all below.
        neighbours: `w`.
        group: `G`.

    Returns:
        `(B, Hq, T, D)`.
    """
    dim, length = query.shape[-1], key.shape[2]
    first = length - query.shape[2]
    begin = max(0, first - neighbours + 1)  # the first key that is near to any query
    positions = torch.arange(length)

    def turn(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        tables = rotary_tables(at[None], inv_freq[None], torch.ones(1), states.dtype)
        return rotate(states, *tables)

    # Far in the first half of the numbers, near in the second: a key is 0 where it does not count.
    shift = neighbours - neighbours // group
    queries = torch.cat(
        (turn(query, positions[first:] // group + shift), turn(query, positions[first:])), dim=-1
    )
    far = pad(turn(key, positions // group), (0, dim))
    near = pad(turn(key[:, :, begin:], positions[begin:]), (dim, 0))
    values = pad(value, (0, dim))
    outputs = []
    for start in range(first, length, TILE):
        stop = min(start + TILE, length)
        # Of the keys [0, last) some are far, of those from `low` on some are near.
        last, low = max(0, stop - neighbours), max(0, start - neighbours + 1)
        seen = torch.cat((positions[:last], positions[low:stop]))
        distance = positions[start:stop, None] - seen
        is_near = torch.arange(len(seen)) >= last
        mask = (distance >= 0) & ((distance < neighbours) == is_near)
        outputs.append(
            _grouped(
                queries[:, :, start - first : stop - first],
                torch.cat((far[:, :, :last], near[:, :, low - begin : stop - begin]), dim=2),
                torch.cat((values[:, :, :last], values[:, :, low:stop]), dim=2),
                mask,
                scaling,
            )[..., :dim]
        )
    return torch.cat(outputs, dim=2)


def _grouped(query, key, value, mask, scaling) -> torch.Tensor:
    """Attends for the queries of each key head, without copies of keys for them."""
    groups = query.shape[1] // key.shape[1]
    return torch.cat(
        [
            scaled_dot_product_attention(
                queries,
                key[:, head : head + 1].expand(-1, groups, -1, -1),
                value[:, head : head + 1].expand(-1, groups, -1, -1),
                attn_mask=mask,
                scale=scaling,
            )
            for head, queries in enumerate(query.split(groups, dim=1))
        ],
        dim=1,
    )
