"""The kernel that gets prompts their keys: read from pages, turned, and written side by side.

    (1) key'(j) = g (key_2i(j) + i key_2i+1(j)) e^(i f_i j),   value'(j) = value(j)

for the keys `j` of a text and the frequencies `f_i` and gain `g` of some of its queries. `pages.py`
launches it.
"""

import triton
import triton.language as tl

from .fused_kernels import _cos_sin, _load_from, _load_pairs, _places, _turn


@triton.jit
def unpage(
    key,
    value,
    block_table,
    places,  # (pieces, 3): row of the block table, first row of the result, keys
    inv_freq,
    gain,
    keys_out,  # (rows, Hkv, D)
    values_out,  # (rows, Hkv, D)
    key_heads,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_table,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,  # PAIRS, as a power of 2
    REST: tl.constexpr,  # DIM - 2 PAIRS, as a power of 2 or 0
    WIDTH: tl.constexpr,  # DIM, as a power of 2
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,  # keys of a page
):
    """One tile of the keys of one piece, all heads, which share its cosines and sines."""
    piece = tl.program_id(1)
    begin = tl.program_id(0) * BLOCK_N
    row = tl.load(places + piece * 3).to(tl.int64)
    first = tl.load(places + piece * 3 + 1).to(tl.int64)
    count = tl.load(places + piece * 3 + 2)
    if begin < count:
        offset = tl.arange(0, BLOCK_N)
        pair = tl.arange(0, HALF)
        rest = 2 * PAIRS + tl.arange(0, REST if REST > 0 else 1)
        number = tl.arange(0, WIDTH)
        seen = begin + offset < count
        freq = tl.load(inv_freq + piece * PAIRS + pair, mask=pair < PAIRS, other=0.0)
        amplitude = tl.load(gain + piece)
        cos, sin = _cos_sin((begin + offset).to(tl.float32)[:, None], freq[None, :])
        cos *= amplitude
        sin *= amplitude
        table = block_table + row * stride_table
        keys = key + _places(table, begin, seen, stride_kb, stride_kt, BLOCK_N, PAGE)
        values = value + _places(table, begin, seen, stride_vb, stride_vt, BLOCK_N, PAGE)
        target = (first + begin + offset) * key_heads * DIM
        turned = seen[:, None] & (pair < PAIRS)[None, :]
        kept = seen[:, None] & (number < DIM)[None, :]
        for head in range(key_heads):
            first_k, second_k = _load_pairs(keys + head * stride_kh, seen, PAIRS, HALF, INTERLEAVED)
            first_k, second_k = _turn(first_k, second_k, cos, sin)
            out = keys_out + (target + head * DIM)[:, None]
            tl.store(out + pair[None, :], first_k.to(key.dtype.element_ty), mask=turned)
            tl.store(out + (pair + PAIRS)[None, :], second_k.to(key.dtype.element_ty), mask=turned)
            if REST > 0:
                rest_k = _load_from(keys + head * stride_kh, seen, 2 * PAIRS, DIM, REST)
                tl.store(out + rest[None, :], rest_k, mask=seen[:, None] & (rest < DIM)[None, :])
            value_tile = _load_from(values + head * stride_vh, seen, 0, DIM, WIDTH)
            out = values_out + (target + head * DIM)[:, None]
            tl.store(out + number[None, :], value_tile, mask=kept)
