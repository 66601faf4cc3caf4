"""Perplexity by position, past 8,192 and past 32,768, and what the width of a stair does to it.

A row is one text under one rival in one bin of positions: its `mean` is the mean loss of the
tokens in it, in nats, `tokens` the end of the bin.
"""

from collections.abc import Sequence

import torch
from common import named, row, save, smollm2
from rows import rows_of
from tqdm import tqdm
from transformers import AutoTokenizer

from quality import rivals
from quality.texts import TEXTS, ids_of

LENGTH, BIN = 16384, 1024
STEPS = (32, 128, 512, 2048, 8192)  # beside the default, 256
# Of the models with a window of 32,768.
LONG, LONG_TEXTS = 49152, ("reference", "report")
LONG_NAMES = {"qwen": "Qwen2.5-Coder-0.5B", "gemma": "Gemma-3-270m"}


def losses(rival: rivals.Rival, ids: torch.Tensor, title: str) -> torch.Tensor:
    """The loss of every token but the first, in nats: `(T - 1,)`."""
    cache, found = rival.start(), []
    pieces = ids[:, :-1].split(rival.piece, 1), ids[:, 1:].split(rival.piece, 1)
    progress = tqdm(total=ids.shape[1] - 1, unit="token", desc=title, leave=False)
    for piece, targets in zip(*pieces, strict=True):
        logits = rival.read(piece, cache)[0].float()
        found.append(torch.nn.functional.cross_entropy(logits, targets[0], reduction="none"))
        progress.update(piece.shape[1])
    progress.close()
    return torch.cat(found)


def measure(bench: str, wanted: list[tuple[str, str, dict[str, int]]]) -> None:
    """Appends rows of text, rival and options, but for those that are there."""
    stock = smollm2(torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(stock.config._name_or_path)
    done = {(one["quantity"], one["variant"]) for one in rows_of(bench)}
    for text, name, options in wanted:
        variant = " ".join((name, *(f"{key}={value}" for key, value in options.items())))
        if (text, variant) in done:
            continue
        ids = ids_of(tokenizer, text, LENGTH + 1)
        found = losses(rivals.make(stock, name, LENGTH, **options), ids, f"{text}, {variant}")
        rows = [
            row(variant, part.tolist(), tokens=BIN * (index + 1))
            for index, part in enumerate(found.split(BIN))
        ]
        save(
            bench,
            rows,
            model="SmolLM2-135M",
            batch=1,
            dtype="float32",
            quantity=text,
            unit="nats per token",
        )


def perplexity() -> None:
    """Every text under every rival."""
    measure("perplexity", [(text, name, {}) for text in TEXTS for name in rivals.NAMES])


def perplexity_32k(
    model: str, lengths: Sequence[int] = (), names: Sequence[str] = (), dtype: str = "bfloat16"
) -> None:
    """Every text under some rivals.

    Args:
        model: a key of `LONG_NAMES`.
        lengths: of which the longest is how far it is read, in tokens. Default: `LONG`.
        names: of the rivals. Default: all that the model can serve.
        dtype: of the model.

    Raises:
        ValueError: a text of that length does not end with a bin.
    """
    longest = max(lengths, default=LONG)
    if longest % BIN:
        raise ValueError(f"the longest of lengths must be a multiple of {BIN}, got {longest}.")
    stock = named(model, getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(stock.config._name_or_path)
    columns = {"model": LONG_NAMES[model], "batch": 1, "dtype": dtype}
    for text in LONG_TEXTS:
        for name in names or rivals.names_for(stock.config):
            there = rows_of("perplexity_32k", **columns, quantity=text, variant=name)
            done = {int(one["tokens"]) for one in there}
            if longest in done:
                continue
            ids = ids_of(tokenizer, text, longest + 1)
            found = losses(rivals.make(stock, name, LONG), ids, f"{text}, {name}")
            rows = [
                row(name, part.tolist(), tokens=BIN * (index + 1))
                for index, part in enumerate(found.split(BIN))
                if BIN * (index + 1) not in done
            ]
            save("perplexity_32k", rows, **columns, quantity=text, unit="nats per token")


def stairs() -> None:
    """Two texts under stairs of other widths."""
    options = [{"rescale_every": step} for step in STEPS]
    texts = list(TEXTS)[:2]
    measure("stairs", [(text, rivals.OURS, one) for text in texts for one in options])
