"""The kernels in Triton's interpreter, against the oracle: `make test-kernels`."""

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from fused_cases import CASES, Case, arguments, assert_right, expected

from hf_dynyarn.backends import fused, fused_kernels
from hf_dynyarn.backends.fused_triton import LEAST_KEYS, launch, sizes_of, splits_of

NARROW, WIDE = (sizes_of(dim, torch.float32, 1).block_n for dim in (64, 256))
AROUND_TILES = (1, NARROW - 1, NARROW, NARROW + 1)
# Where six processors make three splits for two rows of two heads.
AROUND_SPLITS = tuple(3 * 4 * NARROW + change for change in (-1, 0, 1))


def run(case, processors=6):
    positional, keywords = arguments(case)
    options = (keywords["window"], keywords["interleaved"], keywords.get("block_table"))
    return launch(*positional, *options, processors)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_oracle(case):
    assert_right(run(case), case)


@pytest.mark.parametrize("block_size", [None, 16], ids=["row", "pages"])
@pytest.mark.parametrize("length", AROUND_TILES)
def test_kernels_equal_oracle_around_tiles(length, block_size):
    case = Case(lengths=(length, 1), starts=(0, 0), block_size=block_size, junk=torch.nan, room=70)
    assert_right(run(case), case)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("length", AROUND_SPLITS)
def test_kernels_equal_oracle_around_splits(length, tokens):
    case = Case(lengths=(length, 1), starts=(2, 0), tokens=tokens, junk=torch.inf, room=900)
    assert splits_of(4, length + 900, processors=6) == 3
    assert_right(run(case), case)


@pytest.mark.parametrize("processors", [1, 4, 64])
def test_any_number_of_splits_gives_the_same(processors):
    case = Case(lengths=(700, 40), starts=(3, 0), tokens=2, block_size=32, window=500)
    assert_right(run(case, processors), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 6])
def test_half_precision_with_several_heads_and_tokens(dtype, dim, tokens):
    scales = ((1.0,) * (tokens // 2) + (1.5,) * (tokens - tokens // 2),)
    case = Case((150,), tokens=tokens, heads=8, dim=dim, pairs=dim // 2, dtype=dtype, scales=scales)
    assert_right(run(case), case)


def test_queries_of_several_programs():
    case = Case(lengths=(40, 33), starts=(0, 30), tokens=11, heads=8, key_heads=1)
    assert 2 * sizes_of(64, torch.float32, 88).block_m < 8 * 11
    assert_right(run(case), case)


def test_each_token_at_a_scale_of_its_own():
    scales = (tuple(1 + token / 4 for token in range(8)),)
    case = Case(tokens=8, scales=scales, window=20, interleaved=True)
    assert_right(run(case), case)


def test_same_bits_every_time():
    case = Case(lengths=(700, 40), starts=(3, 0))
    assert torch.equal(run(case), run(case))


def test_room_beyond_the_length_is_not_read():
    case = Case(lengths=(37,), starts=(5,))
    positional, _ = arguments(case)
    wanted = launch(*positional, None, False, None, 6)
    query, key, value, *rest = positional
    for states in (key, value):
        states[:, :, 37:] = torch.nan
        states[:, :, :5] = torch.nan
    assert torch.equal(launch(query, key, value, *rest, None, False, None, 6), wanted)


@triton.jit
def tabulate(distance, inv_freq, cos, sin):
    index = tl.arange(0, 4)
    left, right = tl.load(distance + index), tl.load(inv_freq + index)
    first, second = fused_kernels._cos_sin(left, right)
    tl.store(cos + index, first)
    tl.store(sin + index, second)


def test_cosines_are_exact_far_away():
    """Products that float32 holds: without a GPU's fused operations there are no others."""
    distance = torch.tensor([1.0, 999.0, 65536.0, 131071.0])
    inv_freq = torch.tensor([1.0, 0.5, 2.0**-10, 1.0])
    cos, sin = torch.empty(4), torch.empty(4)
    tabulate[(1,)](distance, inv_freq, cos, sin)
    angle = distance.double() * inv_freq.double()
    assert (cos.double() - angle.cos()).abs().max() < 2e-7
    assert (sin.double() - angle.sin()).abs().max() < 2e-7


def test_operation_runs_the_kernels_where_it_is_told(monkeypatch):
    interpreter.interpret(monkeypatch)
    case = Case(tokens=3, starts=(2,))
    positional, keywords = arguments(case)
    output = fused.decode(*positional, **keywords)
    assert_right(output, case)
    assert torch.equal(output, run(case))


def test_operation_compiles_with_the_kernels(monkeypatch):
    interpreter.interpret(monkeypatch)
    positional, keywords = arguments(Case())
    compiled = torch.compile(fused.decode, backend="aot_eager", fullgraph=True)
    assert_right(compiled(*positional, **keywords), Case())


def test_a_longer_buffer_makes_no_more_splits_than_its_keys_are_worth():
    assert splits_of(8, LEAST_KEYS, 132) == 1
    assert splits_of(8, 131072, 132) == 33
    assert splits_of(1000, 131072, 132) == 1


def test_a_broken_kernel_would_show():
    case = Case(lengths=(37,), starts=(5,))
    positional, _ = arguments(case)
    positional = (*positional[:5], torch.tensor([4]), *positional[6:])
    output = launch(*positional, None, False, None, 6)
    assert (output.double() - expected(case)).abs().max() > 1e-3
