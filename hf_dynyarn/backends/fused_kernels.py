"""The kernels of the fused operation: equations (1) to (3) of `fused.py`, in Triton.

`attend` makes one program for each row, key head, block of its queries and split of the keys,
`merge` one for each query. A split's result is its own softmax and the logarithm of its sum, and

    (4) output = sum_s 2^(l_s - m) o_s / sum_s 2^(l_s - m),  m = max_s l_s

in a fixed order, without atomics: every run gives the same bits. Logarithms are of base 2
throughout, which is what a GPU computes. `fused_triton.py` launches them.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1 / math.log(2))

# pi / 2 in parts, the first two short enough for their product with a count of turns to be exact.
HALF_PI_1 = tl.constexpr(1.5703125)
HALF_PI_2 = tl.constexpr(4.837512969970703125e-4)
HALF_PI_3 = tl.constexpr(7.549789948768648e-8)

MOST_TOKENS = tl.constexpr(16)


@triton.jit
def _cos_sin(distance, inv_freq):
    """Cosine and sine of `distance * inv_freq`, also far from 0.

    The angle is rounded, so what the product loses is added again once whole quarters of a turn
    are taken away. Polynomials of Cephes on the quarter that is left: the functions of the GPU's
    library need memory for large angles.
    """
    angle = distance * inv_freq
    lost = tl.fma(distance, inv_freq, -angle)
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = tl.fma(-quarters, HALF_PI_1, angle)
    x = tl.fma(-quarters, HALF_PI_2, x)
    x = tl.fma(-quarters, HALF_PI_3, x) + lost
    z = x * x
    sin = tl.fma(tl.fma(-1.9515295891e-4, z, 8.3321608736e-3), z, -1.6666654611e-1)
    sin = tl.fma(sin * z, x, x)
    cos = tl.fma(tl.fma(2.443315711809948e-5, z, -1.388731625493765e-3), z, 4.166664568298827e-2)
    cos = tl.fma(cos * z, z, tl.fma(-0.5, z, 1.0))
    quarter = quarters.to(tl.int32)
    swapped = (quarter & 1) != 0
    first = tl.where(swapped, sin, cos)
    second = tl.where(swapped, cos, sin)
    first = tl.where(((quarter + 1) & 2) != 0, -first, first)
    second = tl.where((quarter & 2) != 0, -second, second)
    return first, second


@triton.jit
def _turn(first, second, cos, sin):
    return tl.fma(first, cos, -second * sin), tl.fma(second, cos, first * sin)


@triton.jit
def _load_pairs(
    pointers,  # (N,) to the heads
    seen,  # (N,)
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Both numbers of the rotated pairs of some heads, `(N, HALF)` each, 0 where nothing is."""
    if INTERLEAVED:
        number = tl.arange(0, 2 * HALF)
        mask = seen[:, None] & (number < 2 * PAIRS)[None, :]
        both = tl.load(pointers[:, None] + number[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, [pointers.shape[0], HALF, 2]))
    else:
        pair = tl.arange(0, HALF)
        mask = seen[:, None] & (pair < PAIRS)[None, :]
        first = tl.load(pointers[:, None] + pair[None, :], mask=mask, other=0.0)
        second = tl.load(pointers[:, None] + (pair + PAIRS)[None, :], mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _load_from(
    pointers,  # (N,) to the heads
    seen,  # (N,)
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Numbers `FIRST` to `DIM` of some heads, `(N, WIDTH)`, 0 where nothing is."""
    number = FIRST + tl.arange(0, WIDTH)
    mask = seen[:, None] & (number < DIM)[None, :]
    return tl.load(pointers[:, None] + number[None, :], mask=mask, other=0.0)


@triton.jit
def _places(
    table,
    begin,
    seen,  # (BLOCK_N,)
    stride_b,
    stride_t,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Where the keys from `begin` on lie, from their row's or the pages' begin: `(BLOCK_N,)`."""
    offset = tl.arange(0, BLOCK_N)
    if PAGE > 0:
        page = tl.load(table + (begin + offset) // PAGE, mask=seen, other=0)
        return page.to(tl.int64) * stride_b + (begin + offset) % PAGE * stride_t
    return tl.cast(begin, tl.int64) * stride_t + offset * stride_t


@triton.jit
def _end_of_run(scale, begin, tokens):
    """The first token after `begin` of another scale than the one before it, or `tokens`."""
    token = tl.arange(0, MOST_TOKENS)
    inside = (token > begin) & (token < tokens)
    own = tl.load(scale + token, mask=inside, other=0.0)
    before = tl.load(scale + token - 1, mask=inside, other=0.0)
    return tl.min(tl.where(inside & (own != before), token, tokens), 0)


@triton.jit
def _split(first, last, split, splits, BLOCK_N: tl.constexpr):
    """The share of a split in the keys from `first` to before `last`: whole tiles but the last."""
    tiles = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), BLOCK_N)
    begin = first + split * tiles * BLOCK_N
    return begin, tl.minimum(begin + tiles * BLOCK_N, last)


@triton.jit
def _add_tile(scores, value, peak, total, output):
    """Adds a tile to the running softmax of each query."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # Where no key was seen so far the peak is -inf, and its difference to itself no number.
    finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - finite)
    weights = tl.exp2(scores - finite[:, None])
    total = total * shrink + tl.sum(weights, 1)
    output = output * shrink[:, None]
    output = tl.dot(weights.to(value.dtype), value, acc=output, input_precision="ieee")
    return new_peak, total, output


@triton.jit
def attend(
    query,
    key,
    value,
    lengths,
    starts,
    scale,
    inv_freq,
    gain,
    block_table,
    outputs,  # (B, Hkv, G * T, splits, D) float32
    logs,  # (B, Hkv, G * T, splits) float32
    scaling,
    key_heads,
    groups,
    tokens,
    room,  # keys that a row has room for
    window,
    splits,
    stride_qb,
    stride_qh,
    stride_qt,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,  # keys of a page, or 0
):
    """One row, one key head, one block of its queries, one split of the keys: (1) to (3)."""
    blocks = tl.cdiv(groups * tokens, BLOCK_M)
    row = (tl.program_id(0) // (key_heads * blocks)).to(tl.int64)
    head = tl.program_id(0) // blocks % key_heads
    split = tl.program_id(1)

    index = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    there = index < groups * tokens
    token = index % tokens
    length = tl.load(lengths + row).to(tl.int32)
    start = tl.load(starts + row).to(tl.int32)
    own = length - tokens + token  # the key of each query
    queries = query + row * stride_qb + (head * groups + index // tokens) * stride_qh
    queries += token * stride_qt
    keys = key + head * stride_kh
    values = value + head * stride_vh
    if PAGE == 0:
        keys += row * stride_kb
        values += row * stride_vb
    places = (row * key_heads + head) * groups * tokens + index
    places = places * splits + split
    offset = tl.arange(0, BLOCK_N)
    pair = tl.arange(0, HALF)

    begin = 0
    while begin < tokens:
        end = _end_of_run(scale + row * tokens, begin, tokens)
        newest = length - tokens + begin  # the key of the run's first query
        first = start
        if WINDOWED:
            first = tl.maximum(start, newest + 1 - window)
        last = tl.minimum(length - tokens + end, room)
        from_key, to_key = _split(first, last, split, splits, BLOCK_N)

        turn = row * tokens + begin
        freq = tl.load(inv_freq + turn * PAIRS + pair, mask=pair < PAIRS, other=0.0)
        amplitude = tl.load(gain + turn)
        cos, sin = _cos_sin((token - begin).to(tl.float32)[:, None], freq[None, :])
        first_q, second_q = _load_pairs(queries, there, PAIRS, HALF, INTERLEAVED)
        first_q, second_q = _turn(first_q, second_q, cos, sin)
        # The gain of both goes to the queries, of which there are fewer.
        first_q *= amplitude * amplitude * scaling * LOG2_E
        second_q *= amplitude * amplitude * scaling * LOG2_E
        if REST > 0:
            rest_q = _load_from(queries, there, 2 * PAIRS, DIM, REST).to(tl.float32)
            rest_q = (rest_q * (scaling * LOG2_E)).to(key.dtype.element_ty)
        cos, sin = _cos_sin(offset.to(tl.float32)[:, None], freq[None, :])  # the same for all tiles

        peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        output = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        for tile in range(from_key, to_key, BLOCK_N):
            seen = tile + offset < to_key
            table = block_table + row * stride_table
            k_places = _places(table, tile, seen, stride_kb, stride_kt, BLOCK_N, PAGE)
            v_places = _places(table, tile, seen, stride_vb, stride_vt, BLOCK_N, PAGE)
            first_k, second_k = _load_pairs(keys + k_places, seen, PAIRS, HALF, INTERLEAVED)
            first_k, second_k = _turn(first_k, second_k, cos, sin)
            back_cos, back_sin = _cos_sin((newest - tile).to(tl.float32), freq)
            first_p, second_p = _turn(first_q, second_q, back_cos[None, :], back_sin[None, :])
            scores = tl.dot(
                first_p.to(key.dtype.element_ty),
                tl.trans(first_k.to(key.dtype.element_ty)),
                input_precision="ieee",
            )
            scores = tl.dot(
                second_p.to(key.dtype.element_ty),
                tl.trans(second_k.to(key.dtype.element_ty)),
                acc=scores,
                input_precision="ieee",
            )
            if REST > 0:
                rest_k = _load_from(keys + k_places, seen, 2 * PAIRS, DIM, REST)
                scores = tl.dot(rest_q, tl.trans(rest_k), acc=scores, input_precision="ieee")
            visible = (tile + offset)[None, :] < tl.minimum(own + 1, to_key)[:, None]
            if WINDOWED:
                visible &= (tile + offset)[None, :] > (own - window)[:, None]
            scores = tl.where(visible, scores, -float("inf"))
            value_tile = _load_from(values + v_places, seen, 0, DIM, WIDTH)
            peak, total, output = _add_tile(scores, value_tile, peak, total, output)

        member = there & (token >= begin) & (token < end)
        empty = total == 0.0
        log = tl.where(empty, -float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(logs + places, log, mask=member)
        number = tl.arange(0, WIDTH)
        tl.store(
            outputs + places[:, None] * DIM + number[None, :],
            output / tl.where(empty, 1.0, total)[:, None],
            mask=(member & ~empty)[:, None] & (number < DIM)[None, :],
        )
        begin = end


@triton.jit
def merge(
    outputs,  # (B, Hkv, G * T, splits, D) float32
    logs,  # (B, Hkv, G * T, splits) float32
    result,  # (B, T, Hq, D)
    heads,
    tokens,
    splits,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One query: (4)."""
    index = tl.program_id(0).to(tl.int64)  # of a query, in the order of `outputs`
    row = index // (heads * tokens)
    head = index // tokens % heads
    token = index % tokens
    number = tl.arange(0, WIDTH)
    peak = -float("inf")
    total = 0.0
    output = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, splits, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)
        log = tl.load(logs + index * splits + split, mask=split < splits, other=-float("inf"))
        new_peak = tl.maximum(peak, tl.max(log, 0))
        finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        # What a split without keys left in its place may be anything.
        filled = log != -float("inf")
        part = tl.load(
            outputs + (index * splits + split)[:, None] * DIM + number[None, :],
            mask=filled[:, None] & (number < DIM)[None, :],
            other=0.0,
        )
        weight = tl.exp2(log - finite)
        shrink = tl.exp2(peak - finite)
        total = total * shrink + tl.sum(weight, 0)
        output = output * shrink + tl.sum(part * weight[:, None], 0)
        peak = new_peak
    output = output / tl.where(total == 0.0, 1.0, total)
    place = (row * tokens + token) * heads + head
    tl.store(result + place * DIM + number, output.to(result.dtype.element_ty), mask=number < DIM)
