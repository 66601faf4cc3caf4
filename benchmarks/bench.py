"""Speed and memory against what people run today.

    python benchmarks/bench.py                 everything (about 25 minutes on two cores)
    python benchmarks/bench.py --quick         fewer lengths and samples (under 3 minutes)
    python benchmarks/bench.py decode batch    some of it

Rows are appended to `benchmarks/results/*.csv`; `benchmarks/report.py` makes the figures and the
README's table of them. The rivals are stock transformers on the same weights: static YaRN with
`DynamicCache`, Dynamic NTK with `DynamicCache` (whose cached keys are stale), and no cache at all.
"""

import argparse
import multiprocessing
import statistics
from functools import partial
from pathlib import Path

import torch
from common import (
    CACHE,
    alternate,
    bytes_per_token,
    copy_bandwidth,
    least_bytes,
    least_operations,
    matmul_rate,
    our_cache,
    patched,
    random_llama,
    row,
    save,
    smollm2,
    static_yarn,
    step,
    stock_cache,
    with_rope,
)

from hf_dynyarn import DynamicYaRNConfig
from hf_dynyarn.cache import DynamicYaRNCache

WINDOW = 8192
NTK = {"rope_type": "dynamic", "factor": 4.0}


def decode(quick: bool) -> None:
    """Milliseconds per token against tokens held. Past the window a bucket changes on the way."""
    lengths = (2048, 16384) if quick else (2048, 4096, 8192, 16384, 32768)
    for dtype in (torch.float32, torch.bfloat16):
        stock = smollm2(dtype)
        models = {
            "static yarn": with_rope(stock, static_yarn(WINDOW)),
            "dynamic ntk, stale": with_rope(stock, NTK),
            "ours": patched(stock),
        }
        for tokens in lengths:
            # Ten steps before a bucket ends, so that the mean holds one change in 64 steps: a user
            # sees one in 256.
            begin = tokens - 10
            caches = {
                "static yarn": stock_cache(stock, begin),
                "dynamic ntk, stale": stock_cache(stock, begin),
                "ours": our_cache(stock, begin),
                "ours, no rotated copy": our_cache(stock, begin, rotated_copy=False),
            }
            runs = {
                name: step(models.get(name, models["ours"]), cache)
                for name, cache in caches.items()
            }
            save_decode("SmolLM2-135M", stock, tokens, dtype, alternate(runs, 12 if quick else 64))
            del caches, runs
        for tokens in (2048, 4096, 8192) if not quick and dtype == torch.float32 else ():
            run = partial(read, models["ours"], torch.full((1, tokens), 5), use_cache=False)
            rows = [row("no cache", alternate({"no cache": run}, 1, 0)["no cache"])]
            save("decode", rows, **decode_columns("SmolLM2-135M", tokens, dtype))
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    stock = random_llama(torch.bfloat16, 4096, **shape)
    static = with_rope(stock, static_yarn(4096))
    runs = {
        "static yarn": step(static, stock_cache(stock, 12278)),
        "ours": step(patched(stock), our_cache(stock, 12278)),
    }
    times = alternate(runs, 12 if quick else 64)
    save_decode("random, 4 layers, 16/4 heads", stock, 12288, torch.bfloat16, times)


def decode_columns(model: str, tokens: int, dtype: torch.dtype) -> dict:
    return {
        "model": model,
        "tokens": tokens,
        "batch": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "quantity": "one decoding step",
        "unit": "ms",
    }


def steps_compared(times: dict[str, list[float]]) -> list[dict]:
    """Rows of decoding steps, ours with the ratio of static YaRN's mean to theirs."""
    rival = statistics.mean(times["static yarn"])
    rows = []
    for variant, samples in times.items():
        ratio = {
            "ratio": round(rival / statistics.mean(samples), 3),
            "ratio_of": "static yarn, mean",
        }
        rows.append(row(variant, samples, **(ratio if "ours" in variant else {})))
    return rows


def save_decode(name: str, model, tokens: int, dtype: torch.dtype, times: dict) -> None:
    rows = steps_compared(times)
    rows.append(limit_of_step(model, tokens))
    save("decode", rows, **decode_columns(name, tokens, dtype))


def limit_of_step(model, tokens: int) -> dict:
    """Row of the least time that a decoding step can take, in ms.

    Args:
        model: the model.
        tokens: number of tokens that the step attends to, over all rows.
    """
    limit = least_bytes(model, tokens) / copy_bandwidth() * 1e3
    return row("limit", [limit], note="bytes a step must read / copy bandwidth")


def prefill(quick: bool) -> None:
    """Seconds to read a text in one call, with the first layers of SmolLM2: each costs the same."""
    layers = 2 if quick else 6
    stock = smollm2(torch.float32, layers=layers)
    static, ours = with_rope(stock, static_yarn(WINDOW)), patched(stock)
    for tokens in (10240,) if quick else (12288, 16384):
        ids = torch.randint(5, 40000, (1, tokens))

        runs = {"static yarn": partial(read, static, ids), "ours": partial(read, ours, ids)}
        times = alternate(runs, 1 if quick else 3, warm_up=0)
        rival = statistics.median(times["static yarn"])
        rows = []
        for variant, samples in times.items():
            ratio = rival / statistics.median(samples)
            more = {"ratio": round(ratio, 3), "ratio_of": "static yarn, median"}
            seconds = [sample / 1e3 for sample in samples]
            rows.append(row(variant, seconds, **(more if variant == "ours" else {})))
        limit = least_operations(stock, tokens) / matmul_rate()
        rows.append(row("limit", [limit], note="operations of matmuls / their rate"))
        save(
            "prefill",
            rows,
            model=f"SmolLM2-135M, {layers} layers",
            tokens=tokens,
            batch=1,
            dtype="float32",
            quantity="one call",
            unit="s",
        )


MEMORY_SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


@torch.inference_mode()
def read(model, ids: torch.Tensor, **options: bool) -> None:
    model(ids, logits_to_keep=1, **options)


def memory(quick: bool) -> None:
    """Bytes held per token, room to grow included, and the peak of reading a text in one call."""
    variants = ("static yarn", "ours", "ours, no rotated copy")
    for tokens in (4608,) if quick else (2048, 4608, 9216):
        held, peak = {}, {}
        for variant in variants:
            # In a process of its own: memory that another variant has freed would hide the peak.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                held[variant], peak[variant] = pool.apply(measure_memory, (variant, tokens))
        for quantity, values in (("bytes held", held), ("peak of a prefill, model aside", peak)):
            rival = values["static yarn"]
            rows = []
            for variant, value in values.items():
                more = {"ratio": round(rival / value, 3), "ratio_of": "static yarn"}
                rows.append(row(variant, [value], **(more if "ours" in variant else {})))
            if quantity == "bytes held":
                model = random_llama(torch.float32, 4096, **MEMORY_SHAPE)
                rows.append(row("limit", [bytes_per_token(model)], note="keys and values alone"))
            save(
                "memory",
                rows,
                model="random, 4 layers, 8/8 heads",
                tokens=tokens,
                batch=1,
                dtype="float32",
                quantity=quantity,
                unit="bytes per token",
            )


def measure_memory(variant: str, tokens: int) -> tuple[float, float]:
    """Bytes per token held after reading `tokens`, and at most while reading them."""
    model, cache = random_llama(torch.float32, 4096, **MEMORY_SHAPE), None
    if variant == "static yarn":
        model = with_rope(model, static_yarn(4096))
    else:
        model = patched(model)
        cache = DynamicYaRNCache(rotated_copy=variant == "ours")
    ids = torch.randint(5, 1000, (1, tokens))
    before = reset_peak()
    held = bytes_after_reading(model, cache, ids)
    return held, (read_status("VmHWM") - before) / tokens


@torch.inference_mode()
def bytes_after_reading(model, cache, ids) -> float:
    """Reads all but the last 300 tokens in one call, the others one by one."""
    output = model(ids[:, :-300], logits_to_keep=1, **({CACHE: cache} if cache is not None else {}))
    cache = output[CACHE]
    for token in ids[:, -300:].split(1, 1):
        model(token, **{CACHE: cache})
    buffers = [
        value
        for layer in cache.layers
        for part in (layer, getattr(layer, "rotated", None))
        if part is not None
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    ]
    buffers += [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers) / ids.shape[1]


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return read_status("VmRSS")


def read_status(name: str) -> int:
    """A memory figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def rescale(quick: bool) -> None:
    """What the bucket changes cost: the time above a plain step, spread over the stair."""
    stock, tokens = smollm2(torch.float32), 12288
    for every in (256,) if quick else (64, 256, 1024, 4096):
        config = DynamicYaRNConfig(rescale_every=every)
        ours = patched(stock, rescale_every=every)
        plain, change = [], []
        for _ in range(1 if quick else 3):
            # 12,288 - 8,192 = 4,096 tokens is a multiple of every stair: the change comes at the
            # sixth step.
            run = step(ours, our_cache(stock, tokens - 5, config=config))
            times = alternate({"ours": run}, 12, warm_up=0)["ours"]
            plain += times[1:5] + times[7:]
            change.append(times[5])
        share = (statistics.median(change) - statistics.median(plain)) / (
            every * statistics.median(plain)
        )
        keys = tokens * bytes_per_token(stock) / 2
        least = keys / copy_bandwidth() * 1e3 / (every * statistics.median(plain))
        rows = [
            row("plain step", plain, unit="ms"),
            row("step that changes the bucket", change, unit="ms"),
            row("share of decoding time", [100 * share], unit="%"),
            row("limit", [100 * least], unit="%", note="bytes of all keys / copy bandwidth"),
        ]
        save(
            "rescale",
            rows,
            model="SmolLM2-135M",
            tokens=tokens,
            batch=1,
            dtype="float32",
            quantity=f"rescale_every={every}",
        )


def batch(quick: bool) -> None:
    """Eight rows of unequal length, left-padded, a token each."""
    stock, rows_of = smollm2(torch.float32), 8
    longest = 2048 if quick else 4096
    lengths = torch.linspace(longest // 8, longest, rows_of).long()
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    static, ours = with_rope(stock, static_yarn(WINDOW)), patched(stock)
    runs = {
        "static yarn": step(static, stock_cache(stock, longest, rows_of), rows_of, mask),
        "ours": step(ours, our_cache(stock, longest, rows_of, mask), rows_of, mask),
    }
    rows = steps_compared(alternate(runs, 8 if quick else 24))
    rows.append(limit_of_step(stock, int(lengths.sum())))
    save(
        "batch",
        rows,
        model="SmolLM2-135M",
        tokens=longest,
        batch=rows_of,
        dtype="float32",
        quantity="one decoding step",
        unit="ms",
        note=f"rows of {lengths[0]} to {lengths[-1]} tokens",
    )


BENCHES = {bench.__name__: bench for bench in (decode, prefill, memory, rescale, batch)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benches", nargs="*", choices=[*BENCHES, []], help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and samples")
    arguments = parser.parse_args()
    for name in arguments.benches or BENCHES:
        BENCHES[name](arguments.quick)
