"""A model made for the question whether facts far back are found: key-value recall.

A tiny Llama with a window of 256 tokens is trained here (seed below, minutes on two cores) to
answer `ask key` by the value that followed that key earlier, facts and questions lying among
noise. It is then asked at up to four times its window, for facts at every depth.

A row is one rival at one length and depth; `mean` is the share of right answers, or their
log-likelihood in nats, over texts, whose spread is in p20 and p80.
"""

import torch
from common import ROOT, row, save
from rows import rows_of
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from quality import rivals

WINDOW = 256
KEYS = VALUES = NOISE = 64
KEY, VALUE, ASK, FILL = 0, KEYS, KEYS + VALUES, KEYS + VALUES + 1  # where each kind of token begins
FOLDER = ROOT / "models" / "recall-256"
SEED, ROWS = 0, 32
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


def copies(length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of all tokens with one span of it repeated: ids and labels, `(length,)` each."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    ids = torch.randint(FILL + NOISE, (length,), generator=generator)
    labels = torch.full((length,), -100)
    span = draw(4, length // 4)
    begin = draw(0, length // 2 - span)
    copied, end = ids[begin : begin + span].clone(), begin + span
    while (begin := end + draw(0, 8)) + span <= length:
        end = begin + span
        ids[begin:end] = copied
        labels[begin + 1 : end] = copied[1:]
    return ids, labels


def facts(length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Facts, and after them questions: ids and labels, `(length,)` each."""
    begin = int(torch.randint(length // 4, 3 * length // 4, (), generator=generator))
    count = int(torch.randint(1, min(FACTS, begin // 4) + 1, (), generator=generator))
    told, pairs = text(begin, count, generator)
    rest = length - begin
    asked = pairs[torch.randint(len(pairs), (rest // 3,), generator=generator)]
    questions = torch.cat((torch.full((len(asked), 1), ASK), asked), dim=1).flatten()
    labels = torch.full((length,), -100)
    labels[begin + 2 : begin + len(questions) : 3] = asked[:, 1]
    tail = FILL + torch.randint(NOISE, (rest - len(questions),), generator=generator)
    return torch.cat((told, questions, tail)), labels


# What is taught, at which length of text, in how many updates. Looking up is learnt from copies, in
# which every token is a question; from facts alone it is not, in an hour.
CURRICULUM = (
    (copies, 64, 1500),
    (facts, 64, 300),
    (facts, 128, 300),
    (facts, 256, 600),
)


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    lessons = [(kind, length) for kind, length, count in CURRICULUM for _ in range(count)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, len(lessons), pct_start=0.03)
    progress = tqdm(lessons, unit="update", desc="training")
    for lesson, length in progress:
        drawn = (lesson(length, generator) for _ in range(ROWS))
        ids, labels = map(torch.stack, zip(*drawn, strict=True))
        logits = model(ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
            scores = answers(rivals.make(stock, name, LENGTHS[-1]), ids, pairs)
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
