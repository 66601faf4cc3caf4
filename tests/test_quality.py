"""The benchmarks of quality on tiny models: what they compare, and that a run can be resumed."""

import csv
from types import SimpleNamespace

import pytest
import torch
from conftest import logits_of, random_ids, tiny_llama
from torch.nn.functional import cross_entropy

from hf_dynyarn import patch_llama

LENGTH, BIN = 64, 16  # over a window of 32
NAMES = ("plain RoPE", "ours")


@pytest.fixture
def bench(results, monkeypatch):
    """`quality.perplexity` with tiny models and texts."""
    from quality import perplexity

    monkeypatch.setattr(perplexity, "LONG", LENGTH)
    monkeypatch.setattr(perplexity, "BIN", BIN)
    monkeypatch.setattr(perplexity, "named", lambda model, dtype: tiny_llama())
    monkeypatch.setattr(
        perplexity, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: None)
    )
    monkeypatch.setattr(perplexity, "ids_of", lambda _, text, length: ids_of(text, length))
    return perplexity


def ids_of(text, length):
    return random_ids(200, seed=len(text))[:, :length]


def written(results):
    with (results / "perplexity_32k.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_perplexity_of_ours_is_that_of_a_patched_model(bench, results):
    bench.perplexity_32k("qwen", names=NAMES)
    model = tiny_llama()
    patch_llama(model)
    ids = ids_of("report", LENGTH + 1)
    losses = cross_entropy(logits_of(model, ids)[0, :-1], ids[0, 1:], reduction="none")
    found = [
        float(one["mean"])
        for one in written(results)
        if (one["quantity"], one["variant"]) == ("report", "ours")
    ]
    torch.testing.assert_close(torch.tensor(found), losses.view(-1, BIN).mean(1), rtol=2e-5, atol=0)


def test_an_interrupted_run_goes_on_where_it_stopped(bench, results, monkeypatch):
    whole, read = bench.losses, []

    def losses(rival, ids, title):
        read.append(title)
        if len(read) == 2:
            raise KeyboardInterrupt
        return whole(rival, ids, title)

    monkeypatch.setattr(bench, "losses", losses)
    with pytest.raises(KeyboardInterrupt):
        bench.perplexity_32k("qwen", names=NAMES)
    assert len(written(results)) == LENGTH // BIN
    bench.perplexity_32k("qwen", names=NAMES)
    first, *rest = (f"{text}, {name}" for text in bench.LONG_TEXTS for name in NAMES)
    assert read == [first, rest[0], *rest]
    bench.perplexity_32k("gemma", names=NAMES)  # another model's rows are not taken for its own
    keys = {
        (one["model"], one["quantity"], one["variant"], one["tokens"]) for one in written(results)
    }
    assert len(keys) == len(written(results)) == 2 * (1 + len(rest)) * LENGTH // BIN


def test_a_longer_run_adds_what_is_missing(bench, results):
    def means():
        return {(one["variant"], one["tokens"]): one["mean"] for one in written(results)}

    bench.perplexity_32k("qwen", [2 * BIN], NAMES)
    short = means()
    assert {tokens for _, tokens in short} == {"16", "32"}
    bench.perplexity_32k("qwen", names=NAMES)
    assert len(means()) == len(written(results)) // 2 == 2 * LENGTH // BIN  # two texts
    assert short.items() <= means().items()
    bench.perplexity_32k("qwen", names=NAMES, dtype="float32")
    assert {one["dtype"] for one in written(results)} == {"bfloat16", "float32"}


def test_half_a_bin_is_not_taken_for_a_whole_one(bench):
    with pytest.raises(ValueError, match="must be a multiple of 16, got 40"):
        bench.perplexity_32k("qwen", [40], NAMES)


def test_all_rivals_are_read_where_none_is_named(bench, results):
    bench.perplexity_32k("qwen")
    assert len({one["variant"] for one in written(results)}) == 8


def test_a_patched_twin_shares_the_weights_and_leaves_the_stock_model_alone(bench):
    from common import patched

    stock = tiny_llama()
    ids = random_ids(LENGTH)
    before = logits_of(stock, ids)
    twin = patched(stock)
    assert all(
        one is other for one, other in zip(stock.parameters(), twin.parameters(), strict=True)
    )
    assert not torch.equal(logits_of(twin, ids)[:, 32:], before[:, 32:])
    torch.testing.assert_close(logits_of(stock, ids), before, rtol=0, atol=0)
