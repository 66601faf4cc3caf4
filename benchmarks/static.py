"""Compiled decoding steps over caches of fixed size: ours, and stock static YaRN's `StaticCache`.

    python benchmarks/static.py            about 15 minutes on two cores
    python benchmarks/static.py steps      the times alone
    python benchmarks/static.py alike      what it gives against a cache that grows

Both models are compiled as `generate` would compile them on a GPU, a step as one graph, and take
turns. For the times the caches hold random keys and values, which cost the same and spare the
prefill. Rows are appended to `benchmarks/results/static.csv`.
"""

import argparse
import statistics

import torch
from common import (
    CACHE,
    alternate,
    our_cache,
    patched,
    row,
    save,
    smollm2,
    static_yarn,
    step,
    stock_cache,
    with_rope,
)
from quality.texts import ids_of
from transformers import AutoTokenizer

from hf_dynyarn import DynamicYaRNCache

WINDOW = 8192
# Tokens held and slots. The second passes the window on the way, where the scale changes.
SIZES = ((2000, 8192), (8180, 16384))
STEPS = 48
BEGIN, END = 8100, 8300


def steps() -> None:
    """Milliseconds of one compiled step, stock and ours."""
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, room in SIZES:
            torch._dynamo.reset()
            model = smollm2(dtype)
            stock, ours = with_rope(model, static_yarn(WINDOW)), patched(model)
            runs = {
                "static yarn": compiled_step(stock, stock_cache(model, tokens, max_cache_len=room)),
                "ours": compiled_step(ours, our_cache(model, tokens, max_cache_len=room)),
            }
            times = alternate(runs, STEPS)
            rival = statistics.median(times["static yarn"])
            ratio = round(rival / statistics.median(times["ours"]), 3)
            more = {"ratio": ratio, "ratio_of": "static yarn, median"}
            rows = [
                row(variant, samples, **(more if variant == "ours" else {}))
                for variant, samples in times.items()
            ]
            save(
                "static",
                rows,
                **columns(tokens, dtype),
                quantity="one compiled step",
                unit="ms",
                note=f"{room} slots",
            )


def compiled_step(model, cache):
    return step(torch.compile(model, fullgraph=True), cache)


def columns(tokens: int, dtype: torch.dtype) -> dict:
    name = str(dtype).removeprefix("torch.")
    return {"model": "SmolLM2-135M", "tokens": tokens, "batch": 1, "dtype": name}


def alike() -> None:
    """Greedy tokens and logits over a fixed cache, compiled, and over one that grows, eager."""
    torch._dynamo.reset()
    model = smollm2(torch.float32)
    ids = ids_of(AutoTokenizer.from_pretrained(model.config.name_or_path), "reference", BEGIN)
    ours = patched(model)
    growing = greedy(ours, ours, ids, DynamicYaRNCache())
    compiled = torch.compile(ours, fullgraph=True)
    fixed = greedy(ours, compiled, ids, DynamicYaRNCache(max_cache_len=WINDOW + 256))
    same = (growing.argmax(-1) == fixed.argmax(-1)).double()
    difference = (growing - fixed).abs().amax(-1)
    common = {**columns(BEGIN, torch.float32), "note": f"to {END} tokens, against a growing cache"}
    rows = [row("ours", same.tolist())]
    save("static", rows, **common, quantity="same likeliest token", unit="share")
    rows = [row("ours", [difference.max().item()])]
    save("static", rows, **common, quantity="largest difference of a logit", unit="")
    print(f"largest logit {growing.abs().max():.3g}, {int(same.sum())} of {len(same)} tokens equal")


@torch.inference_mode()
def greedy(model, stepping, ids: torch.Tensor, cache) -> torch.Tensor:
    """Logits of the tokens after a text, each of which is the likeliest: `(END - BEGIN, V)`.

    Args:
        model: reads the text.
        stepping: the same model, perhaps compiled, which then decodes.
        ids: `(1, BEGIN)`.
        cache: an empty one.
    """
    found = [model(ids, logits_to_keep=1, **{CACHE: cache}).logits[:, -1]]
    while len(found) < END - BEGIN:
        token = found[-1].argmax(-1, keepdim=True)
        found.append(stepping(token, **{CACHE: cache}).logits[:, -1])
    return torch.cat(found)


PARTS = {part.__name__: part for part in (steps, alike)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    for name in parser.parse_args().parts or PARTS:
        PARTS[name]()
