"""Writes the table of families into docs/models.md: `make tables`.

Each row is one tiny random model, whose window is 32 tokens: the largest difference of its logits
(about 2 in size) from stock's over 32 tokens, from the oracle's over 50 tokens in float64, and of
50 tokens read through a cache from the same in one call.
"""

import logging
from pathlib import Path

import torch
from conftest import WINDOW, logits_of, random_ids
from families import CASES, INTERLEAVED, STEP, tiny, turn_of
from oracle import stepwise_logits
from transformers import __version__

from hf_dynyarn import DynamicYaRNCache, patch_llama

DOCS = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
KINDS = {"r": "stretch", "w": "window", "n": "no rotation"}


def difference(one: torch.Tensor, other: torch.Tensor) -> str:
    return f"{(one.double() - other.double()).abs().max().item():.0e}"


def row(case: str) -> str:
    model, short, long = tiny(case), random_ids(WINDOW), random_ids(50)
    stock = logits_of(model, short)
    exact = tiny(case).double()
    oracle = stepwise_logits(exact, long[0], turn_of(case, exact), case in INTERLEAVED)
    patch_llama(exact, rescale_every=STEP)
    patch_llama(model, rescale_every=STEP)
    cache = DynamicYaRNCache()
    cached = torch.cat([logits_of(model, token, cache) for token in long.split(1, 1)], dim=1)
    family, _, variant = case.partition("-")
    layers = ", ".join(KINDS[kind] for kind in dict.fromkeys(CASES[case][1]))
    return (
        f"| `{family}` | {variant} | {layers} | {difference(logits_of(model, short), stock)} "
        f"| {difference(logits_of(exact, long)[0], oracle)} "
        f"| {difference(cached, logits_of(model, long))} |"
    )


def table() -> str:
    lines = [
        "| `model_type` | variant | layers | stock, up to `L0` | oracle | cached, uncached |",
        "|---|---|---|---|---|---|",
    ]
    lines += [row(case) for case in CASES]
    return "\n".join(lines) + f"\n\n`make tables`, transformers {__version__}.\n"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    before, rest = DOCS.read_text().split(BEGIN)
    DOCS.write_text(before + BEGIN + table() + END + rest.split(END)[1])
