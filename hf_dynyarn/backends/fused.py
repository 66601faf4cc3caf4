"""Decoding over un-rotated keys in one pass: keys are turned while they are read, never written.

With query `t` of a row at position `p_t`, key `j` at position `j - start`, frequencies `f_i` and
gain `g` of the query's scale, pairs of numbers of a head as complex numbers:

    (1) score(t, j)  = scaling (g^2 Re sum_i q_i conj(k_ji) e^(i f_i (p_t - (j - start))) + rest)
    (2) p - position = (p - base) - (position - base)
    (3) output(t)    = sum_j softmax_j(score(t, j)) v_j

`rest` are the numbers of a head that are not rotated, which have no gain. By (2) the keys of a tile
are turned by their offsets from the tile's first key, the same for all tiles, and the few queries
are turned back to it. So there is no table of the length of the text, and angles are small where
it counts: among neighbours.

One operation of `torch.library` with an implementation in torch for the CPU, below, and one in
Triton for GPUs. It reads nothing back to the host on a GPU, so that a graph can hold it.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator

import torch

from ..rope import rotary_tables, rotate

MOST_QUERIES = 16
MOST_NUMBERS = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Keys that the CPU rotates at a time: what is rotated stays in a core's own cache.
TILE = 1024


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scale: torch.Tensor,
    inv_freq: torch.Tensor,
    gain: torch.Tensor,
    *,
    window: int | None = None,
    interleaved: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends for the newest tokens of each row: equations (1) and (3).

    Query `t` of a row is at key `lengths - T + t`, and sees the keys from `starts` to that one.
    Nothing that lies elsewhere in the buffers matters, not even if it is no number. Not
    differentiable.

    Args:
        query: `(B, Hq, T, D)`, un-rotated, 1 to 16 tokens of each row, `D` at most 256.
        key: `(B, Hkv, L, D)`, un-rotated, of any strides but for the last, which is 1. With a block
            table pages `(blocks, Hkv, block_size, D)`.
        value: as `key`.
        scaling: factor on the logits.
        lengths: keys of each row, those of the queries included: `(B,)` int32 or int64.
        starts: padding on the left of each row, the key at position 0: `(B,)` int32 or int64.
        scale: of each query, `(B, T)`. Neighbours of the same scale share a rotation of the keys,
            and must have the same frequencies and gain; each further scale reads the keys again.
        inv_freq: frequencies at these scales, radians per token, `(B, T, R)` float32: the first
            `2R <= D` numbers of a head are rotated.
        gain: on the cosines and sines of both queries and keys, `(B, T)` float32.
        window: how many keys a query sees, itself included. Default: all.
        interleaved: whether the pairs of a head are `(2i, 2i + 1)`, not `(i, i + R)`.
        block_table: where the pages of each row are, in order: `(B, most pages of a row)` int32.

    Returns:
        `(B, T, Hq, D)`, contiguous, of the dtype of `query`. Zeros for a query that sees no key
        (one of the padding).

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: a tensor has the wrong shape or strides, or `window` is below 1.
    """
    _check_states(query, key, value, paged=block_table is not None)
    _check_rows(query, lengths, starts, scale, inv_freq, gain, block_table)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key or None, got {window}.")
    output: torch.Tensor = _decode(
        query,
        key,
        value,
        scaling,
        lengths,
        starts,
        scale,
        inv_freq,
        gain,
        window,
        interleaved,
        block_table,
    )
    return output


def _check_states(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paged: bool) -> None:
    for name, states in (("query", query), ("key", key), ("value", value)):
        if states.dtype not in DTYPES or states.dtype != query.dtype:
            raise TypeError(
                f"{name} must be of the dtype of query, one of {DTYPES}, got {states.dtype}. "
                "Convert it."
            )
        if states.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (rows or pages, heads, tokens, head dimension), "
                f"got {tuple(states.shape)}."
            )
    rows, heads, tokens, dim = query.shape
    if not 1 <= tokens <= MOST_QUERIES:
        raise ValueError(
            f"query must have 1 to {MOST_QUERIES} tokens of each row, got {tokens}. "
            "Rotate the keys once for a longer run, and call an attention kernel."
        )
    if dim > MOST_NUMBERS:
        raise ValueError(f"the head dimension must be at most {MOST_NUMBERS}, got {dim}.")
    key_heads = key.shape[1]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"the heads of query must be a multiple of the {key_heads} of key, got {heads}."
        )
    if key.shape != value.shape or key.shape[3] != dim or (not paged and len(key) != rows):
        first = "pages" if paged else rows
        raise ValueError(
            f"key and value must have one shape ({first}, heads, keys, {dim}), got "
            f"{tuple(key.shape)} and {tuple(value.shape)}."
        )
    for name, states in (("query", query), ("key", key), ("value", value)):
        if states.stride(3) != 1:
            raise ValueError(
                f"the numbers of a head of {name} must lie side by side, got strides "
                f"{states.stride()}. Call {name}.contiguous() first."
            )


def _check_rows(
    query: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scale: torch.Tensor,
    inv_freq: torch.Tensor,
    gain: torch.Tensor,
    block_table: torch.Tensor | None,
) -> None:
    rows, _, tokens, dim = query.shape
    integers, floats = (torch.int32, torch.int64), (torch.float32, torch.float64)
    pairs = inv_freq.shape[-1]
    expected = [
        ("lengths", lengths, (rows,), integers),
        ("starts", starts, (rows,), integers),
        ("scale", scale, (rows, tokens), floats),
        ("inv_freq", inv_freq, (rows, tokens, pairs), (torch.float32,)),
        ("gain", gain, (rows, tokens), (torch.float32,)),
    ]
    if block_table is not None:
        expected.append(("block_table", block_table, (rows, block_table.shape[-1]), (torch.int32,)))
    for name, tensor, shape, dtypes in expected:
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be of a dtype of {dtypes}, got {tensor.dtype}.")
        if tensor.shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(tensor.shape)}.")
    if not 1 <= pairs <= dim // 2:
        raise ValueError(
            f"inv_freq must have a number for each rotated pair, 1 to {dim // 2}, got {pairs}."
        )


@torch.library.custom_op("hf_dynyarn::decode", mutates_args=(), device_types=("cpu", "cuda"))
def _decode(
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
) -> torch.Tensor:
    return implementation_for(query.device.type)(
        query,
        key,
        value,
        scaling,
        lengths,
        starts,
        scale,
        inv_freq,
        gain,
        window,
        interleaved,
        block_table,
    )


@_decode.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    rows, heads, tokens, dim = query.shape
    return query.new_empty(rows, tokens, heads, dim)


def takes(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `decode` has such keys and values, `(B, Hkv, L, D)` each."""
    return key.dtype == value.dtype and key.dtype in DTYPES and key.shape[-1] <= MOST_NUMBERS


def implementation_for(device_type: str) -> Callable[..., torch.Tensor]:
    """What computes the operation on tensors of a device.

    Looked up at each call. To run the kernels on a CPU, in Triton's interpreter, put a function
    that returns `fused_triton.launch` in its place: `tests/interpreter.py` does.
    """
    if device_type == "cpu" or not has_kernels(device_type):
        return _by_tiles
    from .fused_triton import launch

    return launch


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Whether the operation is one fused kernel on a device; warns, once, where a GPU lacks it."""
    if device_type != "cuda":
        return False
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "decoding over un-rotated keys on a GPU needs Triton, and there is none: torch does it, "
        "many times slower and waiting for the device in each layer. pip install triton.",
        stacklevel=2,
    )
    return False


def _by_tiles(
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
) -> torch.Tensor:
    """The naive version, which the oracle judges beside the kernels: row by row, scale by scale."""
    rows, heads, tokens, dim = query.shape
    apart = query.reshape(rows, key.shape[1], -1, tokens, dim)  # (B, Hkv, G, T, D)
    output = query.new_zeros(rows, tokens, heads, dim)
    with torch.autocast(query.device.type, enabled=False):
        for row in range(rows):
            length, padding = int(lengths[row]), int(starts[row])
            own = length - tokens  # the key of the first query
            for begin, end in _runs(scale[row].tolist(), max(0, padding - own)):
                first = padding if window is None else max(padding, own + begin + 1 - window)
                place = row if block_table is None else block_table[row]
                reader = _Reader(key, value, place, first, own + end)
                turn = (inv_freq[row, begin], gain[row, begin], scaling, interleaved)
                attended = _attend(apart[row, :, :, begin:end].float(), reader, window, *turn)
                output[row, begin:end] = attended
    return output


def _runs(scales: list[float], first: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of equal scales from `first` on."""
    begin = first
    for end in range(first + 1, len(scales) + 1):
        if end == len(scales) or scales[end] != scales[begin]:
            yield begin, end
            begin = end


class _Reader:
    """The keys of a row from `first` to before `last`, wherever they lie.

    Args:
        key: as `decode` takes it.
        value: as `decode` takes it.
        place: which row, or which pages.
        first: the first key.
        last: the key after the last one.
    """

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        place: int | torch.Tensor,
        first: int,
        last: int,
    ) -> None:
        self._key, self._value, self._place = key, value, place
        self.first, self.last = first, last

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each tile."""
        for begin in range(self.first, self.last, TILE):
            yield begin, min(begin + TILE, self.last)

    def keys(self, begin: int, end: int) -> torch.Tensor:
        """`(1, Hkv, end - begin, D)`."""
        return self._read(self._key, begin, end)[None]

    def values(self, begin: int, end: int) -> torch.Tensor:
        """`(Hkv, end - begin, D)`."""
        return self._read(self._value, begin, end)

    def _read(self, states: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        if isinstance(self._place, int):
            return states[self._place, :, begin:end]
        size = states.shape[2]
        pages = states[self._place[begin // size : -(-end // size)]]  # (pages, Hkv, size, D)
        together = pages.transpose(0, 1).flatten(1, 2)
        return together[:, begin % size :][:, : end - begin]


def _attend(
    query: torch.Tensor,
    reader: _Reader,
    window: int | None,
    inv_freq: torch.Tensor,
    gain: torch.Tensor,
    scaling: float,
    interleaved: bool,
) -> torch.Tensor:
    """Attends for a run of queries of one scale, at the last of the keys: `(N, Hq, D)` float32.

    Args:
        query: `(Hkv, G, N, D)` float32.
        reader: of all keys that one of them sees.
        window: how many of them each sees.
        inv_freq: `(R,)`.
        gain: a number.
        scaling: factor on the logits.
        interleaved: whether pairs lie side by side.
    """
    heads, groups, count, dim = query.shape
    frequencies, one = inv_freq[None], gain.new_ones(1)
    keys = reader.last - reader.first
    places = torch.arange(keys, device=query.device)
    # The gain of both goes to the queries, of which there are fewer.
    offsets = rotary_tables(places[None, :TILE], frequencies, one, torch.float32)
    scores = query.new_empty(heads, groups * count, keys)
    rotated = query.new_empty(1, heads, min(TILE, keys), dim)
    for begin, end in reader.tiles():
        back = places[-count:] + (reader.first - begin)
        tables = rotary_tables(back[None], frequencies, gain.square()[None], torch.float32)
        queries = rotate(query, *tables, interleaved=interleaved).flatten(1, 2)
        cos, sin = (table[:, : end - begin] for table in offsets)
        turned = rotated[:, :, : end - begin]
        rotate(reader.keys(begin, end).float(), cos, sin, interleaved, out=turned)
        scores[..., begin - reader.first : end - reader.first] = queries @ turned[0].mT
    scores *= scaling
    if count > 1:
        own = places[-count:, None]
        hidden = places > own
        if window is not None:
            hidden |= places <= own - window
        scores.unflatten(1, (groups, count)).masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1)
    output = query.new_zeros(heads, groups * count, dim)
    for begin, end in reader.tiles():
        part = weights[..., begin - reader.first : end - reader.first]
        output += part @ reader.values(begin, end).float()
    return output.view(heads * groups, count, dim).transpose(0, 1)
