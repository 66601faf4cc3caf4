"""What a user may ask for."""

import math

import pytest
import torch
from conftest import logits_of, random_ids

from hf_dynyarn import DynamicYaRNConfig, patch_llama

LONG = random_ids(70)


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


class TestRefusedOptions:
    def test_unknown(self, model):
        with pytest.raises(TypeError, match=r"among \[.*'rescale_every'.*\], got \['rescale'\]"):
            patch_llama(model, rescale=3)

    def test_both_kinds(self, model):
        with pytest.raises(TypeError, match="got both"):
            patch_llama(model, DynamicYaRNConfig(), rescale_every=3)

    def test_not_a_config(self, model):
        with pytest.raises(TypeError, match="must be a DynamicYaRNConfig, got dict"):
            patch_llama(model, {"rescale_every": 3})

    def test_leave_an_earlier_patch_as_it_was(self, model):
        patch_llama(model, rescale_every=7)
        expected = logits_of(model, LONG)
        with pytest.raises(ValueError, match="rescale_every"):
            patch_llama(model, rescale_every=-1)
        with pytest.raises(ValueError, match="beta_fast"):
            patch_llama(model, beta_fast=0.5)
        assert torch.equal(logits_of(model, LONG), expected)
