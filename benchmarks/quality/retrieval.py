"""Retrieval on the real model: facts spread over a real text, asked for at several lengths.

One text is read once. At each length every fact so far is asked for, and the cache cut back after
each question, so that one prefill serves dozens of them. A row is one rival, text, length and
quarter of the text; `mean` is over the facts there.
"""

import random
from collections.abc import Iterator

import torch
from common import row, save, smollm2
from rows import rows_of
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quality import rivals
from quality.texts import ids_of

LENGTHS = (4096, 6144, 8192, 10240, 12288, 16384)
EVERY = 512  # tokens from fact to fact
QUARTERS = 4
CITIES = """
Amsterdam Athens Bangkok Berlin Bogota Boston Brussels Cairo Chicago Copenhagen Delhi Dublin Geneva
Hamburg Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila Milan Moscow
Nairobi Oslo Paris Prague Quito Rome Santiago Seoul Stockholm Sydney Tehran Tokyo Toronto Vienna
Warsaw Zurich
"""


def text_with_facts(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[torch.Tensor, list[tuple[int, str, str]]]:
    """Ids `(1, LENGTHS[-1])`, and of each fact where it ends, its city and its number."""
    draw = random.Random(name)
    cities = draw.sample(CITIES.split(), len(CITIES.split()))
    source = ids_of(tokenizer, name, LENGTHS[-1])[0]
    ids, facts = [], []
    for begin in range(0, LENGTHS[-1], EVERY):
        city, number = cities[len(facts)], str(draw.randrange(10000, 100000))
        fact = tokenizer(f"\n\nThe secret number of {city} is {number}.\n\n").input_ids
        ids += [*source[begin : begin + EVERY - len(fact)].tolist(), *fact]
        facts.append((len(ids), city, number))
    return torch.tensor([ids]), facts


def ask(
    rival: rivals.Rival, tokenizer: PreTrainedTokenizerBase, cache, city: str, number: str
) -> tuple[float, float]:
    """Log-likelihood of the right answer in nats, and whether greedy decoding gives it."""
    question = f"\n\nQuestion: What is the secret number of {city}?\n"
    prompt = tokenizer(f"{question}Answer: The secret number of {city} is").input_ids
    answer = tokenizer(f" {number}").input_ids
    ids = torch.tensor([prompt + answer])
    scores = rival.read(ids, cache)[0, len(prompt) - 1 : -1].log_softmax(-1)
    cache.crop(-ids.shape[1])
    likely = scores.gather(-1, torch.tensor(answer)[:, None]).sum().item()
    return likely, float(scores.argmax(-1).tolist() == answer)


def answers(
    rival: rivals.Rival, tokenizer: PreTrainedTokenizerBase, name: str, title: str
) -> Iterator[tuple[int, list[tuple[int, float, float]]]]:
    """At each length, of each fact: its quarter, log-likelihood, and whether it was found."""
    ids, facts = text_with_facts(tokenizer, name)
    cache, read = rival.start(), 0
    for length in tqdm(LENGTHS, desc=title, leave=False):
        for piece in ids[:, read:length].split(rival.piece, 1):
            rival.read(piece, cache)
        read = length
        yield (
            length,
            [
                ((end - 1) * QUARTERS // length, *ask(rival, tokenizer, cache, city, number))
                for end, city, number in facts
                if end <= length
            ],
        )


def retrieval() -> None:
    """Every rival on two texts."""
    stock = smollm2(torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(stock.config._name_or_path)
    done = {(one["note"], one["variant"]) for one in rows_of("retrieval")}
    for text in ("prose", "report"):
        for name in rivals.NAMES:
            if (text, name) in done:
                continue
            rows = []
            for length, found in answers(
                rivals.make(stock, name, LENGTHS[-1]), tokenizer, text, f"{text}, {name}"
            ):
                for quarter in range(QUARTERS):
                    inside = [values for where, *values in found if where == quarter]
                    kinds = (("log-likelihood", "nats"), ("right answers", "1"))
                    for (kind, unit), values in zip(kinds, zip(*inside, strict=True), strict=True):
                        quantity = f"{kind}, quarter {quarter + 1}"
                        rows.append(row(name, values, tokens=length, quantity=quantity, unit=unit))
            save("retrieval", rows, model="SmolLM2-135M", batch=1, dtype="float32", note=text)
