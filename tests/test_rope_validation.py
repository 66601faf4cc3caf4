"""Our rope type beside transformers' own: configs are checked alike, and other types do not notice.

The first test is that of transformers' `tests/utils/test_modeling_rope_utils.py`.
"""

import logging

import pytest
from conftest import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_dynyarn  # noqa: F401  (what is tested is that it was imported)
from hf_dynyarn import patch_llama
from hf_dynyarn.versions import TRANSFORMERS

OURS = {"rope_type": "dynamic_yarn", "original_max_position_embeddings": 16}
NAME = "rope_parameters" if TRANSFORMERS >= (5, 0) else "rope_scaling"

VALID = {
    "factor": ["linear", "dynamic", "yarn", "longrope"],
    "attention_factor": ["yarn", "longrope"],
    "beta_fast": ["yarn"],
    "beta_slow": ["yarn"],
    "short_factor": ["longrope"],
    "long_factor": ["longrope"],
}


def validate(**rope):
    config = tiny_config()
    setattr(config, NAME, {"rope_theta": 1e4, **rope} if TRANSFORMERS >= (5, 0) else rope)
    if TRANSFORMERS >= (5, 0):
        config.validate_rope()
    else:
        from transformers.modeling_rope_utils import rope_config_validation

        rope_config_validation(config)


@pytest.mark.parametrize("rope_type", sorted({*ROPE_INIT_FUNCTIONS} - {"default", "proportional"}))
def test_every_type_wants_its_parameters(rope_type):
    with pytest.raises(KeyError, match="Missing required keys"):
        validate(rope_type=rope_type)
    for parameter, types in VALID.items():
        if rope_type not in types:
            with pytest.raises(KeyError, match="Missing required keys"):
                validate(**{"rope_type": rope_type, parameter: True})


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="transformers")
    return lambda: [record.getMessage() for record in caplog.records]


def test_ours_is_silent(said):
    validate(**OURS)
    validate(**OURS, rescale_every=4, max_scale=8.0, beta_fast=16.0, truncate=False)
    assert not said()


def test_ours_warns_of_parameters_of_others(said):
    validate(**OURS, factor=4.0)
    assert len(said()) == 1
    assert "Unrecognized keys" in said()[0]
    assert "factor" in said()[0]


def test_a_type_that_nobody_knows(said):
    validate(rope_type="nobody's")
    assert len(said()) == 1
    assert "Missing validation function" in said()[0]
    with pytest.raises(KeyError, match="nobody's"):
        AutoModelForCausalLM.from_config(with_rope({"rope_type": "nobody's"}))


def with_rope(rope):
    """A config that was edited, which transformers does not validate."""
    config = tiny_config()
    setattr(config, NAME, {"rope_theta": 1e4, **rope} if TRANSFORMERS >= (5, 0) else dict(rope))
    return config


@pytest.mark.parametrize("how", ["written", "edited", "a keyword", "a keyword for the model"])
def test_models_of_ours_are_made(tmp_path, how):
    plain = AutoModelForCausalLM.from_config(tiny_config())
    plain.save_pretrained(tmp_path)
    rope = {"rope_theta": 1e4, **OURS} if TRANSFORMERS >= (5, 0) else dict(OURS)
    if how == "written":
        with_rope(OURS).save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    elif how == "edited":
        model = AutoModelForCausalLM.from_pretrained(tmp_path, config=with_rope(OURS))
    elif how == "a keyword":
        config = AutoConfig.from_pretrained(tmp_path, **{NAME: rope})
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **{NAME: rope})
    patch_llama(model)
    schedule = model.model._dynamic_yarn.schedule
    assert schedule.original_max_position_embeddings == 16
