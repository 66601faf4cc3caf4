"""Compiles the fused operation's kernels for GPUs that are not there, and counts what came out.

    python benchmarks/kernels.py           appends to results/kernels.csv: `make kernels`

Of each size of head and type of number that `sizes_of` knows, for each architecture: registers of a
thread, bytes that it keeps in memory for want of registers, shared memory of a program, and machine
instructions of the loop over tiles. From these `cost.py` computes what a decoding step would take.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from hf_dynyarn.backends import fused_kernels
from hf_dynyarn.backends.fused_triton import Sizes, constants_of, sizes_of

# Shared memory that a program may have, in bytes.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
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

    def sizes(self) -> Sizes:
        return sizes_of(self.dim, self.dtype, self.queries)


class Compiled(NamedTuple):
    """What became of it."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    instructions: int  # of a warp in the loop, for a tile
    products: int  # those of them for the tensor cores


def compile_kernel(kernel: Kernel, capability: int, sizes: Sizes | None = None) -> Compiled:
    """Compiles `attend` for an architecture."""
    sizes = sizes or kernel.sizes()
    constants = constants_of(kernel.dim, kernel.pairs, sizes) | {
        "WINDOWED": kernel.windowed,
        "INTERLEAVED": kernel.interleaved,
        "PAGE": kernel.page,
    }
    function = fused_kernels.attend
    number = f"*{SPELLED[kernel.dtype]}"
    types = {"query": number, "key": number, "value": number, "scaling": "fp32"}
    types |= dict.fromkeys(("lengths", "starts"), "*i64") | {"block_table": "*i32"}
    types |= dict.fromkeys(("scale", "inv_freq", "gain", "outputs", "logs"), "*fp32")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    # What Triton finds out of the arguments of a call: aligned pointers, strides of whole heads.
    aligned = [
        name
        for name in function.arg_names
        if signature[name].startswith("*") or name.startswith(("stride_q", "stride_k", "stride_v"))
    ]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    built = triton.compile(source, target=target, options=options)
    return measured(built.asm["cubin"], built.metadata.shared)


def measured(cubin: bytes, shared: int) -> Compiled:
    """Reads a binary with NVIDIA's tools."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        listing = tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    registers, stack, local = (int(number) for number in found.groups())
    loop = inner_loop(listing)
    products = sum("MMA" in line for line in loop)
    return Compiled(registers, stack + local, shared, len(loop), products)


def tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def inner_loop(listing: str) -> list[str]:
    """The instructions of the shortest loop that multiplies matrices."""
    lines, labels, loops = [], {}, []
    for line in listing.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/\s", line):
            branch = re.search(r"BRA[^;]*`\((\.L_x_\d+)\)", line)
            lines.append(line)
            if branch and branch[1] in labels:
                loops.append(lines[labels[branch[1]] :])
    multiply = [loop for loop in loops if any("MMA" in one or "FFMA" in one for one in loop)]
    return min((loop for loop in multiply if len(loop) > 100), key=len)
