"""Attention over un-rotated keys in a paged cache, compiled by torch for the device at hand.

For decoding one query of each request attends to each block of the request by itself, and the
results are merged. A key is rotated in the registers of the kernel that multiplies it, and never
written. For the many queries of a prompt, `unpage` writes rotated keys side by side.

As operations of torch one by one, these functions would write what is rotated several times over;
that is why they are always compiled, like the kernels that vLLM brings along.
"""

from typing import Any

import torch
from torch._dynamo.decorators import mark_dynamic, mark_unbacked

# Nothing is written to be read again: the query heads of a group, which come one by one, share what
# was loaded and rotated. The last option adds a product in one instruction. A process may go
# through engines of many shapes, each with kernels of its own, of which torch allows 8.
FUSED: dict[str, Any] = {
    "fullgraph": True,
    "options": {
        "realize_reads_threshold": 1000,
        "realize_opcount_threshold": 1000,
        "cpp.enable_floating_point_contract_flag": "fast",
    },
    "recompile_limit": 64,
}


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    requests: torch.Tensor,
    starts: torch.Tensor,
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Attends for one query of each request.

    Args:
        query: `(B, Hkv, G, D)` float32, rotated and scaled: those of a group beside one another.
        cache: `(blocks, Hkv, 2, block_size, D)`, un-rotated keys and values.
        blocks: places in the cache of all blocks of all requests, `(N,)`.
        requests: whose they are, `(N,)`.
        starts: rows of `cos` and `sin` for the first key of each block, `(N,)`.
        keys: how many keys each block has for its request, from 1 to `block_size`, `(N,)`.
        cos: `(P, R)` float32, with `R` half the rotated dimension.
        sin: `(P, R)` float32.
        interleaved: whether the pairs of a key lie side by side; those of `query` do not.

    Returns:
        `(B, Hkv, G, D)` float32
    """
    # One kernel for all sizes, 1 included.
    for tensor in (blocks, requests, starts, keys, query):
        mark_unbacked(tensor, 0)
    mark_dynamic(cache, 0)
    logits = _scores(query, cache, blocks, requests, starts, keys, cos, sin, interleaved)
    mark_unbacked(logits, 0)
    index = requests[:, None, None].expand(logits.shape[:3])
    peaks = logits.new_full((len(query), *logits.shape[1:3]), -torch.inf)
    peaks.scatter_reduce_(0, index, logits.amax(-1), "amax")
    mark_unbacked(peaks, 0)
    outputs, sums = _weigh(logits, peaks, requests, cache, blocks, keys)
    total = torch.zeros_like(peaks).index_add_(0, requests, sums)
    output: torch.Tensor = outputs.new_zeros(query.shape).index_add_(0, requests, outputs)
    return output / total[..., None]


def unpage(
    cache: torch.Tensor,
    blocks: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """Writes the rotated keys, and the values, of some blocks side by side.

    Args:
        cache: as `decode` takes it.
        blocks: places in the cache, `(n,)`.
        cos: for all keys that the blocks have room for, `(n * block_size, R)` float32.
        sin: `(n * block_size, R)` float32.
        interleaved: whether pairs lie side by side in the cache; those that are written do not.
        out: keys and values, `(2, Hkv, n, block_size, D)` of the cache's dtype.
    """
    for tensor, dim in ((blocks, 0), (cos, 0), (sin, 0), (out, 2)):
        mark_unbacked(tensor, dim)
    mark_dynamic(cache, 0)
    _unpage(cache, blocks, cos, sin, interleaved, out)


@torch.compile(**FUSED)
def _unpage(
    cache: torch.Tensor,
    blocks: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    shape = (len(blocks), 1, cache.shape[3], cos.shape[-1])
    first, second, rest = _turned(
        cache[blocks, :, 0].float(), cos.view(shape), sin.view(shape), interleaved
    )
    keys = torch.cat((first, second, rest), -1)  # (n, Hkv, block_size, D)
    out[0] = keys.transpose(0, 1).to(out.dtype)
    out[1] = cache[blocks, :, 1].transpose(0, 1)


def _turned(
    key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both numbers of the rotated pairs of keys `(..., D)`, and the numbers that stay."""
    half = cos.shape[-1]
    if interleaved:
        first, second = key[..., : 2 * half : 2], key[..., 1 : 2 * half : 2]
    else:
        first, second = key[..., :half], key[..., half : 2 * half]
    return first * cos - second * sin, second * cos + first * sin, key[..., 2 * half :]


@torch.compile(**FUSED)
def _scores(
    query: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    requests: torch.Tensor,
    starts: torch.Tensor,
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Logits of the keys of each block, `(N, Hkv, G, block_size)`."""
    half, size = cos.shape[-1], cache.shape[3]
    offsets = torch.arange(size, device=cache.device)
    rows = starts[:, None] + offsets
    cos, sin = cos[rows][:, None], sin[rows][:, None]  # (N, 1, block_size, R)
    key = cache[blocks, :, 0].float()  # (N, Hkv, block_size, D)
    first, second, rest = _turned(key, cos, sin, interleaved)
    beyond = (offsets >= keys[:, None])[:, None]
    logits = []
    for own in query[requests][:, :, :, None].unbind(2):  # (N, Hkv, 1, D)
        logit = (first * own[..., :half] + second * own[..., half : 2 * half]).sum(-1)
        if rest.shape[-1]:
            logit = logit + (rest * own[..., 2 * half :]).sum(-1)
        logits.append(logit.masked_fill(beyond, -torch.inf))
    return torch.stack(logits, 2)


@torch.compile(**FUSED)
def _weigh(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    requests: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of each block weighted by the exponentials of its logits.

    Args:
        logits: `(N, Hkv, G, block_size)`.
        peaks: the largest logit of each query, which the weights are relative to, `(B, Hkv, G)`.
        requests: as `decode` takes it, like the next three.
        cache: `(blocks, Hkv, 2, block_size, D)`.
        blocks: `(N,)`.
        keys: `(N,)`.

    Returns:
        the weighted values `(N, Hkv, G, D)` and the sum of the weights `(N, Hkv, G)`.
    """
    weights = (logits - peaks[requests][..., None]).exp()
    # What a block holds beyond its keys may be anything, not a number included.
    offsets = torch.arange(cache.shape[3], device=cache.device)
    beyond = (offsets >= keys[:, None])[:, None, :, None]
    value = cache[blocks, :, 1].float().masked_fill(beyond, 0.0)
    outputs = [(weight[..., None] * value).sum(2) for weight in weights.unbind(2)]
    return torch.stack(outputs, 2), weights.sum(-1)
