"""Launches the kernels of the fused operation, and says how they are cut."""

import math
from typing import NamedTuple

import torch
import triton

from .fused_kernels import attend, merge

# Programs for each multiprocessor: two that wait for memory in turn.
PROGRAMS = 2
# Below so many keys a split costs more than it gains.
LEAST_KEYS = 256
MERGED_AT_ONCE = 16
ON_AMD = torch.version.hip is not None


class Sizes(NamedTuple):
    """How a kernel is cut."""

    block_m: int  # queries of a program: of all heads of a group, and all tokens
    block_n: int  # keys of a tile
    warps: int
    stages: int


def sizes_of(dim: int, dtype: torch.dtype, queries: int, amd: bool = ON_AMD) -> Sizes:
    """Sizes without spilled registers on sm_80, 90, 100 and gfx942: see `benchmarks/compiled.py`.

    Args:
        dim: of a head.
        dtype: of keys and values.
        queries: of a key head, all tokens together.
        amd: whether for one of AMD's.
    """
    narrow, wide = dim <= 64, dim > 128
    if dtype == torch.float32:  # whose products are sums in registers
        return Sizes(16, 32 if narrow or wide else 16, 4 if narrow else 8, 1 if wide else 2)
    block_m = 16 if queries <= 16 or wide or amd else 32
    if narrow:
        return Sizes(block_m, 64, 4, 2) if block_m == 16 else Sizes(block_m, 128, 8, 2)
    return Sizes(block_m, 32 if wide else 64, 8, 2)


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scale: torch.Tensor,
    inv_freq: torch.Tensor,
    gain: torch.Tensor,
    window: int | None,
    interleaved: bool,
    block_table: torch.Tensor | None,
    processors: int | None = None,
    *,
    splits: int | None = None,
    scratch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs both kernels on the arguments of `fused.decode`, without reading any of them.

    `processors` is how many multiprocessors there are to fill. Default: those of the device. Who
    calls often may say into how many `splits` the keys are cut, and bring `scratch`, of the size
    that `scratch_of` says, and the contiguous result `out`.
    """
    rows, heads, tokens, dim = query.shape
    key_heads, pairs = key.shape[1], inv_freq.shape[-1]
    groups = heads // key_heads
    room = key.shape[2] * (1 if block_table is None else block_table.shape[1])
    sizes = sizes_of(dim, key.dtype, groups * tokens)
    programs = rows * programs_of(heads, key_heads, tokens, sizes)
    splits = splits or splits_of(programs, room, processors or processors_of(query.device))
    lengths, starts, scale, inv_freq, gain = (
        tensor.contiguous() for tensor in (lengths, starts, scale, inv_freq, gain)
    )
    if scratch is None:
        size = scratch_of(rows * heads * tokens, splits, dim)
        scratch = query.new_empty(size, dtype=torch.float32)
    outputs, logs = scratch.tensor_split([rows * heads * tokens * splits * dim])
    result = query.new_empty(rows, tokens, heads, dim) if out is None else out
    width = triton.next_power_of_2(dim)
    attend[programs, splits](
        query,
        key,
        value,
        lengths,
        starts,
        scale,
        inv_freq,
        gain,
        lengths if block_table is None else block_table,
        outputs,
        logs,
        scaling,
        key_heads,
        groups,
        tokens,
        room,
        window or 0,
        splits,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        0 if block_table is None else block_table.stride(0),
        **constants_of(dim, pairs, sizes),
        WINDOWED=window is not None,
        INTERLEAVED=interleaved,
        PAGE=0 if block_table is None else key.shape[2],
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    merge[(rows * heads * tokens,)](
        outputs, logs, result, heads, tokens, splits, DIM=dim, WIDTH=width, AT_ONCE=MERGED_AT_ONCE
    )
    return result


def constants_of(dim: int, pairs: int, sizes: Sizes) -> dict[str, int]:
    """What the kernel is compiled for. A product of matrices has at least 16 of each dimension."""
    rest = dim - 2 * pairs
    return {
        "DIM": dim,
        "PAIRS": pairs,
        "HALF": max(16, triton.next_power_of_2(pairs)),
        "REST": max(16, triton.next_power_of_2(rest)) if rest else 0,
        "WIDTH": triton.next_power_of_2(dim),
        "BLOCK_M": sizes.block_m,
        "BLOCK_N": sizes.block_n,
    }


def programs_of(heads: int, key_heads: int, tokens: int, sizes: Sizes) -> int:
    """Programs for a split of a row."""
    return key_heads * math.ceil(heads // key_heads * tokens / sizes.block_m)


def scratch_of(queries: int, splits: int, dim: int) -> int:
    """Numbers, float32, in the results of all splits of some queries, those of heads apart."""
    return queries * splits * (dim + 1)


def splits_of(programs: int, room: int, processors: int) -> int:
    """Into how many splits the keys of each row are cut, so that a small batch fills the device.

    Rounded down: a few programs too many would keep all others waiting.
    """
    wanted = PROGRAMS * processors // programs
    return max(1, min(wanted, math.ceil(room / LEAST_KEYS)))


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
