"""The kernel that gets prompts their keys, in Triton's interpreter: `make test-kernels`."""

import interpreter  # noqa: F401, must come before anything that imports Triton
import numpy as np
import pytest
import torch
from fused_cases import in_pages

from hf_dynyarn.backends.pages import rotate_pages, sizes_of

HEADS = 2
TILE = sizes_of(64).block_n


def unpaged(pieces, dim=64, pairs=32, size=16, interleaved=False, dtype=torch.float32, junk=0.0):
    """What the kernel writes for pieces `(text, keys, scale)`, and what an oracle would."""
    torch.manual_seed(0)
    texts, longest = 3, max(keys for _, keys, _ in pieces)
    states = torch.randn(2, texts, HEADS, longest, dim).to(dtype)
    key, value, table = in_pages(*states, size)
    scale = torch.tensor([scale for *_, scale in pieces])
    inv_freq = 10000.0 ** -(torch.arange(pairs) / pairs) / scale[:, None]
    gain = 0.1 * scale.log() + 1
    counts = torch.tensor([keys for _, keys, _ in pieces])
    requests = torch.tensor([text for text, *_ in pieces])
    places = torch.stack((requests, counts.cumsum(0) - counts, counts), 1).int()
    out = torch.full((2, int(counts.sum()) + 1, HEADS, dim), junk, dtype=dtype)
    rotate_pages(key, value, table, places, longest, inv_freq, gain, *out, interleaved)
    expected = [
        (turned(states[0, text, :, :keys], *turn, interleaved), states[1, text, :, :keys].double())
        for (text, keys, _), *turn in zip(pieces, inv_freq, gain, strict=True)
    ]
    expected = [torch.cat(parts, 1).transpose(0, 1) for parts in zip(*expected, strict=True)]
    return out, expected


def turned(keys, inv_freq, gain, interleaved):
    """`(Hkv, n, D)` float64, in complex numbers; the pairs of the result lie apart."""
    pairs = len(inv_freq)
    rotated, rest = keys.double()[..., : 2 * pairs], keys.double()[..., 2 * pairs :]
    if interleaved:
        pair = torch.complex(rotated[..., ::2], rotated[..., 1::2])
    else:
        pair = torch.complex(rotated[..., :pairs], rotated[..., pairs:])
    angles = np.outer(np.arange(keys.shape[1]), inv_freq.double().numpy())
    pair = pair * torch.from_numpy(np.exp(1j * angles)) * gain.double()
    return torch.cat((pair.real, pair.imag, rest), -1)


def assert_right(found, atol=2e-5):
    out, expected = found
    for got, right in zip(out, expected, strict=True):
        torch.testing.assert_close(got[:-1].double(), right, rtol=0, atol=atol)


PIECES = [(1, 40, 1.0), (1, 70, 1.5), (0, 5, 1.0), (2, 61, 2.0)]


@pytest.mark.parametrize("size", [8, 16, 48, 128])
def test_pieces_of_several_texts(size):
    assert_right(unpaged(PIECES, size=size))


@pytest.mark.parametrize("keys", [1, TILE - 1, TILE, TILE + 1])
def test_around_tiles(keys):
    assert_right(unpaged([(0, keys, 1.25), (2, 3, 1.0)]))


@pytest.mark.parametrize("interleaved", [False, True], ids=["apart", "side by side"])
@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (64, 8), (80, 40), (128, 64), (256, 128)])
def test_heads(dim, pairs, interleaved):
    assert_right(unpaged(PIECES, dim, pairs, interleaved=interleaved))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype, atol):
    assert_right(unpaged(PIECES, dtype=dtype), atol)


def test_nothing_is_written_beyond():
    out, _ = unpaged(PIECES, junk=7.0)
    assert (out[:, -1] == 7).all()


def test_values_are_as_they_were():
    out, expected = unpaged(PIECES)
    assert torch.equal(out[1, :-1].double(), expected[1])


def test_a_wrong_scale_would_show():
    out, _ = unpaged(PIECES)
    _, expected = unpaged([(text, keys, scale + 0.1) for text, keys, scale in PIECES])
    with pytest.raises(AssertionError):
        assert_right((out, expected))
