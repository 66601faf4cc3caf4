"""Packed rows whose documents are told apart by cumulative lengths too, as TRL has them.

On flash: `test_flash.py`.
"""

import pytest
import torch
from conftest import VOCABULARY, assert_close, logits_of, random_ids, tiny_llama
from transformers import DataCollatorWithFlattening

from hf_dynyarn import DynamicYaRNCache, patch_llama

LENGTHS = (5, 50, 1, 33)
DOCUMENTS = [random_ids(length, seed=length) for length in LENGTHS]
IDS = torch.cat(DOCUMENTS, 1)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
BOUNDS = torch.tensor([0, 5, 55, 56, 89], dtype=torch.int32)


def packed(bounds=BOUNDS, **others):
    longest = int(bounds.diff().max()) if len(bounds) > 1 else 0
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return {**lengths, "max_length_q": longest, "max_length_k": longest, **others}


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    model = tiny_llama(attn_implementation=request.param)
    patch_llama(model, rescale_every=7)
    return model


@pytest.fixture
def solo(model):
    """Logits `(1, T, V)` of each document by itself."""
    return torch.cat([logits_of(model, document) for document in DOCUMENTS], 1)


@pytest.mark.parametrize("positions", [POSITIONS, None], ids=["positions", "lengths_alone"])
@pytest.mark.parametrize("use_cache", [False, True], ids=["no_cache", "cache"])
def test_documents_are_their_solo_runs(model, solo, positions, use_cache):
    logits = logits_of(model, IDS, position_ids=positions, use_cache=use_cache, **packed())
    assert_close(logits, solo)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_one_of_the_two_is_enough(model, solo, name):
    assert_close(logits_of(model, IDS, **{name: BOUNDS}), solo)


def test_a_document_without_tokens(model, solo):
    bounds = torch.tensor([0, 5, 5, 55, 56, 89, 89])
    assert_close(logits_of(model, IDS, **packed(bounds)), solo)


def test_bounds_over_several_rows(model, solo):
    """They count on from row to row."""
    ids = torch.cat((IDS, IDS[:, 5:], IDS[:, :5]), 1).view(2, -1)
    bounds = torch.cat((BOUNDS, BOUNDS[2:] - 5 + 89, torch.tensor([178])))
    logits = logits_of(model, ids, **packed(bounds))
    assert_close(logits[:1], solo)
    assert_close(logits[1:], torch.cat((solo[:, 5:], solo[:, :5]), 1))


def test_the_loss_of_flattened_batches_is_that_of_each_document():
    """What padding-free training hands over."""
    labels = [document[0].tolist() for document in DOCUMENTS]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": label} for label in labels]
    )
    assert {"cu_seq_lens_q", "max_length_k", "position_ids"} < set(batch)
    grads, losses = [], []
    for collated in (True, False):
        model = tiny_llama().train()
        patch_llama(model, rescale_every=7)
        if collated:
            loss = model(**batch).loss
        else:
            total = sum(length - 1 for length in LENGTHS)
            pairs = (
                (model(ids).logits[0, :-1], ids[0, 1:]) for ids in DOCUMENTS if ids.shape[1] > 1
            )
            parts = [torch.nn.functional.cross_entropy(*pair, reduction="sum") for pair in pairs]
            loss = sum(parts) / total
        loss.backward()
        losses.append(loss.detach())
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert_close(*losses)
    assert_close(*grads)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"position_ids": torch.arange(89)[None]}, r"must restart where cu_seq_lens_q.*got \[0\]"),
        ({"position_ids": POSITIONS.roll(1, 1)}, "must restart where cu_seq_lens_q"),
        ({"attention_mask": torch.ones_like(IDS)}, "must come without an attention_mask"),
        (packed(BOUNDS[:-1]), r"must rise from 0 to the number of tokens, 89"),
        (packed(BOUNDS[1:]), r"must rise from 0"),
        (packed(BOUNDS[[0, 2, 1, 3, 4]]), r"must rise from 0"),
        (packed(BOUNDS + 1), r"must rise from 0"),
        ({"cu_seq_lens_k": torch.tensor([0, 6, 55, 56, 89])}, r"cu_seq_lens_k must be cu_seq_l"),
        ({"cu_seq_lens_k": BOUNDS[[0, -1]]}, r"must be of the same documents"),
    ],
)
def test_contradictions_are_refused(model, call, error):
    with pytest.raises(ValueError, match=error):
        logits_of(model, IDS, **{**packed(), **call})


@pytest.mark.parametrize("bounds", [BOUNDS.float(), BOUNDS[None], BOUNDS.tolist(), BOUNDS[:0]])
def test_other_types_are_refused(model, bounds):
    with pytest.raises(TypeError, match=r"cu_seq_lens_q must be an integer torch\.Tensor"):
        logits_of(model, IDS, cu_seq_lens_q=bounds)


def test_rows_that_run_into_each_other_are_refused(model):
    with pytest.raises(ValueError, match="must restart where"):
        logits_of(model, IDS[:, :88].view(2, 44), **packed(torch.tensor([0, 5, 88])))


def test_documents_over_a_filled_cache_are_refused(model):
    cache = DynamicYaRNCache()
    logits_of(model, IDS[:, :10], cache)
    with pytest.raises(ValueError, match=r"a cache of 10 tokens"):
        logits_of(model, IDS, cache, **packed())
    assert cache.get_seq_length() == 10
    assert logits_of(model, IDS[:, 10:20], cache).shape[-1] == VOCABULARY
