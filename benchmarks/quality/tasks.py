"""Retrieval in the manner of RULER, past the window: the tasks of `haystacks.py`.

A text is read once under a rival. At each length its questions are asked one after the other, by
greedy decoding, and the cache cut back after each. A row is one task, rival, text, length and
quarter of the text; `mean` is the share of the answers from there that the reply names.
"""

import re
import time
from collections.abc import Iterator, Sequence

import torch
from common import named, row, save
from rows import rows_of
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quality import rivals
from quality.haystacks import QUARTERS, Haystack, Question
from quality.perplexity import LONG_NAMES

TITLES = {"smollm2": "SmolLM2-135M", "qwen": LONG_NAMES["qwen"]}
LENGTHS = {"smollm2": (4096, 8192, 12288, 16384), "qwen": (8192, 16384, 32768, 40960, 49152)}
TEXTS = ("reference", "report")
TASKS = ("single", "keys", "values", "variables")


def reply_to(
    question: Question, rival: rivals.Rival, tokenizer: PreTrainedTokenizerBase, cache
) -> str:
    """The reply of greedy decoding, up to the end of its line; the cache is as it was before."""
    prompt, told = (
        tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        for text in (question.prompt, " ".join(f" {word}," for word, _ in question.answers))
    )

    def likeliest(ids: torch.Tensor) -> int:
        return int(rival.read(ids, cache, keep=1)[0, -1].argmax())

    most = told.shape[1] + 4  # room for an "and" and the like
    new = [likeliest(prompt)]
    while len(new) < most and "\n" not in tokenizer.decode(new):
        new.append(likeliest(torch.tensor([new[-1:]])))
    cache.crop(-(prompt.shape[1] + len(new) - 1))
    return tokenizer.decode(new)


def score(question: Question, reply: str) -> list[tuple[int, float]]:
    """Of each answer its quarter, and whether the reply names it."""
    words = re.findall(r"\w+", reply)
    return [(quarter, float(word in words)) for word, quarter in question.answers]


def asked(
    haystack: Haystack,
    lengths: Sequence[int],
    rival: rivals.Rival,
    tokenizer: PreTrainedTokenizerBase,
    title: str,
) -> Iterator[tuple[int, list[tuple[Question, str]]]]:
    """At each length its questions, each with the reply."""
    cache, read = rival.start(), 0
    progress = tqdm(total=max(lengths), unit="token", desc=title, leave=False)
    for length in lengths:
        for piece in haystack.ids[:, read:length].split(rival.piece, 1):
            rival.read(piece, cache, keep=1)
            progress.update(piece.shape[1])
        read = length
        here = [one for one in haystack.questions if one.length == length]
        replies = []
        for number, question in enumerate(here, 1):
            progress.set_postfix_str(f"question {number} of {len(here)}")
            replies.append((question, reply_to(question, rival, tokenizer, cache)))
        yield length, replies
    progress.close()


def tasks(
    model: str, lengths: Sequence[int] = (), names: Sequence[str] = (), dtype: str = "bfloat16"
) -> None:
    """Every task on every text under some rivals.

    Args:
        model: a key of `TITLES`.
        lengths: of `LENGTHS`, in tokens. Default: all.
        names: of the rivals. Default: all that the model can serve.
        dtype: of the model.

    Raises:
        ValueError: no such length.
    """
    known, columns = LENGTHS[model], {"model": TITLES[model], "batch": 1, "dtype": dtype}
    if not set(lengths) <= set(known):
        raise ValueError(f"lengths of {model} must be among {known}, got {tuple(lengths)}.")
    stock = named(model, getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(stock.config._name_or_path)
    for text in TEXTS:
        haystack = Haystack(tokenizer, text, known)
        for name in names or rivals.names_for(stock.config):
            there = rows_of("tasks", **columns, note=text, variant=name)
            done = {int(one["tokens"]) for one in there}
            missing = sorted(set(lengths or known) - done)
            if not missing:
                continue
            rival = rivals.make(stock, name, known[-1])
            began = time.perf_counter()
            for length, replies in asked(haystack, missing, rival, tokenizer, f"{text}, {name}"):
                seconds = time.perf_counter() - began
                rows = [*rows_of_replies(name, replies), time_row(name, seconds)]
                save("tasks", rows, **columns, tokens=length, note=text)
                began = time.perf_counter()


def rows_of_replies(name: str, replies: list[tuple[Question, str]]) -> list[dict]:
    """A row of each task and quarter."""
    rows = []
    for task in TASKS:
        scores = [
            one for asked, reply in replies if asked.task == task for one in score(asked, reply)
        ]
        for quarter in range(QUARTERS):
            values = [value for where, value in scores if where == quarter]
            rows.append(row(name, values, quantity=f"{task}, quarter {quarter + 1}", unit="1"))
    return rows


def time_row(name: str, seconds: float) -> dict:
    """What it took to read on from the length before, and to ask."""
    return row(name, [seconds], quantity="time", unit="s")
