"""The rotation itself."""

import math

import pytest
import torch

from hf_dynyarn.rope import rotary_tables, rotate


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
