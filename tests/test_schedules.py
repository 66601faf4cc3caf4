"""From positions to scales, and from scales to frequencies and a gain."""

import itertools
import math

import oracle
import pytest
import torch
from conftest import tiny_config, yarn_schedule
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_dynyarn import DynamicYaRNConfig
from hf_dynyarn.resolve import resolve_schedule


class TestScale:
    @pytest.mark.parametrize("step", [1, 7, 32, 100])
    def test_is_the_contract_at_every_position(self, step):
        positions = torch.arange(300)[None]
        expected = [oracle.scale_at(p, 32, step) for p in range(300)]
        assert yarn_schedule(step=step).scale(positions)[0].tolist() == expected

    def test_around_the_window(self):
        lengths = torch.tensor([[31, 32, 33, 40, 41]])
        assert yarn_schedule(step=8).scale(lengths - 1)[0].tolist() == [
            1,
            1,
            40 / 32,
            40 / 32,
            48 / 32,
        ]

    @pytest.mark.parametrize("step", [1, 7, 1000])
    def test_never_below_length_over_window(self, step):
        positions = torch.arange(500)[None]
        assert (yarn_schedule(step=step).scale(positions) >= (positions + 1) / 32).all()

    def test_max_scale_caps(self):
        assert yarn_schedule(max_scale=1.5).scale(torch.tensor([[40, 47, 48, 400]]))[
            0
        ].tolist() == [
            41 / 32,
            1.5,
            1.5,
            1.5,
        ]

    def test_fine_tuned_never_goes_below_its_factor(self):
        assert yarn_schedule(min_scale=2.0).scale(torch.tensor([[0, 63, 95]]))[0].tolist() == [
            2,
            2,
            3,
        ]

    def test_forward_has_one_scale_for_each_row(self):
        positions = torch.tensor([[-1, 0, 1], [60, 61, 62]])
        expected = [[1.0] * 3, [63 / 32] * 3]
        assert yarn_schedule(per_forward=True).scale(positions).tolist() == expected


# transformers' static yarn at `factor = s` is what a forward call of s * L0 tokens must be.
GRID = list(
    itertools.product(
        [16, 64, 128],  # head_dim
        [32, 4096, 8192],  # L0
        [1e4, 5e5, 1e6],  # theta
        [(None, None), (64.0, 2.0), (16.0, 0.5)],  # betas
        [None, True, False],  # truncate
        [None, 1.3],  # attention_factor
    )
)


class TestFrequencies:
    @pytest.mark.parametrize("factor", [1.0001, 1.5, 7.3, 40.0])
    def test_equal_those_of_transformers_bit_for_bit(self, factor):
        for dim, window, theta, (fast, slow), truncate, attention_factor in GRID:
            options = {
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
                "attention_factor": attention_factor,
            }
            given = {name: value for name, value in options.items() if value is not None}
            stock_config = tiny_config(
                hidden_size=2 * dim,
                num_attention_heads=2,
                max_position_embeddings=int(window * factor),
                rope_theta=theta,
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": window,
                    **given,
                },
            )
            freq, gain = ROPE_INIT_FUNCTIONS["yarn"](stock_config, device="cpu")
            ours = resolve_schedule(stock_config, DynamicYaRNConfig(**options))
            scale = torch.tensor([factor], dtype=torch.float64)
            assert torch.equal(ours.inv_freq(scale)[0], freq)
            assert ours.gain(scale).item() == pytest.approx(gain, rel=1e-7)

    def test_equal_the_oracle(self):
        for scale, truncate in itertools.product([1.0, 1.7, 20.0], [True, False]):
            for dim, window, base in [(16, 32, 1e4), (64, 8192, 1e5), (128, 4096, 5e5)]:
                ours = yarn_schedule(window, 1, dim, base, truncate=truncate)
                expected = oracle.frequencies(scale, dim, base, window, truncate=truncate)
                actual = ours.inv_freq(torch.tensor(scale, dtype=torch.float64))
                torch.testing.assert_close(
                    actual.double(), torch.as_tensor(expected), rtol=1e-6, atol=0
                )

    def test_at_scale_one_are_the_trained_ones_bit_for_bit(self):
        freq, _ = ROPE_INIT_FUNCTIONS["linear"](
            tiny_config(rope_scaling={"rope_type": "linear", "factor": 1.0}), device="cpu"
        )
        assert torch.equal(yarn_schedule().inv_freq(torch.ones(1, dtype=torch.float64))[0], freq)

    def test_of_several_scales_are_those_of_each(self):
        scale = torch.tensor([[1.0, 1.5], [3.0, 9.0]], dtype=torch.float64)
        together = yarn_schedule().inv_freq(scale)
        assert together.shape == (2, 2, 8)
        for row, column in itertools.product(range(2), range(2)):
            assert torch.equal(together[row, column], yarn_schedule().inv_freq(scale[row, column]))

    def test_gain(self):
        scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
        assert yarn_schedule().gain(scale).tolist() == pytest.approx([1, 1, 0.1 * math.log(2) + 1])
        given = yarn_schedule(attention_factor=1.25).gain(scale).tolist()
        assert given == [1, 1, 1.25]
