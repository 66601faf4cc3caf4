"""What the config of a model and the options of its user make together."""

import pytest
import torch
from conftest import tiny_config, yarn_schedule

from hf_dynyarn import DynamicYaRNConfig
from hf_dynyarn.resolve import resolve_schedule


class TestResolved:
    def test_defaults_come_from_the_model(self):
        resolved = resolve_schedule(tiny_config(max_position_embeddings=4096), DynamicYaRNConfig())
        assert resolved == yarn_schedule(window=4096, step=128)

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
        assert resolved == yarn_schedule(
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
