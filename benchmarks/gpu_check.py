"""One run under five minutes that says whether all holds on a CUDA machine, and how fast.

    python benchmarks/gpu_check.py                       uses flash-attn where it is installed
    python benchmarks/gpu_check.py --device cpu --small  a dry run, to see that it works

It checks sdpa (and flash attention where installed) and the fused kernel against the float64 oracle
of the tests, counts synchronisations, and times decoding on four layers of Llama-3.1-8B's shape,
over caches that grow and, eager and compiled, over caches of fixed size, against stock static YaRN;
and the fused kernel alone against stock attention over keys that are rotated already, with what
`cost.py` has computed of both beside it. Rows are appended to `benchmarks/results/gpu.csv`. Exits
with 1 if a check fails.
"""

import argparse
import importlib.util
import statistics
import sys
import warnings
from functools import partial

import cost
import torch
from common import (
    ROOT,
    alternate,
    copy_bandwidth,
    least_bytes,
    our_cache,
    patched,
    random_llama,
    random_states,
    row,
    save,
    static_yarn,
    step,
    stock_cache,
    with_rope,
)
from rows import rows_of
from torch.utils._pytree import tree_map_only

from hf_dynyarn import DynamicYaRNConfig
from hf_dynyarn.backends import fused
from hf_dynyarn.resolve import resolve_schedule

WINDOW = 8192
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}


def check_oracle(device: str) -> bool:
    """Whether the error of half precision is at most 1.5 times stock's own, at s = 1."""
    sys.path.insert(0, str(ROOT / "tests"))
    import oracle

    backends = ["sdpa"]
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        backends.append("flash_attention_2")
    passed = True
    for dtype in (torch.bfloat16, torch.float16):
        for backend in backends:
            stock = random_llama(dtype, 32, **TINY).to(device)
            stock.config._attn_implementation = backend
            ids = torch.randint(1, 1000, (1, 90))
            exact = {
                name: torch.as_tensor(oracle.llama_logits(stock.cpu(), ids[0], window, 7))
                for name, window in (("stock", oracle.PLAIN), ("ours", 32))
            }
            stock.to(device)
            ours = patched(stock, rescale_every=7)
            errors = {}
            with torch.inference_mode():
                for name, model in (("stock", stock), ("ours", ours)):
                    logits = model(ids.to(device)).logits[0].double().cpu()
                    errors[name] = (logits - exact[name]).square().mean().sqrt().item()
            ratio = errors["ours"] / errors["stock"]
            passed &= ratio <= 1.5
            print(f"oracle   {backend:18} {dtype}: error {ratio:.2f} times stock's (bar: 1.5)")
    return passed


def check_fused(device: str) -> bool:
    """Whether the fused operation keeps to the tests' tolerance of its float64 oracle."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fused_cases import CASES, TOLERANCE, Case, arguments, expected

    long = Case(lengths=(5000, 1), starts=(7, 0), heads=8, dim=128, pairs=64, junk=float("nan"))
    cases = [*CASES, *(long.but(dtype=dtype, tokens=n) for dtype in TOLERANCE for n in (1, 4))]
    shares = []
    for case in cases:
        right = expected(case)
        positional, keywords = tree_map_only(
            torch.Tensor, lambda part: part.to(device), arguments(case)
        )
        actual = fused.decode(*positional, **keywords).double().cpu()
        error = (actual - right).abs().max() / right.abs().max().clamp(min=1e-30)
        shares.append(error.item() / TOLERANCE[case.dtype])
    print(f"fused    {len(cases)} cases: error at most {max(shares):.2f} of what is allowed")
    return all(share <= 1 for share in shares)  # not so where one is no number


def check_synchronisations(device: str) -> bool:
    """Whether a decoding step waits for the device as often with four layers as with one."""
    if device != "cuda":
        print("synchronisations: CUDA only")
        return True
    counts = []
    for layers in (1, 4):
        shape = {**TINY, "num_hidden_layers": layers}
        ours = patched(random_llama(torch.bfloat16, 32, **shape).to(device))
        run = step(ours, our_cache(ours, 90))
        run()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(one.message) for one in caught))
    print(f"synchronisations in a step: {counts[0]} with one layer, {counts[1]} with four (bar: 1)")
    return counts[0] == counts[1] <= 1


def decode(device: str, lengths: tuple[int, ...], shape: dict) -> None:
    """Rows of one decoding step: time, and the most memory it takes."""
    stock = random_llama(torch.bfloat16, WINDOW, **shape).to(device)
    static, ours = with_rope(stock, static_yarn(WINDOW, 16.0)), patched(stock)
    for tokens in lengths:
        torch._dynamo.reset()  # else a graph of any length, which is slower, from the second on
        compiled = {model: torch.compile(model, fullgraph=True) for model in (static, ours)}
        begin, room = tokens - 10, tokens + 64  # one change of scale on the way
        fixed = {"max_cache_len": room}
        make = {
            "static yarn": partial(decoding, static, stock_cache, begin),
            "ours": partial(decoding, ours, our_cache, begin),
            "ours, no rotated copy": partial(decoding, ours, our_cache, begin, rotated_copy=False),
            "static yarn, static cache": partial(decoding, static, stock_cache, begin, **fixed),
            "ours, static cache": partial(decoding, ours, our_cache, begin, **fixed),
            "static yarn, compiled": partial(
                decoding, compiled[static], stock_cache, begin, **fixed
            ),
            "ours, compiled": partial(decoding, compiled[ours], our_cache, begin, **fixed),
            "attention alone": partial(attention_alone, stock, tokens),
            "fused kernel alone": partial(kernel_alone, stock, tokens),
        }
        peaks, times = {}, {}
        for name, build in make.items():
            run = build()
            if device == "cuda":
                run()  # compiles
                torch.cuda.reset_peak_memory_stats()
                run()
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
            times |= alternate({name: run}, 24)
            del run
        rows = []
        for name, samples in times.items():
            rival = name.replace("ours", "static yarn").replace("fused kernel", "attention")
            rival = rival if rival in times else "static yarn"
            faster = statistics.mean(times[rival]) / statistics.mean(samples)
            ratio = {} if rival == name else {"ratio": round(faster, 3), "ratio_of": rival}
            peak = f"peak {peaks[name]:.0f} MiB" if name in peaks else ""
            rows.append(row(name, samples, note=peak, **ratio))
        rows += computed(tokens, shape["num_hidden_layers"])
        limit = least_bytes(stock, tokens) / copy_bandwidth(device) * 1e3
        rows.append(row("limit", [limit], note="bytes a step must read / copy bandwidth"))
        save(
            "gpu",
            rows,
            model="random, 4 layers of Llama-3.1-8B's shape",
            tokens=tokens,
            batch=1,
            dtype="bfloat16",
            quantity="one decoding step",
            unit="ms",
        )


def decoding(model, make_cache, tokens: int, **options: bool | int):
    """A function that decodes one token over a cache of its own."""
    return step(model, make_cache(model, tokens, **options))


def attention_alone(model, tokens: int):
    """The attention of all layers over keys that are rotated already: no cache could be faster."""
    states = list(random_states(model, tokens, 1))
    # The queries that share a key stand beside each other.
    query = random_queries(model).view(1, states[0][0].shape[1], -1, states[0][0].shape[-1])

    @torch.inference_mode()
    def run() -> None:
        for key, value in states:
            torch.nn.functional.scaled_dot_product_attention(query, key, value)

    return run


def kernel_alone(model, tokens: int):
    """The fused kernel of all layers over un-rotated keys, at the scale of their last token."""
    states, query = list(random_states(model, tokens, 1)), random_queries(model)
    schedule = resolve_schedule(model.config, DynamicYaRNConfig())
    lengths = torch.tensor([tokens], device=model.device)
    scale = schedule.scale(lengths[:, None] - 1)
    turn = scale, schedule.inv_freq(scale), schedule.gain(scale)

    @torch.inference_mode()
    def run() -> None:
        for key, value in states:
            fused.decode(query, key, value, 0.1, lengths, torch.zeros_like(lengths), *turn)

    return run


def random_queries(model) -> torch.Tensor:
    """Of one token: `(1, Hq, 1, D)`."""
    config = model.config
    shape = (1, config.num_attention_heads, 1, config.hidden_size // config.num_attention_heads)
    return torch.randn(shape, dtype=model.dtype, device=model.device)


def computed(tokens: int, layers: int) -> list[dict]:
    """What `cost.py` says of this device, where it knows it: rows for so many layers."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return [
        row(f"{one['variant']}, computed", [float(one["median"]) * layers / cost.LAYERS])
        for one in rows_of("kernels", quantity="attention of a step", tokens=tokens, batch=1)
        if one["device"] in name
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="short texts, a small model")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "device must be a CUDA device, got a machine without one. Try --device cpu --small."
        )
    passed = check_oracle(arguments.device) & check_fused(arguments.device)
    passed &= check_synchronisations(arguments.device)
    if arguments.small:
        decode(arguments.device, (512,), {**LLAMA_8B, "hidden_size": 512, "intermediate_size": 512})
    else:
        decode(arguments.device, (8192, 32768, 131072), LLAMA_8B)
    sys.exit(0 if passed else 1)
