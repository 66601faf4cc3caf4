"""What the attention of a decoding step would take on a GPU: computed, not measured.

A kernel takes the longer of reading its bytes at the device's bandwidth and issuing its
instructions, one of a warp for each of the four schedulers of a multiprocessor at every tick. Both
at the vendor's peak, and without what a launch costs: no kernel can be faster, real ones reach 70
to 90 % of the bandwidth. Attention over rotated keys is taken to need bytes alone. The rotated copy
is that, and once in `rescale_every` tokens all keys are read and written again.
"""

from typing import NamedTuple

from hf_dynyarn.backends.fused_triton import splits_of


class Device(NamedTuple):
    """From the vendor's data sheet."""

    bandwidth: float  # bytes per second
    processors: int
    clock: float  # ticks per second, of its rate of float32 operations


DEVICES = {
    "H200": Device(4.8e12, 132, 67e12 / (132 * 128 * 2)),
    "A100": Device(2.039e12, 108, 19.5e12 / (108 * 64 * 2)),  # SXM, 80 GB
}
SCHEDULERS = 4

# Llama-3.1-8B's shape, bfloat16. Its window, were it the 8,192 tokens that its config stretches.
LAYERS, KEY_HEADS, GROUPS, DIM, NUMBER = 32, 8, 4, 128, 2
RESCALE_EVERY = 8192 // 32
LENGTHS, BATCHES = (8192, 32768, 131072), (1, 16)


class Cost(NamedTuple):
    """Milliseconds of the attention of all layers."""

    bytes: float
    instructions: float = 0.0

    @property
    def total(self) -> float:
        return max(self)


def fused(device: Device, tokens: int, batch: int, per_key: float, once: float) -> Cost:
    """The fused kernels.

    Args:
        device: where.
        tokens: in the cache, of each row.
        batch: rows.
        per_key: instructions of a warp for a key, all warps of a program together.
        once: instructions of a program besides.
    """
    splits = splits_of(batch * KEY_HEADS, tokens, device.processors)
    programs = batch * KEY_HEADS * splits
    parts = 2 * programs * GROUPS * (DIM + 1) * 4  # written by a kernel and read by the next
    issued = batch * KEY_HEADS * tokens * per_key + programs * once
    rate = device.processors * SCHEDULERS * device.clock
    seconds = (cache_bytes(tokens, batch) + parts) / device.bandwidth
    return Cost(1e3 * LAYERS * seconds, 1e3 * LAYERS * issued / rate)


def rotated(device: Device, tokens: int, batch: int) -> Cost:
    """Attention alone, over keys that are rotated already."""
    return Cost(1e3 * LAYERS * cache_bytes(tokens, batch) / device.bandwidth)


def copied(device: Device, tokens: int, batch: int) -> Cost:
    """The rotated copy, with its share of being made again."""
    anew = cache_bytes(tokens, batch) / RESCALE_EVERY  # reads the keys, writes as many
    return Cost(1e3 * LAYERS * (cache_bytes(tokens, batch) + anew) / device.bandwidth)


def cache_bytes(tokens: int, batch: int) -> int:
    """Bytes of the keys and values of a layer."""
    return 2 * batch * KEY_HEADS * tokens * DIM * NUMBER


def step_costs(name: str, per_key: float, once: float) -> list[dict]:
    """Rows of all lengths and batches."""
    from common import row

    device, rows = DEVICES[name], []
    for tokens in LENGTHS:
        for batch in BATCHES:
            alone = rotated(device, tokens, batch)
            costs = {
                "attention alone": alone,
                "rotated copy": copied(device, tokens, batch),
                "fused": fused(device, tokens, batch, per_key, once),
            }
            common = {
                "model": "Llama-3.1-8B's shape",
                "tokens": tokens,
                "batch": batch,
                "dtype": "bfloat16",
                "quantity": "attention of a step",
                "unit": "ms",
                "device": name,
            }
            for variant, cost in costs.items():
                ratio = round(alone.total / cost.total, 3)
                note = (
                    f"computed, not measured: bytes {cost.bytes:.4g} ms, "
                    f"instructions {cost.instructions:.4g} ms"
                )
                columns = common | {"ratio": ratio, "ratio_of": "attention alone", "note": note}
                rows.append(row(variant, [cost.total], **columns))
    return rows
