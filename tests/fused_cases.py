"""Cases and the float64 oracle of the fused operation, for its CPU version and its kernels."""

from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True)
class Case:
    """What one call is made of. Rows are tuples of one number for each."""

    lengths: tuple = (37,)
    starts: tuple = (0,)
    tokens: int = 1
    heads: int = 4
    key_heads: int = 2
    dim: int = 64
    pairs: int = 32
    window: int | None = None
    interleaved: bool = False
    block_size: int | None = None
    dtype: torch.dtype = torch.float32
    # A scale for each token of each row; 1 where nothing is said.
    scales: tuple | None = None
    junk: float | None = None
    room: int = 5
    strides: bool = False

    def __str__(self):
        default = Case()
        changed = (
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(default, name)
        )
        return ",".join(changed).replace(" ", "").replace("torch.", "") or "plain"

    def but(self, **changes):
        return replace(self, **changes)


def arguments(case, seed=0):
    """Positional and keyword arguments of `decode`."""
    torch.manual_seed(seed)
    rows = len(case.lengths)
    room = max(case.lengths) + case.room
    query = torch.randn(rows, case.heads, case.tokens, case.dim)
    key = torch.randn(rows, case.key_heads, room, case.dim)
    value = torch.randn(rows, case.key_heads, room, case.dim)
    if case.junk is not None:
        for row, (length, start) in enumerate(zip(case.lengths, case.starts, strict=True)):
            for states in (key, value):
                states[row, :, length:] = case.junk
                states[row, :, : min(start, length)] = case.junk
    scale = torch.ones(rows, case.tokens)
    if case.scales is not None:
        scale = torch.tensor(case.scales)
    theta = 1.0 / 10000.0 ** (torch.arange(case.pairs) / case.pairs)
    inv_freq = theta / (1 + (scale[..., None] - 1) * torch.linspace(0, 1, case.pairs))
    gain = 0.1 * scale.log() + 1
    keywords = {"window": case.window, "interleaved": case.interleaved}
    query, key, value = (states.to(case.dtype) for states in (query, key, value))
    if case.strides:
        query, key, value = (
            states.transpose(1, 2).contiguous().transpose(1, 2) for states in (query, key, value)
        )
    if case.block_size is not None:
        key, value, keywords["block_table"] = in_pages(key, value, case.block_size)
    positional = (
        query,
        key,
        value,
        case.dim**-0.5,
        torch.tensor(case.lengths),
        torch.tensor(case.starts),
        scale,
        inv_freq,
        gain,
    )
    return positional, keywords


def in_pages(key, value, size):
    """The same keys and values in vLLM's layout, pages shuffled, and where they are."""
    rows, heads, room, dim = key.shape
    pages = -(-room // size)
    padded = torch.nn.functional.pad(
        torch.stack((key, value), 2), (0, 0, 0, pages * size - room)
    )  # (B, Hkv, 2, pages * size, D)
    cut = padded.unflatten(3, (pages, size)).permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
    order = torch.randperm(rows * pages) + 1  # page 0 belongs to nobody
    cache = torch.full((rows * pages + 1, heads, 2, size, dim), float("nan"), dtype=key.dtype)
    cache[order] = cut
    return cache[:, :, 0], cache[:, :, 1], order.view(rows, pages).int()


def expected(case, seed=0):
    """`(B, T, Hq, D)` float64: one query, one head at a time, in complex numbers."""
    (query, key, value, scaling, _, _, _, inv_freq, gain), _ = arguments(
        case.but(block_size=None), seed
    )
    query, key, value, inv_freq, gain = (
        tensor.double().numpy() for tensor in (query, key, value, inv_freq, gain)
    )
    output = np.zeros((len(case.lengths), case.tokens, case.heads, case.dim))
    for row, (length, start) in enumerate(zip(case.lengths, case.starts, strict=True)):
        for token in range(case.tokens):
            own = length - case.tokens + token
            first = start if case.window is None else max(start, own + 1 - case.window)
            if own < first:
                continue
            for head in range(case.heads):
                group = head // (case.heads // case.key_heads)
                keys, values = (states[row, group, first : own + 1] for states in (key, value))
                freq, places = inv_freq[row, token], np.arange(first, own + 1) - start
                turned = np.exp(1j * np.outer(places, freq))
                turned_query = as_complex(query[row, head, token], case)
                turned_query = turned_query * np.exp(1j * (own - start) * freq)
                turned_keys = as_complex(keys, case) * turned
                dots = (turned_keys.conj() * turned_query).real.sum(-1)
                rest = keys[:, 2 * case.pairs :] @ query[row, head, token, 2 * case.pairs :]
                scores = scaling * (gain[row, token] ** 2 * dots + rest)
                weights = np.exp(scores - scores.max())
                output[row, token, head] = weights @ values / weights.sum()
    return torch.from_numpy(output)


def as_complex(states, case):
    rotated = states[..., : 2 * case.pairs]
    if case.interleaved:
        return rotated[..., ::2] + 1j * rotated[..., 1::2]
    return rotated[..., : case.pairs] + 1j * rotated[..., case.pairs :]


# Largest error relative to the largest number of the output. In half precision the output itself
# is rounded to 2^-9 or 2^-12 of each number, and the weights or keys on the way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_right(actual, case, seed=0):
    right = expected(case, seed)
    assert actual.dtype == case.dtype
    assert actual.shape == right.shape
    assert actual.isfinite().all()
    error = ((actual.double() - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()
    assert error <= TOLERANCE[case.dtype], f"relative error {error:.2e}"
    hidden = [
        (row, token)
        for row, (length, start) in enumerate(zip(case.lengths, case.starts, strict=True))
        for token in range(case.tokens)
        if length - case.tokens + token < start
    ]
    for row, token in hidden:
        assert (actual[row, token] == 0).all()


TWO_SCALES = ((1.0, 1.0, 1.5, 1.5, 2.0),)
CASES = [
    Case(),
    *(Case(dim=dim, pairs=dim // 2) for dim in (80, 96, 128, 256)),
    *(Case(pairs=8, interleaved=interleaved) for interleaved in (False, True)),
    Case(dim=80, pairs=16, tokens=3),
    Case(interleaved=True),
    *(Case(heads=heads, key_heads=keys) for heads, keys in ((1, 1), (3, 3), (9, 3), (8, 1))),
    *(Case(tokens=tokens) for tokens in (2, 5, 16)),
    Case(tokens=5, scales=TWO_SCALES),
    Case(tokens=5, scales=TWO_SCALES, window=7),
    Case(tokens=5, scales=TWO_SCALES, block_size=16),
    *(Case(window=window) for window in (1, 5, 36, 37, 38, 1000)),
    Case(window=9, starts=(33,)),
    Case(lengths=(37, 1, 20), starts=(0, 0, 3)),
    Case(lengths=(37, 9), starts=(0, 9)),  # a row of padding alone
    Case(lengths=(37, 5), starts=(0, 30)),
    Case(lengths=(37, 9, 5), starts=(34, 9, 0), tokens=5),
    *(Case(lengths=(37, 9), starts=(4, 2), junk=junk) for junk in (float("nan"), float("inf"))),
    Case(lengths=(37, 9), starts=(4, 2), junk=float("nan"), block_size=16, window=6),
    *(Case(lengths=(37, 9), starts=(4, 2), block_size=size) for size in (8, 16, 32, 128)),
    Case(lengths=(37, 9), starts=(4, 2), strides=True),
    *(Case(dtype=dtype, starts=(2,)) for dtype in (torch.bfloat16, torch.float16)),
]
