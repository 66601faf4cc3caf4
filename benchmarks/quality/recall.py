"""A model made for the question whether facts far back are found: key-value recall.

A tiny Llama with a window of 256 tokens is trained here (seed below, minutes on two cores) to
answer `ask key` by the value that followed that key earlier, facts and questions lying among
noise. It is then asked at up to four times its window, for facts at every depth.

A row is one rival at one length and depth; `mean` is the share of right answers, or their
log-likelihood in nats, over texts, whose spread is in p20 and p80.
"""

import torch
from common import ROOT, row, save
from report import rows_of
from torch.nn.functional import cross_entropy
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM

from quality import rivals

WINDOW = 256
KEYS = VALUES = NOISE = 64
KEY, VALUE, ASK, FILL = 0, KEYS, KEYS + VALUES, KEYS + VALUES + 1  # where each kind of token begins
FOLDER = ROOT / "models" / "recall-256"
SEED, UPDATES, ROWS = 0, 4000, 32
FACTS = 16
LENGTHS, DEPTHS, TEXTS = (128, 256, 384, 512, 768, 1024), 8, 64


def text(length: int, facts: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with facts spread evenly over it: ids `(length,)`, and the facts `(facts, 2)`."""
    ids = FILL + torch.randint(NOISE, (length,), generator=generator)
    pairs = torch.stack(
        (
            KEY + torch.randperm(KEYS, generator=generator)[:facts],
            VALUE + torch.randint(VALUES, (facts,), generator=generator),
        ),
        dim=1,
    )
    space = length // facts
    for index, pair in enumerate(pairs):
        begin = index * space + int(torch.randint(space - 1, (), generator=generator))
        ids[begin : begin + 2] = pair
    return ids, pairs


def lesson(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A text of the window with questions in its later part: ids and labels, `(WINDOW,)` each."""
    begin = int(torch.randint(32, WINDOW - 32, (), generator=generator))
    # From two facts on: the easy lessons teach to look up at all.
    count = int(torch.randint(2, min(FACTS, begin // 4) + 1, (), generator=generator))
    facts, pairs = text(begin, count, generator)
    rest = WINDOW - begin
    asked = pairs[torch.randint(len(pairs), (rest // 3,), generator=generator)]
    questions = torch.cat((torch.full((len(asked), 1), ASK), asked), dim=1).flatten()
    labels = torch.full((WINDOW,), -100)
    labels[begin + 2 : begin + len(questions) : 3] = asked[:, 1]
    tail = FILL + torch.randint(NOISE, (rest - len(questions),), generator=generator)
    return torch.cat((facts, questions, tail)), labels


def train() -> LlamaForCausalLM:
    """Trains the model and keeps it in `models/`."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=FILL + NOISE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=WINDOW,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, UPDATES, pct_start=0.05)
    progress = trange(UPDATES, desc="training")
    for _ in progress:
        ids, labels = map(torch.stack, zip(*(lesson(generator) for _ in range(ROWS)), strict=True))
        logits = model(ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    model.eval().save_pretrained(FOLDER)
    return model


@torch.inference_mode()
def answers(rival: rivals.Rival, ids: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens as the answer to each question, `(B, facts, V)`.

    Args:
        rival: reads the text once; every question continues the same cache, cut back after it.
        ids: `(B, T)`.
        pairs: `(B, facts, 2)`.
    """
    cache = rival.start()
    for piece in ids.split(rival.piece, 1):
        rival.read(piece, cache)
    found = []
    for index in range(pairs.shape[1]):
        question = torch.stack((torch.full((len(ids),), ASK), pairs[:, index, 0]), dim=1)
        found.append(rival.read(question, cache)[:, -1].log_softmax(-1))
        cache.crop(-2)
    return torch.stack(found, dim=1)


def recall() -> None:
    """Every rival at every length and depth."""
    stock = LlamaForCausalLM.from_pretrained(FOLDER) if FOLDER.is_dir() else train()
    done = {(one["variant"], int(one["tokens"])) for one in rows_of("recall")}
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        drawn = [text(length, FACTS, generator) for _ in range(TEXTS)]
        ids, pairs = map(torch.stack, zip(*drawn, strict=True))
        for name in rivals.NAMES:
            if (name, length) in done:
                continue
            scores = answers(rivals.make(stock, name), ids, pairs)
            right = scores.argmax(-1) == pairs[..., 1]
            likely = scores.gather(-1, pairs[..., 1:])[..., 0]
            rows = []
            for depth, (hits, logs) in enumerate(
                zip(right.float().chunk(DEPTHS, 1), likely.chunk(DEPTHS, 1), strict=True)
            ):
                where = f"depth {100 * depth // DEPTHS} %"
                rows += [
                    row(name, hits.mean(1).tolist(), quantity=f"right answers, {where}", unit="1"),
                    row(
                        name,
                        logs.mean(1).tolist(),
                        quantity=f"log-likelihood, {where}",
                        unit="nats",
                    ),
                ]
            save(
                "recall",
                rows,
                model="recall, window 256",
                tokens=length,
                batch=TEXTS,
                dtype="float32",
            )
