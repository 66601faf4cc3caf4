"""Why the model of `recall.py` prefers a static factor of 4, by experiment.

Static 4 and ours differ in two things that a query's position decides: its frequencies, and the
gain on its logits. Here each is by position, or held at that of scale 4 from the first token on;
the gain also off. Rows are at four times the window, by depth:

    right answers     share of them
    weight of fact    attention of the last layer from the question to the value asked for, in the
                      head that gives it most
    weight elsewhere  attention of that head to all other tokens of that depth
"""

from dataclasses import dataclass, fields

import torch
from common import CACHE, patched, row, save
from rows import rows_of
from tqdm import tqdm
from transformers import LlamaForCausalLM

from hf_dynyarn import DynamicYaRNCache
from hf_dynyarn.hooks import patch_of
from hf_dynyarn.schedules import YaRNSchedule
from quality import recall

LENGTH, TEXTS = 1024, 32
OFF, HELD = 1.0, 4.0  # scales at which gain or frequencies are held
BY_POSITION = None
VARIANTS = {
    f"frequencies {name}, gain {other}": (frequencies, gain)
    for name, frequencies in (("by position", BY_POSITION), ("held", HELD))
    for other, gain in (("by position", BY_POSITION), ("held", HELD), ("off", OFF))
}


@dataclass(frozen=True)
class HeldSchedule(YaRNSchedule):
    """Frequencies and gain of one scale at all positions, where it is given."""

    frequencies_of: float | None = None
    gain_of: float | None = None

    def inv_freq(self, scale: torch.Tensor, *constants: torch.Tensor) -> torch.Tensor:
        held = scale if self.frequencies_of is None else torch.full_like(scale, self.frequencies_of)
        return super().inv_freq(held, *constants)

    def gain(self, scale: torch.Tensor) -> torch.Tensor:
        held = scale if self.gain_of is None else torch.full_like(scale, self.gain_of)
        return super().gain(held)


def under(stock: LlamaForCausalLM, frequencies_of: float | None, gain_of: float | None):
    """A patched model of the same weights, under a `HeldSchedule`."""
    model = patched(stock)
    patch = patch_of(model.model)
    ours = {field.name: getattr(patch.schedule, field.name) for field in fields(patch.schedule)}
    patch.schedule = HeldSchedule(**ours, frequencies_of=frequencies_of, gain_of=gain_of)
    return model


@torch.inference_mode()
def look(model, ids: torch.Tensor, pairs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `recall.answers` asks, with the last layer's weights: `(B, facts)` each by depth.

    `weight elsewhere` is `(B, DEPTHS)`, the mean over questions.
    """
    cache = DynamicYaRNCache()
    model(ids, logits_to_keep=1, **{CACHE: cache})
    right, of_fact, elsewhere = [], [], []
    for key, value in (pair.unbind(-1) for pair in pairs.unbind(1)):
        question = torch.stack((torch.full_like(key, recall.ASK), key), dim=1)
        output = model(question, output_attentions=True, **{CACHE: cache})
        cache.crop(-2)
        right.append(output.logits[:, -1].argmax(-1) == value)
        told = (ids[:, :-1] == key[:, None]).int().argmax(-1) + 1  # where its value stands
        weights = output.attentions[-1][:, :, -1, : ids.shape[1]]  # (B, H, L)
        heads = weights.gather(-1, told[:, None, None].expand(-1, weights.shape[1], 1))[..., 0]
        best, head = heads.max(-1)
        of_fact.append(best)
        chosen = weights[torch.arange(len(ids)), head].scatter(-1, told[:, None], 0.0)
        elsewhere.append(chosen.unflatten(-1, (recall.DEPTHS, -1)).sum(-1))
    return {
        "right answers": torch.stack(right, 1).float(),
        "weight of fact": torch.stack(of_fact, 1),
        "weight elsewhere": torch.stack(elsewhere).mean(0),
    }


def recall_why() -> None:
    """Every variant at `LENGTH`."""
    there = recall.FOLDER.is_dir()
    stock = LlamaForCausalLM.from_pretrained(recall.FOLDER) if there else recall.train()
    stock.set_attn_implementation("eager")  # which gives its weights
    generator = torch.Generator().manual_seed(LENGTH)
    drawn = [recall.text(LENGTH, recall.FACTS, generator) for _ in range(TEXTS)]
    ids, pairs = map(torch.stack, zip(*drawn, strict=True))
    done = {one["variant"] for one in rows_of("recall_why")}
    for name, held in tqdm(VARIANTS.items(), unit="variant"):
        if name in done:
            continue
        rows = []
        for quantity, values in look(under(stock, *held), ids, pairs).items():
            for depth, part in enumerate(values.chunk(recall.DEPTHS, 1)):
                where = f"{quantity}, depth {100 * depth // recall.DEPTHS} %"
                rows.append(row(name, part.mean(1).tolist(), quantity=where, unit="1"))
        columns = {"model": "recall, window 256", "tokens": LENGTH, "dtype": "float32"}
        save("recall_why", rows, batch=TEXTS, **columns)
