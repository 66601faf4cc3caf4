import itertools
import math

import oracle
import pytest
import torch
from conftest import tiny_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_dynyarn import DynamicYaRNConfig
from hf_dynyarn.resolve import resolve_schedule
from hf_dynyarn.rope import rotary_tables, rotate
from hf_dynyarn.schedules import YaRNSchedule


def schedule(window=32, step=1, dim=16, base=10000.0, **options):
    return YaRNSchedule(
        rotary_dim=dim,
        rope_theta=base,
        original_max_position_embeddings=window,
        rescale_every=step,
        **options,
    )


class TestScale:
    @pytest.mark.parametrize("step", [1, 7, 32, 100])
    def test_is_the_contract_at_every_position(self, step):
        positions = torch.arange(300)[None]
        expected = [oracle.scale_at(p, 32, step) for p in range(300)]
        assert schedule(step=step).scale(positions)[0].tolist() == expected

    def test_around_the_window(self):
        lengths = torch.tensor([[31, 32, 33, 40, 41]])
        assert schedule(step=8).scale(lengths - 1)[0].tolist() == [1, 1, 40 / 32, 40 / 32, 48 / 32]

    @pytest.mark.parametrize("step", [1, 7, 1000])
    def test_never_below_length_over_window(self, step):
        positions = torch.arange(500)[None]
        assert (schedule(step=step).scale(positions) >= (positions + 1) / 32).all()

    def test_max_scale_caps(self):
        assert schedule(max_scale=1.5).scale(torch.tensor([[40, 47, 48, 400]]))[0].tolist() == [
            41 / 32,
            1.5,
            1.5,
            1.5,
        ]

    def test_fine_tuned_never_goes_below_its_factor(self):
        assert schedule(min_scale=2.0).scale(torch.tensor([[0, 63, 95]]))[0].tolist() == [2, 2, 3]

    def test_forward_has_one_scale_for_each_row(self):
        positions = torch.tensor([[-1, 0, 1], [60, 61, 62]])
        expected = [[1.0] * 3, [63 / 32] * 3]
        assert schedule(per_forward=True).scale(positions).tolist() == expected


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
                ours = schedule(window, 1, dim, base, truncate=truncate)
                expected = oracle.frequencies(scale, dim, base, window, truncate=truncate)
                actual = ours.inv_freq(torch.tensor(scale, dtype=torch.float64))
                torch.testing.assert_close(
                    actual.double(), torch.as_tensor(expected), rtol=1e-6, atol=0
                )

    def test_at_scale_one_are_the_trained_ones_bit_for_bit(self):
        freq, _ = ROPE_INIT_FUNCTIONS["linear"](
            tiny_config(rope_scaling={"rope_type": "linear", "factor": 1.0}), device="cpu"
        )
        assert torch.equal(schedule().inv_freq(torch.ones(1, dtype=torch.float64))[0], freq)

    def test_of_several_scales_are_those_of_each(self):
        scale = torch.tensor([[1.0, 1.5], [3.0, 9.0]], dtype=torch.float64)
        together = schedule().inv_freq(scale)
        assert together.shape == (2, 2, 8)
        for row, column in itertools.product(range(2), range(2)):
            assert torch.equal(together[row, column], schedule().inv_freq(scale[row, column]))

    def test_gain(self):
        scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
        assert schedule().gain(scale).tolist() == pytest.approx([1, 1, 0.1 * math.log(2) + 1])
        given = schedule(attention_factor=1.25).gain(scale).tolist()
        assert given == [1, 1, 1.25]


class TestRotation:
    def test_equals_complex_multiplication(self):
        states = torch.randn(2, 3, 5, 16, dtype=torch.float64)
        positions = torch.randint(0, 1000, (2, 5))
        freq, gain = torch.rand(2, 8), torch.tensor([1.0, 1.2])
        cos, sin = rotary_tables(positions, freq, gain, torch.float64)
        turn = gain[:, None, None] * torch.exp(1j * positions[..., None] * freq[:, None].double())
        expected = torch.complex(states[..., :8], states[..., 8:]) * turn[:, None]
        actual = rotate(states, cos, sin)
        # Angles of up to 1000 radians are float32: 3e-5 at most.
        torch.testing.assert_close(
            actual, torch.cat((expected.real, expected.imag), -1), rtol=0, atol=3e-4
        )

    def test_leaves_its_input_alone(self):
        states = torch.randn(1, 1, 4, 16)
        before = states.clone()
        rotate(
            states,
            *rotary_tables(torch.arange(4)[None], torch.rand(1, 8), torch.ones(1), torch.float32),
        )
        assert torch.equal(states, before)

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_writes_the_same_bits_where_told(self, out_dtype, dtype, interleaved):
        """Into a part of a buffer; of another dtype, as a copy would."""
        states = torch.randn(2, 3, 5, 20).to(dtype)
        cos, sin = torch.randn(2, 2, 5, 8).to(dtype)
        buffer = torch.zeros(2, 3, 9, 20, dtype=out_dtype)
        rotate(states, cos, sin, interleaved, out=buffer[:, :, 2:7])
        expected = torch.zeros_like(buffer)
        expected[:, :, 2:7] = rotate(states, cos, sin, interleaved)
        assert torch.equal(buffer, expected)

    def test_counts_past_256_in_bfloat16(self):
        freq, gain = torch.ones(1, 1), torch.ones(1)
        cos, _ = rotary_tables(torch.tensor([[100_001]]), freq, gain, torch.bfloat16)
        assert cos.item() == pytest.approx(math.cos(100_001), abs=2**-8)


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"rescale_every": 0}, ValueError),
            ({"rescale_every": 2.0}, TypeError),
            ({"rescale_every": True}, TypeError),
            ({"original_max_position_embeddings": -1}, ValueError),
            ({"max_scale": 0.5}, ValueError),
            ({"max_scale": math.inf}, ValueError),
            ({"max_scale": math.nan}, ValueError),
            ({"max_scale": "4"}, TypeError),
            ({"schedule": "layer"}, ValueError),
            ({"schedule": ["position"]}, ValueError),
            ({"schedule": "forward", "rescale_every": 8}, ValueError),
            ({"beta_fast": 0}, ValueError),
            ({"beta_slow": -1}, ValueError),
            ({"attention_factor": 0.0}, ValueError),
            ({"truncate": 1}, TypeError),
            ({"finetuned": "yes"}, TypeError),
        ],
    )
    def test_refuses(self, options, error):
        with pytest.raises(error, match=f"{next(iter(reversed(options)))}.* must be .*got|must be"):
            DynamicYaRNConfig(**options)

    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            DynamicYaRNConfig().rescale_every = 3

    def test_defaults_come_from_the_model(self):
        resolved = resolve_schedule(tiny_config(max_position_embeddings=4096), DynamicYaRNConfig())
        assert resolved == schedule(window=4096, step=128)

    def test_a_yarn_model_brings_its_window_and_ramp_but_its_factor_is_no_cap(self):
        stock = tiny_config(
            max_position_embeddings=256,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.1,
                "truncate": False,
            },
        )
        resolved = resolve_schedule(stock, DynamicYaRNConfig())
        assert resolved == schedule(
            64, 2, beta_fast=16.0, beta_slow=2.0, attention_factor=1.1, truncate=False
        )
        assert resolved.scale(torch.tensor([[639]])).item() == 10
        assert resolve_schedule(stock, DynamicYaRNConfig(finetuned=True)).min_scale == 4

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"beta_fast": 1.0}, "beta_fast must be greater than beta_slow"),
            ({"beta_slow": 32.0}, "beta_fast must be greater than beta_slow"),
            ({"finetuned": True}, "finetuned=True needs"),
        ],
    )
    def test_refuses_what_contradicts_the_model(self, options, match):
        with pytest.raises(ValueError, match=match):
            resolve_schedule(tiny_config(), DynamicYaRNConfig(**options))

    def test_refuses_a_cap_below_the_trained_factor(self):
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        stock = tiny_config(rope_scaling=rope, max_position_embeddings=128)
        with pytest.raises(ValueError, match="max_scale must be at least the factor"):
            resolve_schedule(stock, DynamicYaRNConfig(finetuned=True, max_scale=2.0))
