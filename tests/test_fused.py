import importlib.util
import re
import subprocess
import sys

import pytest
import torch
from fused_cases import CASES, Case, arguments, assert_right, expected
from torch._dynamo.testing import CompileCounter

from hf_dynyarn.backends import fused
from hf_dynyarn.backends.fused import TILE, decode

# Around one and two tiles of the CPU's version.
LENGTHS = (TILE - 1, TILE, TILE + 1, 2 * TILE + 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_equals_oracle(case):
    positional, keywords = arguments(case)
    assert_right(decode(*positional, **keywords), case)


@pytest.mark.parametrize("block_size", [None, 48], ids=["row", "pages"])
@pytest.mark.parametrize("length", LENGTHS)
def test_decode_equals_oracle_around_tiles(length, block_size):
    case = Case(lengths=(length, 2), starts=(3, 0), tokens=2, block_size=block_size, junk=torch.nan)
    positional, keywords = arguments(case)
    assert_right(decode(*positional, **keywords), case)


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(37, 9), starts=(4, 2), tokens=3),
        Case(window=9, interleaved=True),
        Case(block_size=16, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_operation_keeps_what_torch_asks_of_one(case):
    positional, keywords = arguments(case)
    flat = (*positional, keywords["window"], keywords["interleaved"], keywords.get("block_table"))
    torch.library.opcheck(fused._decode, flat)


@pytest.mark.parametrize("block_size", [None, 16], ids=["row", "pages"])
def test_one_graph_serves_all_lengths_paddings_and_scales(block_size):
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(decode, backend=graphs, fullgraph=True)
    for length, start, scale in ((37, 0, 1.0), (12, 3, 1.0), (1, 0, 2.0), (30, 30, 1.5)):
        case = Case(
            lengths=(length,),
            starts=(start,),
            scales=((scale,),),
            room=40 - length,
            block_size=block_size,
        )
        positional, keywords = arguments(case)
        assert_right(compiled(*positional, **keywords), case)
    assert graphs.frame_count == 1


def test_compiled_with_dynamic_shapes_is_right():
    torch._dynamo.reset()
    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True, dynamic=True)
    for case in (Case(), Case(lengths=(50, 41), starts=(0, 4), tokens=3), Case(room=99)):
        positional, keywords = arguments(case)
        assert_right(compiled(*positional, **keywords), case)


def test_autocast_does_not_reach_inside():
    case = Case()
    positional, keywords = arguments(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_right(decode(*positional, **keywords), case)


def test_arguments_stay_as_they_are():
    positional, keywords = arguments(Case(tokens=3))
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in positional]
    decode(*positional, **keywords)
    for before, after in zip(copies, positional, strict=True):
        assert before is after or torch.equal(before, after)


def test_gpu_without_triton_is_warned_of_once(monkeypatch):
    fused.has_kernels.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="needs Triton, and there is none") as caught:
        ways = [fused.implementation_for("cuda") for _ in range(3)]
    assert not fused.has_kernels("cuda")
    fused.has_kernels.cache_clear()
    assert len(caught) == 1
    assert set(ways) == {fused.implementation_for("cpu")}


def test_only_a_gpu_asks_for_triton():
    assert not fused.has_kernels("cpu")
    code = (
        "import sys, torch, hf_dynyarn.backends.fused as fused;"
        "fused.implementation_for('cpu');"
        "assert not {'hf_dynyarn.backends.fused_triton', 'hf_dynyarn.backends.fused_kernels'} "
        "& set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_far_from_the_begin_only_rounding_of_angles_differs():
    """Tens of thousands of tokens: angles are float32, as everywhere in the package."""
    case = Case(lengths=(20000,), starts=(0,), tokens=2, heads=1, key_heads=1, dim=32, pairs=16)
    positional, keywords = arguments(case)
    output = decode(*positional, **keywords)
    right = expected(case)
    error = (output.double() - right).abs().max() / right.abs().max()
    assert error < 20000 * 2**-24


NAMES = ("query", "key", "value", "scaling", "lengths", "starts", "scale", "inv_freq", "gain")
WRONG = {
    "too many tokens": (
        {"query": torch.zeros(1, 4, 17, 64)},
        ValueError,
        "query must have 1 to 16 tokens of each row, got 17",
    ),
    "no token": ({"query": torch.zeros(1, 4, 0, 64)}, ValueError, "1 to 16 tokens"),
    "three dimensions": ({"query": torch.zeros(1, 4, 64)}, ValueError, "must have 4 dimensions"),
    "head dimension": (
        {name: torch.zeros(1, 4, 1, 320) for name in NAMES[:3]},
        ValueError,
        "at most 256, got 320",
    ),
    "heads": ({"query": torch.zeros(1, 3, 1, 64)}, ValueError, "multiple of the 2 of key, got 3"),
    "rows": (
        {name: torch.zeros(2, 2, 42, 64) for name in ("key", "value")},
        ValueError,
        "must have one shape (1, heads, keys, 64)",
    ),
    "values": ({"value": torch.zeros(1, 2, 41, 64)}, ValueError, "must have one shape"),
    "strides": (
        {"key": torch.zeros(1, 2, 64, 42).transpose(2, 3)},
        ValueError,
        "of key must lie side by side",
    ),
    "dtype": (
        {"query": torch.zeros(1, 4, 1, 64).double()},
        TypeError,
        "query must be of the dtype",
    ),
    "dtypes": (
        {"value": torch.zeros(1, 2, 42, 64).half()},
        TypeError,
        "value must be of the dtype of query",
    ),
    "lengths": ({"lengths": torch.tensor([37.0])}, TypeError, "lengths must be of a dtype"),
    "starts": ({"starts": torch.tensor(0)}, ValueError, "starts must have the shape (1,)"),
    "scale": ({"scale": torch.ones(1)}, ValueError, "scale must have the shape (1, 1)"),
    "frequencies": (
        {"inv_freq": torch.ones(1, 1, 33)},
        ValueError,
        "inv_freq must have a number for each rotated pair, 1 to 32, got 33",
    ),
    "gain": ({"gain": torch.ones(1, 1).half()}, TypeError, "gain must be of a dtype"),
    "window": ({"window": 0}, ValueError, "window must be at least 1 key or None, got 0"),
    "block table": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
        ValueError,
        "block_table must have the shape (1, 3)",
    ),
    "block table's dtype": (
        {"block_table": torch.zeros(1, 3, dtype=torch.int64)},
        TypeError,
        "block_table must be of a dtype of (torch.int32,)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named(wrong):
    changes, error, message = WRONG[wrong]
    positional, keywords = arguments(Case())
    named = {**dict(zip(NAMES, positional, strict=True)), **keywords, **changes}
    with pytest.raises(error, match=re.escape(message)):
        decode(**named)
