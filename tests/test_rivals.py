"""What the benchmarks of quality compare: each rival does what its name says."""

import math

import numpy as np
import pytest
import torch
from conftest import TEXT, WINDOW, assert_close, logits_of, random_ids, tiny_llama
from families import CASES, base_of, tiny
from oracle import frequencies, gain_at, scale_at, stepwise_logits
from torch import nn

LENGTH, DIM = 72, 16
FAMILIES = ("llama", "qwen2", "gemma3_text")
FACTORS = {"static yarn 2": 2.0, "static yarn 4": 4.0}


@pytest.fixture(autouse=True)
def rivals(benchmarks):
    from quality import rivals

    return rivals


def read(rival, ids, sizes):
    """Logits of all of `ids`, read in pieces of these sizes."""
    cache = rival.start()
    return torch.cat([rival.read(piece, cache) for piece in ids.split(sizes, dim=1)], 1)


def turn_of(name, case, model):
    """What a rival whose scale goes by the position does in each layer at each position."""

    def turn(index, position):
        kind = CASES[case][1][index]
        theta, scale = base_of(model.config, kind), scale_at(position, WINDOW, 1)
        if kind == "w" or name == "plain RoPE":
            return frequencies(1.0, DIM, theta, WINDOW), 1.0
        if name == "dynamic NTK, per position":
            theta *= (2 * scale - 1) ** (DIM / (DIM - 2))
            return frequencies(1.0, DIM, theta, WINDOW), 1.0
        scale = FACTORS.get(name, scale)
        return frequencies(scale, DIM, theta, WINDOW), gain_at(scale)

    return turn


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("name", ["plain RoPE", *FACTORS, "dynamic NTK, per position", "ours"])
def test_scale_of_the_position(rivals, name, case):
    model = tiny(case).double()
    ids = random_ids(LENGTH)
    expected = stepwise_logits(model, ids[0], turn_of(name, case, model))
    rival = rivals.make(model, name, LENGTH)
    assert_close(read(rival, ids, rival.piece)[0], expected)
    assert_close(read(rival, ids, 11)[0], expected)


@pytest.mark.parametrize("case", FAMILIES)
def test_all_rivals_share_the_weights_and_leave_the_model_alone(rivals, case):
    model = tiny(case)
    ids = random_ids(LENGTH)
    before = logits_of(model, ids)
    for name in rivals.names_for(model.config):
        rival = rivals.make(model, name, LENGTH)
        changed = read(rival, ids, rival.piece)
        pairs = zip(model.parameters(), rival.model.parameters(), strict=True)
        assert all(one is other for one, other in pairs)
        assert torch.equal(changed[:, WINDOW:], before[:, WINDOW:]) == (name == rivals.PLAIN)
        if name not in (*FACTORS, rivals.SELF_EXTEND):
            assert_close(changed[:, :WINDOW], before[:, :WINDOW])
        assert torch.equal(logits_of(model, ids), before)


def test_one_scale_per_call_is_refused_where_layers_have_their_own(rivals):
    model = tiny("gemma3_text")
    assert rivals.FORWARD not in rivals.names_for(model.config)
    with pytest.raises(ValueError, match="schedule must be"):
        rivals.make(model, rivals.FORWARD, LENGTH)
    assert rivals.names_for(tiny("qwen2").config) == rivals.NAMES


def test_one_scale_per_call_is_static_at_that_factor(rivals):
    model = tiny_llama().double()
    ids = TEXT[:, : 2 * WINDOW]
    static = rivals.make(model, "static yarn 2", LENGTH)
    assert_close(
        read(rivals.make(model, rivals.FORWARD, LENGTH), ids, 64), read(static, ids, 64), 1e-6
    )


@pytest.mark.parametrize(("held", "name"), [((4.0, 4.0), "static yarn 4"), ((None, None), "ours")])
def test_both_held_is_static_and_both_by_position_is_ours(rivals, held, name):
    from quality.recall_why import under

    model = tiny_llama().double()
    ids = TEXT[:, :LENGTH]
    expected = read(rivals.make(model, name, LENGTH), ids, 11)
    assert_close(logits_of(under(model, *held), ids), expected)


@pytest.mark.parametrize("held", [(4.0, None), (None, 4.0), (None, 1.0)])
def test_one_of_frequencies_and_gain_is_held(held):
    from quality.recall_why import under

    def turn(index, position):
        scale = scale_at(position, WINDOW, 1)
        return frequencies(held[0] or scale, DIM, 1e4, WINDOW), gain_at(held[1] or scale)

    model = tiny_llama().double()
    ids = TEXT[:, :LENGTH]
    assert_close(logits_of(under(model, *held), ids)[0], stepwise_logits(model, ids[0], turn))


class AsCached(nn.Module):
    """The rotation of each position at the scale of the call that read it."""

    def __init__(self, piece):
        super().__init__()
        self.piece = piece

    def forward(self, x, position_ids):
        tables = []
        for position in position_ids[0].tolist():
            last = min(position // self.piece * self.piece + self.piece, LENGTH) - 1
            scale = scale_at(last, WINDOW, 1)
            angles = np.tile(frequencies(scale, DIM, 1e4, WINDOW), 2) * position
            tables.append(gain_at(scale) * np.stack((np.cos(angles), np.sin(angles))))
        return torch.tensor(np.stack(tables, axis=1)).to(x)[:, None]


def test_stale_keys_stay_as_their_own_call_turned_them(rivals):
    model, piece = tiny_llama().double(), 10
    ids = TEXT[:, :LENGTH]
    found = read(rivals.make(model, rivals.STALE, LENGTH), ids, piece)
    model.model.rotary_emb = AsCached(piece)
    assert_close(found, logits_of(model, ids))


def self_extend_naively(query, key, value, scaling, inv_freq, neighbours, group):
    """One query and one key at a time, by complex numbers: the equations of `self_extend.py`."""
    heads, queries, dim = query.shape[1:]
    groups, length = heads // key.shape[1], key.shape[2]
    complex_query, complex_key = (
        torch.complex(states[0, :, :, : dim // 2], states[0, :, :, dim // 2 :]).numpy()
        for states in (query, key)
    )
    output = np.zeros((heads, queries, dim))
    for head in range(heads):
        for index in range(queries):
            q = length - queries + index
            scores = []
            for k in range(q + 1):
                distance = q - k
                if distance >= neighbours:
                    distance = q // group + neighbours - neighbours // group - k // group
                turned = complex_query[head, index] * np.exp(1j * distance * inv_freq.numpy())
                product = turned * complex_key[head // groups, k].conj()
                scores.append(scaling * product.real.sum())
            weights = np.exp(scores - np.max(scores))
            seen = value[0, head // groups, : q + 1].numpy()
            output[head, index] = weights / weights.sum() @ seen
    return torch.tensor(output)[None]


@pytest.mark.parametrize("queries", [1, 7, 40], ids=lambda queries: f"{queries} queries")
@pytest.mark.parametrize(("neighbours", "group"), [(8, 3), (5, 4), (64, 3), (8, 1)])
def test_self_extend_against_its_equations(rivals, monkeypatch, queries, neighbours, group):
    from quality import self_extend

    monkeypatch.setattr(self_extend, "TILE", 16)
    generator = torch.Generator().manual_seed(0)

    def draw(heads, tokens):
        shape = (1, heads, tokens, DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = draw(4, queries), draw(2, 40), draw(2, 40)
    inv_freq = torch.tensor(frequencies(1.0, DIM, 1e4, WINDOW)).float()
    settings = 0.7, inv_freq, neighbours, group
    found = self_extend.attend(*inputs, *settings)
    assert_close(found, self_extend_naively(*inputs, *settings))


@pytest.mark.parametrize("case", FAMILIES)
def test_any_cut_under_self_extend_is_the_same(rivals, case):
    model = tiny(case).double()
    ids = random_ids(LENGTH, rows=2)
    rival = rivals.make(model, rivals.SELF_EXTEND, LENGTH)
    whole = rival.model(ids, use_cache=False).logits
    for sizes in (LENGTH, 13, 1):
        assert_close(read(rival, ids, sizes), whole, 1e-10)


@pytest.mark.parametrize("case", FAMILIES)
def test_self_extend_without_groups_is_the_stock_model(rivals, case):
    from quality.self_extend import self_extended

    model = tiny(case).double()
    ids = random_ids(LENGTH)
    inv_freq = torch.tensor(frequencies(1.0, DIM, base_of(model.config, "r"), WINDOW)).float()
    for neighbours, group in ((8, 1), (LENGTH, 5)):
        assert_close(
            logits_of(self_extended(model, inv_freq, neighbours, group), ids),
            logits_of(model, ids),
            1e-5,
        )
    grouped = logits_of(self_extended(model, inv_freq, 8, 5), ids)
    assert_close(grouped[:, :8], logits_of(model, ids)[:, :8], 1e-5)
    assert (grouped - logits_of(model, ids)).abs().amax((0, 2))[9:].min() > 1e-3


@pytest.mark.parametrize(("window", "longest"), [(8192, 16384), (32768, 49152), (256, 1024)])
def test_groups_are_the_smallest_by_which_distances_lie_within_half_the_window(
    rivals, window, longest
):
    from quality.self_extend import group_for

    neighbours, group = group_for(window, longest)

    def farthest(group):
        return neighbours + math.ceil((longest - neighbours) / group)

    assert farthest(group) <= window // 2 < farthest(group - 1)
