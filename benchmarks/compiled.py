"""Compiles the fused operation's kernels for GPUs that are not there, and counts what came out.

    python benchmarks/compiled.py          appends to results/kernels.csv: `make kernels`

For each size of head and type of number, and each architecture: registers of a thread, bytes that
it keeps in memory for want of registers, shared memory of a program, and instructions of a warp for
a key. Of these `cost.py` computes what a decoding step would take. Needs Triton 3.9, not a GPU.
(Not called `kernels.py`, which transformers would take for the library of that name.)
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from cost import step_costs
from triton.backends.compiler import GPUTarget

from hf_dynyarn.backends import fused_kernels, page_kernels, pages
from hf_dynyarn.backends.fused_triton import MERGED_AT_ONCE, Sizes, constants_of, sizes_of

NVIDIA = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
AMD = "gfx942"
# Shared memory that a program may have, in bytes.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, AMD: 64 * 1024}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SPELLED = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Kernel(NamedTuple):
    """One kernel to compile."""

    dim: int
    pairs: int
    dtype: torch.dtype
    queries: int  # of a key head
    interleaved: bool = False
    windowed: bool = False
    page: int = 0

    def sizes(self, architecture: str) -> Sizes:
        return sizes_of(self.dim, self.dtype, self.queries, amd=architecture == AMD)


GRID = [
    Kernel(dim, dim // 2, dtype, queries)
    for dim in (64, 80, 96, 128, 256)
    for dtype in SPELLED
    for queries in (16, 32)
]
# What is read in another way: side by side, in pages, a part of a head.
VARIANTS = [
    *(Kernel(dim, dim // 2, torch.bfloat16, 16, page=16) for dim in (64, 128, 256)),
    *(Kernel(dim, dim // 2, torch.bfloat16, 32, True, True, 16) for dim in (64, 128, 256)),
    *(Kernel(dim, dim // 2, torch.float32, 16, True, True, 16) for dim in (64, 128, 256)),
    *(Kernel(dim, pairs, torch.bfloat16, 16) for dim, pairs in ((80, 16), (128, 32), (256, 32))),
]


class Compiled(NamedTuple):
    """What became of a kernel. Instructions are not counted for AMD."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    tile: int = 0  # instructions of a warp for a tile
    once: int = 0  # instructions of a warp besides


def compile_kernel(kernel: Kernel, architecture: str) -> Compiled:
    """Compiles `attend` for an architecture."""
    sizes = kernel.sizes(architecture)
    if architecture == AMD:
        target = GPUTarget("hip", architecture, 64)
    else:
        target = GPUTarget("cuda", NVIDIA[architecture], 32)
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    built = triton.compile(source_of(kernel, sizes), target=target, options=options)
    if architecture == AMD:
        names = ("vgpr_count", "private_segment_fixed_size")
        found = [re.search(rf"\.{name}:\s+(\d+)", built.asm["amdgcn"]) for name in names]
        registers, spilled = (int(one[1]) for one in found)
        return Compiled(registers, spilled, built.metadata.shared)
    return measured(built.asm["cubin"], built.metadata.shared)


def compile_merge(dim: int, dtype: torch.dtype, architecture: str) -> Compiled:
    """Compiles `merge` for an architecture of NVIDIA's."""
    constants = {"DIM": dim, "WIDTH": triton.next_power_of_2(dim), "AT_ONCE": MERGED_AT_ONCE}
    names = fused_kernels.merge.arg_names
    types = dict.fromkeys(("outputs", "logs"), "*fp32") | {"result": f"*{SPELLED[dtype]}"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    source = triton.compiler.ASTSource(fused_kernels.merge, signature, constants)
    built = triton.compile(source, target=GPUTarget("cuda", NVIDIA[architecture], 32))
    return measured(built.asm["cubin"], built.metadata.shared)


def compile_unpage(kernel: Kernel, architecture: str) -> Compiled:
    """Compiles `unpage`, which vLLM's prompts go through, for an architecture of NVIDIA's."""
    sizes = pages.sizes_of(kernel.dim)
    constants = constants_of(kernel.dim, kernel.pairs, sizes) | {
        "INTERLEAVED": kernel.interleaved,
        "PAGE": kernel.page,
    }
    del constants["BLOCK_M"]
    names = page_kernels.unpage.arg_names
    states = ("key", "value", "keys_out", "values_out")
    types = dict.fromkeys(states, f"*{SPELLED[kernel.dtype]}")
    types |= dict.fromkeys(("block_table", "places"), "*i32")
    types |= dict.fromkeys(("inv_freq", "gain"), "*fp32")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name.startswith(("stride_k", "stride_v"))
    }
    source = triton.compiler.ASTSource(page_kernels.unpage, signature, constants, attributes)
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    target = GPUTarget("cuda", NVIDIA[architecture], 32)
    built = triton.compile(source, target=target, options=options)
    return measured(built.asm["cubin"], built.metadata.shared)


def source_of(kernel: Kernel, sizes: Sizes) -> triton.compiler.ASTSource:
    """The kernel with the types and constants that a call would find."""
    constants = constants_of(kernel.dim, kernel.pairs, sizes) | {
        "WINDOWED": kernel.windowed,
        "INTERLEAVED": kernel.interleaved,
        "PAGE": kernel.page,
    }
    names = fused_kernels.attend.arg_names
    number = f"*{SPELLED[kernel.dtype]}"
    types = {"query": number, "key": number, "value": number, "scaling": "fp32"}
    types |= dict.fromkeys(("lengths", "starts"), "*i64") | {"block_table": "*i32"}
    types |= dict.fromkeys(("scale", "inv_freq", "gain", "outputs", "logs"), "*fp32")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    # What Triton finds out about a call: pointers are aligned, and strides whole heads.
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name.startswith(("stride_q", "stride_k", "stride_v"))
    }
    return triton.compiler.ASTSource(fused_kernels.attend, signature, constants, attributes)


def measured(cubin: bytes, shared: int) -> Compiled:
    """Reads a binary with NVIDIA's tools."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        listing = tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    registers, stack, local = (int(number) for number in found.groups())
    every, tile = instructions(listing)
    return Compiled(registers, stack + local, shared, tile, every - tile)


def tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(listing: str) -> tuple[int, int]:
    """How many there are, and how many in the loop over tiles: the shortest one that multiplies."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/\s", line):
            lines.append(line)
            branch = re.search(r"BRA[^;]*`\((\.L_x_\d+)\)", line)
            if branch and branch[1] in labels:
                loops.append(lines[labels[branch[1]] :])
    # The loop over a softmax's keys is the only one with exponentials; a kernel may have none.
    over_tiles = [loop for loop in loops if any("MUFU.EX2" in one for one in loop)]
    return len(lines), min((len(loop) for loop in over_tiles), default=0)


def rows_of_kernel(kernel: Kernel, architecture: str) -> list[dict]:
    """A row for each quantity."""
    from common import row

    sizes, built = kernel.sizes(architecture), compile_kernel(kernel, architecture)
    quantities = {
        "registers": (built.registers, "of a thread"),
        "spilled": (built.spilled, "bytes of a thread"),
        "shared memory": (built.shared, "bytes of a program"),
    }
    if built.tile:
        per_key = built.tile * sizes.warps / sizes.block_n
        quantities["instructions"] = (per_key, "of a warp for a key")
        quantities["instructions once"] = (built.once * sizes.warps, "of a program")
    part = "" if 2 * kernel.pairs == kernel.dim else f", {2 * kernel.pairs} rotated"
    ways = [name for name in ("interleaved", "windowed") if getattr(kernel, name)]
    ways += [f"pages of {kernel.page}"] if kernel.page else []
    return [
        row(
            ", ".join([f"{sizes.block_m} queries", *ways]),
            [value],
            model=f"heads of {kernel.dim}{part}",
            tokens=sizes.block_n,
            batch=1,
            dtype=str(kernel.dtype).removeprefix("torch."),
            quantity=quantity,
            unit=unit,
            device=architecture,
            note=f"compiled, not run; {sizes.warps} warps, {sizes.stages} stages",
        )
        for quantity, (value, unit) in quantities.items()
    ]


if __name__ == "__main__":
    from common import save

    for kernel in dict.fromkeys([*GRID, *VARIANTS]):
        for architecture in SHARED:
            save("kernels", rows_of_kernel(kernel, architecture), threads="")
    llama = Kernel(128, 64, torch.bfloat16, 4)
    for device, architecture in (("H200", "sm_90"), ("A100", "sm_80")):
        built, sizes = compile_kernel(llama, architecture), llama.sizes(architecture)
        per_key = built.tile * sizes.warps / sizes.block_n
        save("kernels", step_costs(device, per_key, built.once * sizes.warps), threads="")
