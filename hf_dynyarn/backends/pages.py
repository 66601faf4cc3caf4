"""Launches the kernel that rotates keys straight from their pages into a scratch."""

import torch
import triton

from .fused_triton import Sizes, constants_of
from .page_kernels import unpage


def sizes_of(dim: int) -> Sizes:
    """Sizes without spilled registers, whatever the dtype: see `benchmarks/compiled.py`."""
    return Sizes(1, 16, 8, 1) if dim > 64 else Sizes(1, 32, 4, 1)


def rotate_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor,
    places: torch.Tensor,
    longest: int,
    inv_freq: torch.Tensor,
    gain: torch.Tensor,
    keys_out: torch.Tensor,
    values_out: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """Writes rotated keys, and values as they are, side by side, for pieces of some texts.

    Args:
        key: pages `(blocks, Hkv, block_size, D)`, un-rotated, of any strides but for the last.
        value: as `key`.
        block_table: where the pages of each text are, in order: `(texts, most pages)` int32.
        places: of each piece: its row in the block table, the first row of its keys in the result,
            and how many keys it has, from position 0 on: `(pieces, 3)` int32.
        longest: most keys of a piece.
        inv_freq: frequencies for each piece, radians per token, `(pieces, R)` float32.
        gain: on cosines and sines, `(pieces,)` float32.
        keys_out: `(rows, Hkv, D)`, contiguous; pairs are written as `(i, i + R)` in any case.
        values_out: `(rows, Hkv, D)`, contiguous.
        interleaved: whether pairs lie side by side in `key`.
    """
    dim, pairs = key.shape[3], inv_freq.shape[-1]
    sizes = sizes_of(dim)
    constants = constants_of(dim, pairs, sizes)
    del constants["BLOCK_M"]
    unpage[triton.cdiv(longest, sizes.block_n), len(places)](
        key,
        value,
        block_table,
        places,
        inv_freq,
        gain,
        keys_out,
        values_out,
        key.shape[1],
        *key.stride()[:3],
        *value.stride()[:3],
        block_table.stride(0),
        **constants,
        INTERLEAVED=interleaved,
        PAGE=key.shape[2],
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
