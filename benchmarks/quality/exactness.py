"""Why the scale belongs to the position: decoding with a cache against the same text from scratch.

The window is read, then 512 tokens one by one. Every 64th step is compared with a forward call
without a cache over the text up to there. A row is one rival and quantity, over these steps.
"""

import torch
from common import row, save, smollm2
from rows import rows_of
from tqdm import tqdm
from transformers import AutoTokenizer

from quality import rivals
from quality.texts import ids_of

STEPS, EVERY = 512, 64


@torch.inference_mode()
def compare(rival: rivals.Rival, ids: torch.Tensor, title: str) -> tuple[list[float], list[float]]:
    """Largest difference of the logits, and whether the likeliest token is the same."""
    cache, window = rival.start(), ids.shape[1] - STEPS
    for piece in ids[:, :window].split(rival.piece, 1):
        rival.read(piece, cache)
    differences, agreements = [], []
    for step in tqdm(range(1, STEPS + 1), unit="token", desc=title, leave=False):
        end = window + step
        cached = rival.read(ids[:, end - 1 : end], cache)[0, -1]
        if step % EVERY:
            continue
        scratch = rival.model(ids[:, :end], use_cache=False, logits_to_keep=1).logits[0, -1]
        differences.append((cached - scratch).abs().max().item())
        agreements.append(float(cached.argmax() == scratch.argmax()))
    return differences, agreements


def exactness() -> None:
    """Ours, un-rotated keys with one scale per call, and stale keys."""
    stock = smollm2(torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(stock.config._name_or_path)
    ids = ids_of(tokenizer, "prose", stock.config.max_position_embeddings + STEPS)
    done = {one["variant"] for one in rows_of("exactness")}
    for name in (rivals.OURS, rivals.FORWARD, rivals.STALE):
        if name in done:
            continue
        differences, agreements = compare(rivals.make(stock, name, ids.shape[1]), ids, name)
        rows = [
            row(name, differences, quantity="largest difference of a logit", unit="1"),
            row(name, agreements, quantity="same likeliest token", unit="1"),
        ]
        save("exactness", rows, model="SmolLM2-135M", tokens=ids.shape[1], batch=1, dtype="float32")
