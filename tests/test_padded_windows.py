"""Layers with a window, where padding lies between the tokens of a row.

A window counts the tokens of a row, as it does in the row's solo run, and not the padding.
"""

import pytest
import torch
from conftest import (
    ROUNDING,
    VOCABULARY,
    assert_close,
    generate,
    left_padded,
    logits_of,
    random_ids,
)
from families import STEP, tiny
from transformers.cache_utils import DynamicCache

from hf_dynyarn import DynamicYaRNCache, masks, patch_llama
from hf_dynyarn.backends import sdpa

CASES = [
    "mistral-window",
    "mistral-window past the trained one",
    "gemma3_text",
    "qwen2-window",
    "ministral",
]

# Lengths of each row in each turn; padded on the left, so that from the second turn on padding
# lies in the middle.
TURNS = [(20, 9, 14), (5, 30, 1), (1, 1, 1), (13, 2, 25), (1, 1, 1), (1, 1, 1)]


def turns_of(lengths, side="left"):
    """Token ids (B, T) and mask (B, T) of each turn, and each row as a text without padding."""
    rows = [
        [random_ids(length, seed=100 * turn + row)[0] for row, length in enumerate(turn_lengths)]
        for turn, turn_lengths in enumerate(lengths)
    ]
    turns = [left_padded(turn) for turn in rows]
    if side == "right":
        turns = [
            (
                torch.stack([ids[row].roll(int(mask[row].sum())) for row in range(len(ids))]),
                mask.flip(1),
            )
            for ids, mask in turns
        ]
    return turns, [torch.cat(texts) for texts in zip(*rows, strict=True)]


def assert_rows_are_their_solo_runs(model, turns, texts, tolerance=3 * ROUNDING, **options):
    cache, seen, logits = DynamicYaRNCache(**options), [], []
    for ids, mask in turns:
        seen.append(mask)
        logits.append(logits_of(model, ids, cache, attention_mask=torch.cat(seen, dim=1)))
    together, shown = torch.cat(logits, dim=1), torch.cat(seen, dim=1).bool()
    for row, text in enumerate(texts):
        assert_close(together[row][shown[row]], logits_of(model, text[None])[0], tolerance)
    return cache


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rotated_copy", [True, False], ids=["copy", "no copy"])
def test_rows_are_their_solo_runs(case, backend, side, rotated_copy):
    model = tiny(case, backend)
    patch_llama(model, rescale_every=STEP)
    assert_rows_are_their_solo_runs(model, *turns_of(TURNS, side), rotated_copy=rotated_copy)


@pytest.mark.parametrize("case", CASES[:2])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_tile_by_tile(case, backend, monkeypatch):
    monkeypatch.setattr(sdpa, "TILE", 8)
    model = tiny(case, backend)
    patch_llama(model, rescale_every=STEP)
    assert_rows_are_their_solo_runs(model, *turns_of([(60, 20), (9, 50), (40, 40)]))


@pytest.mark.parametrize("case", CASES[:2])
def test_a_mask_with_holes(case):
    """In one call, without a cache."""
    model, ids = tiny(case), random_ids(70, rows=2)
    patch_llama(model, rescale_every=STEP)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, 20:41], mask[1, 5:9], mask[1, 50:52] = 0, 0, 0
    logits = logits_of(model, ids, attention_mask=mask, use_cache=False)
    for row in range(2):
        shown = mask[row].bool()
        assert_close(logits[row][shown], logits_of(model, ids[row][shown][None])[0], 3 * ROUNDING)


@pytest.mark.parametrize("case", CASES[:2])
def test_without_the_mask_that_the_cache_remembers(case):
    model = tiny(case)
    patch_llama(model, rescale_every=STEP)
    turns, texts = turns_of([(20, 9, 14), (5, 30, 1)])
    cache = assert_rows_are_their_solo_runs(model, turns, texts)
    more = random_ids(15, rows=3, seed=9)
    logits = logits_of(model, more, cache)
    for row, text in enumerate(texts):
        solo = logits_of(model, torch.cat((text, more[row]))[None])[0, -15:]
        assert_close(logits[row], solo, 3 * ROUNDING)


@pytest.mark.parametrize("case", CASES[:2])
def test_documents_after_padding(case):
    """A document that begins after a padded turn is its solo run too."""
    model = tiny(case)
    patch_llama(model, rescale_every=STEP)
    cache = assert_rows_are_their_solo_runs(model, *turns_of([(20, 9, 14), (5, 30, 1)]))
    document = random_ids(60, rows=3, seed=9)
    positions = torch.arange(60).expand(3, -1)
    logits = [
        logits_of(model, part, cache, position_ids=where)
        for part, where in zip(document.split(45, 1), positions.split(45, 1), strict=True)
    ]
    assert_close(torch.cat(logits, dim=1), logits_of(model, document), 3 * ROUNDING)


@pytest.mark.parametrize("case", CASES[:2])
def test_generate_in_a_second_turn(case):
    model = tiny(case)
    patch_llama(model, rescale_every=STEP)
    turns, texts = turns_of([(20, 9, 14), (5, 30, 1)])
    cache = DynamicYaRNCache()
    ids, mask = (torch.cat(parts, dim=1) for parts in zip(*turns, strict=True))
    logits_of(model, turns[0][0], cache, attention_mask=turns[0][1])
    together = generate(model, ids, cache, new_tokens=30, attention_mask=mask)
    for row, text in enumerate(texts):
        assert torch.equal(together[row], generate(model, text[None], new_tokens=30)[0])


def test_no_more_keys_are_read_than_there_is_padding(monkeypatch):
    """Beside the window: what lies before is neither rotated nor masked."""
    model = tiny("mistral-window")  # of 12
    patch_llama(model, rescale_every=STEP)
    turns, _ = turns_of([(60, 57, 60), (5, 5, 5), (1, 1, 1)])
    widths = []
    of = masks.Masks.of

    def noted(self, *args, **kwargs):
        mask = of(self, *args, **kwargs)
        widths.append(mask.shape[-1])
        return mask

    cache, seen = DynamicYaRNCache(), []
    monkeypatch.setattr(masks.Masks, "of", noted)
    for ids, mask in turns:
        seen.append(mask)
        widths.clear()
        logits_of(model, ids, cache, attention_mask=torch.cat(seen, dim=1))
    assert set(widths) == {12}, "padding on the left widens nothing"
    turns, _ = turns_of([(60, 60, 60), (5, 2, 5), (1, 1, 1)])
    cache, seen = DynamicYaRNCache(), []
    for ids, mask in turns:
        seen.append(mask)
        widths.clear()
        logits_of(model, ids, cache, attention_mask=torch.cat(seen, dim=1))
    assert set(widths) == {12 + 3}


def test_what_stock_does_within_its_window():
    """As the docs say: stock's masks count padding."""
    model = tiny("mistral-window")
    ids = random_ids(25)
    mask = torch.ones(1, 25, dtype=torch.long)
    mask[0, 6:13] = 0
    where = (mask.cumsum(-1) - 1).clamp(min=0)
    solo = logits_of(model, ids[mask.bool()][None])[0, -1]
    stock = logits_of(model, ids, DynamicCache(), attention_mask=mask, position_ids=where)[0, -1]
    assert stock.shape == (VOCABULARY,)
    assert (stock - solo).abs().max() > 0.1
    patch_llama(model)
    ours = logits_of(model, ids, attention_mask=mask, position_ids=where)[0, -1]
    assert_close(ours, solo)
