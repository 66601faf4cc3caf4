"""What becomes of the kernels on GPUs that are not there: `make test-kernels`."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from compiled import (
    AMD,
    GRID,
    NVIDIA,
    SHARED,
    VARIANTS,
    Kernel,
    compile_kernel,
    compile_merge,
    compile_unpage,
    instructions,
)
from cost import DEVICES, copied, fused, rotated


def of(kernel):
    ways = [name for name in ("interleaved", "windowed") if getattr(kernel, name)]
    ways += [f"pages{kernel.page}"] if kernel.page else []
    dtype = str(kernel.dtype).removeprefix("torch.")
    return "-".join([f"{kernel.dim}", f"{kernel.pairs}", dtype, f"{kernel.queries}", *ways])


# Heads of 80 and 96 are padded to 128; `make kernels` compiles these too.
TESTED = [one for one in GRID if one.dim in (64, 128, 256) and one.dtype != torch.float16]


@pytest.mark.parametrize("architecture", SHARED)
@pytest.mark.parametrize("kernel", dict.fromkeys([*TESTED, *VARIANTS]), ids=of)
def test_nothing_spills_and_shared_memory_fits(kernel, architecture):
    built = compile_kernel(kernel, architecture)
    assert built.spilled == 0
    assert built.shared <= SHARED[architecture]
    assert 0 < built.registers <= (512 if architecture == AMD else 255)
    assert architecture == AMD or built.tile > 100


@pytest.mark.parametrize("architecture", NVIDIA)
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_merging_spills_nothing(dim, architecture):
    built = compile_merge(dim, torch.bfloat16, architecture)
    assert built.spilled == 0
    assert built.shared <= SHARED[architecture]


@pytest.mark.parametrize("architecture", NVIDIA)
@pytest.mark.parametrize("interleaved", [False, True], ids=["apart", "side by side"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (80, 16), (128, 64), (128, 32), (256, 128)])
def test_rotating_pages_spills_nothing(dim, pairs, dtype, interleaved, architecture):
    built = compile_unpage(Kernel(dim, pairs, dtype, 1, interleaved, page=16), architecture)
    assert built.spilled == 0
    assert built.shared <= SHARED[architecture]
    assert built.registers <= 255


def test_sizes_that_are_too_large_would_show(monkeypatch):
    import compiled

    kernel = next(one for one in GRID if one.dim == 256)
    large = kernel.sizes("sm_90")._replace(block_m=32, block_n=64, warps=4)
    monkeypatch.setattr(compiled, "sizes_of", lambda *_, **__: large)
    assert compile_kernel(kernel, "sm_90").spilled > 0


LISTING = """
.L_x_0:
        /*0000*/ MOV R1, R2 ;
.L_x_1:
        /*0010*/ FFMA R1, R2, R3, R4 ;
        /*0020*/ MUFU.EX2 R1, R2 ;
        /*0030*/ @P0 BRA `(.L_x_1) ;
        /*0040*/ @P1 BRA `(.L_x_0) ;
        /*0050*/ BRA `(.L_x_2) ;
.L_x_2:
        /*0060*/ EXIT ;
"""


def test_the_loop_over_tiles_is_counted():
    assert instructions(LISTING) == (7, 3)


def test_costs_are_those_of_a_sheet_of_paper():
    device = DEVICES["H200"]
    alone = rotated(device, 131072, 1)
    # 32 layers, 8 heads, 131,072 keys and values, 128 numbers of 2 bytes, at 4.8 TB/s.
    assert alone.total == pytest.approx(32 * 8 * 131072 * 2 * 256 / 4.8e12 * 1e3)
    assert copied(device, 131072, 1).total == pytest.approx(alone.total * (1 + 1 / 256))
    free = fused(device, 131072, 1, per_key=0, once=0)
    assert alone.total < free.total < 1.01 * alone.total
    dear = fused(device, 131072, 16, per_key=1000, once=0)
    # 16 times 8 heads, 1,000 instructions for each key, four a tick in each of 132 processors.
    assert dear.total == pytest.approx(32 * 128 * 131072 * 1000 / (132 * 4 * device.clock) * 1e3)
