"""The benchmarks of quality on tiny models: what they compare, and that a run can be resumed."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import logits_of, random_ids, tiny_llama
from torch.nn.functional import cross_entropy

from hf_dynyarn import patch_llama

LENGTH, BIN = 64, 16  # over a window of 32
NAMES = ("plain RoPE", "ours")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where rows go."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "benchmarks")
    import common
    import rows

    for module in (common, rows):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def bench(folder, monkeypatch):
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


def written(folder, bench="perplexity_32k"):
    with (folder / f"{bench}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_perplexity_of_ours_is_that_of_a_patched_model(bench, tmp_path):
    bench.perplexity_32k("qwen", names=NAMES)
    model = tiny_llama()
    patch_llama(model)
    ids = ids_of("report", LENGTH + 1)
    losses = cross_entropy(logits_of(model, ids)[0, :-1], ids[0, 1:], reduction="none")
    found = [
        float(one["mean"])
        for one in written(tmp_path)
        if (one["quantity"], one["variant"]) == ("report", "ours")
    ]
    torch.testing.assert_close(torch.tensor(found), losses.view(-1, BIN).mean(1), rtol=2e-5, atol=0)


def test_an_interrupted_run_goes_on_where_it_stopped(bench, tmp_path, monkeypatch):
    whole, read = bench.losses, []

    def losses(rival, ids, title):
        read.append(title)
        if len(read) == 2:
            raise KeyboardInterrupt
        return whole(rival, ids, title)

    monkeypatch.setattr(bench, "losses", losses)
    with pytest.raises(KeyboardInterrupt):
        bench.perplexity_32k("qwen", names=NAMES)
    assert len(written(tmp_path)) == LENGTH // BIN
    bench.perplexity_32k("qwen", names=NAMES)
    first, *rest = (f"{text}, {name}" for text in bench.LONG_TEXTS for name in NAMES)
    assert read == [first, rest[0], *rest]
    bench.perplexity_32k("gemma", names=NAMES)  # another model's rows are not taken for its own
    keys = {
        (one["model"], one["quantity"], one["variant"], one["tokens"]) for one in written(tmp_path)
    }
    assert len(keys) == len(written(tmp_path)) == 2 * (1 + len(rest)) * LENGTH // BIN


def test_a_longer_run_adds_what_is_missing(bench, folder):
    def means():
        return {(one["variant"], one["tokens"]): one["mean"] for one in written(folder)}

    bench.perplexity_32k("qwen", [2 * BIN], NAMES)
    short = means()
    assert {tokens for _, tokens in short} == {"16", "32"}
    bench.perplexity_32k("qwen", names=NAMES)
    assert len(means()) == len(written(folder)) // 2 == 2 * LENGTH // BIN  # two texts
    assert short.items() <= means().items()
    bench.perplexity_32k("qwen", names=NAMES, dtype="float32")
    assert {one["dtype"] for one in written(folder)} == {"bfloat16", "float32"}


def test_all_rivals_are_read_where_none_is_named(bench, folder):
    bench.perplexity_32k("qwen")
    assert len({one["variant"] for one in written(folder)}) == 8


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
