"""Every rope type: stock up to the window, and beyond it the same promise as Dynamic YaRN."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from conftest import (
    WINDOW,
    assert_close,
    generate,
    logits_of,
    random_ids,
    tiny_config,
    tiny_llama,
)
from families import tiny
from oracle import frequencies, gain_at, scale_at, stepwise_logits, stretched
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, patch_llama
from hf_dynyarn.resolve import resolve_schedule

STEP = 4
LENGTH = 50
DIM = 16

LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0],
    "original_max_position_embeddings": WINDOW,
}
DEEPSEEK = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": WINDOW,
    "mscale": 1.2,
    "mscale_all_dim": 0.6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW}
DYNAMIC_YARN = {
    "rope_type": "dynamic_yarn",
    "original_max_position_embeddings": WINDOW,
    "rescale_every": STEP,
    "beta_fast": 16.0,
}


def model_of(rope, **changes):
    longer = 1 if rope["rope_type"] in ("linear", "llama3", "dynamic") else 4
    if rope["rope_type"] == "longrope":  # where transformers 4 reads it
        changes["original_max_position_embeddings"] = WINDOW
    return tiny_llama(rope_scaling=dict(rope), max_position_embeddings=longer * WINDOW, **changes)


def stock_turn(model, length=None):
    """Frequencies and gain of the stock model at a length."""
    config = model.config
    rope_type = (getattr(config, "rope_parameters", None) or config.rope_scaling)["rope_type"]
    freq, gain = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=length)
    return freq.double().numpy(), gain


def turn_of(rope, model):
    """The contract for each rope type, from stock's own formulas."""
    kind = rope["rope_type"]

    def turn(index, position):
        scale = scale_at(position, WINDOW, STEP)
        if kind in ("linear", "llama3"):
            trained, _ = stock_turn(model)
            return stretched(trained, scale, WINDOW), gain_at(scale)
        if kind == "dynamic":
            return stock_turn(model, round(scale * WINDOW))
        if kind == "longrope":
            return stock_turn(model, position + 1)
        gain = gain_at(scale)
        if "mscale" in rope and scale > 1:
            gain = (0.12 * math.log(scale) + 1) / (0.06 * math.log(scale) + 1)
        return frequencies(scale, DIM, 1e4, WINDOW), gain

    return turn


ROPES = pytest.mark.parametrize(
    "rope",
    [LINEAR, LLAMA3, DYNAMIC, LONGROPE, YARN, DEEPSEEK],
    ids=["linear", "llama3", "dynamic", "longrope", "yarn", "deepseek"],
)


@ROPES
def test_is_stock_up_to_the_window(rope):
    model, ids = model_of(rope), random_ids(WINDOW)
    # Static YaRN stretches at any length; what ours is up to the window is the model as trained.
    stock = tiny_llama() if rope["rope_type"] == "yarn" else model
    expected = logits_of(stock, ids)
    patch_llama(model)
    assert_close(logits_of(model, ids), expected)


@ROPES
def test_is_the_oracle_past_the_window(rope):
    model, ids = model_of(rope).double(), random_ids(LENGTH)
    expected = stepwise_logits(model, ids[0], turn_of(rope, model))
    patch_llama(model, **({} if rope["rope_type"] == "longrope" else {"rescale_every": STEP}))
    assert_close(logits_of(model, ids)[0], expected, 1e-5)


@ROPES
def test_is_the_same_cached(rope):
    model, ids = model_of(rope), random_ids(LENGTH)
    patch_llama(model, **({} if rope["rope_type"] == "longrope" else {"rescale_every": STEP}))
    cache = DynamicYaRNCache()
    parts = [logits_of(model, part, cache) for part in ids.split([20, 11, 1, 1, 1, 9, 7], 1)]
    assert_close(torch.cat(parts, dim=1), logits_of(model, ids))


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE, YARN, DEEPSEEK], ids=lambda r: r["rope_type"])
@pytest.mark.parametrize("length", [20, LENGTH])
def test_forward_schedule_is_one_stock_call(rope, length):
    model, ids = model_of(rope), random_ids(length)
    static = dict(rope, factor=max(length / WINDOW, 1.0))
    stock = logits_of(model_of(static if rope["rope_type"] == "yarn" else rope), ids)
    patch_llama(model, schedule="forward")
    assert_close(logits_of(model, ids), stock)


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=lambda rope: rope["rope_type"])
def test_trained_frequencies_have_the_bits_of_stock(rope):
    model = model_of(rope)
    schedule = resolve_schedule(model.config, DynamicYaRNConfig())
    one = torch.ones((), dtype=torch.float64)
    assert np.array_equal(schedule.inv_freq(one).double().numpy(), stock_turn(model)[0])


def test_llama_31_stretches_pairs_that_turn_less_than_once():
    """By how often they turn as trained, with slowed frequencies; not by their index alone."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    }
    config = tiny_config(
        hidden_size=512,
        max_position_embeddings=131072,
        rope_theta=5e5,
        rope_scaling=rope,
    )
    schedule = resolve_schedule(config, DynamicYaRNConfig())
    assert schedule.original_max_position_embeddings == 131072
    scales = torch.tensor([1.0, 2.0], dtype=torch.float64)
    trained, doubled = schedule.inv_freq(scales).double()
    turns = 131072 * trained / (2 * math.pi)
    assert_close(doubled[turns < 0.8] * 2, trained[turns < 0.8], 1e-9)
    assert torch.equal(doubled[turns > 40], trained[turns > 40])


class TestLongRoPE:
    def test_generation_keeps_the_cache_at_the_switch(self):
        """Stock Phi-3 throws it away."""
        model = tiny("phi3-longrope")
        ids, cache = random_ids(WINDOW - 8), DynamicYaRNCache()
        patch_llama(model)
        tokens = generate(model, ids, cache, new_tokens=20)
        assert cache.get_seq_length() == WINDOW - 8 + 19
        assert torch.equal(tokens, generate(model, ids, new_tokens=20, use_cache=False))
        again = generate(model, random_ids(WINDOW + 5), second := DynamicYaRNCache(), new_tokens=3)
        assert second.get_seq_length() == WINDOW + 5 + again.shape[1] - 1

    def test_unpatching_gives_generate_back(self):
        model = tiny("phi3-longrope")
        with patch_llama(model):
            assert "prepare_inputs_for_generation" in vars(model)
        assert "prepare_inputs_for_generation" not in vars(model)

    def test_scales_are_one_or_the_factor(self):
        model, cache = model_of(LONGROPE), DynamicYaRNCache()
        patch_llama(model)
        logits_of(model, random_ids(WINDOW), cache)
        assert cache.scales == [1.0]
        logits_of(model, random_ids(1), cache)
        assert cache.scales == [4.0]

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"long_factor": [1.0] * 7}, r"\['long_factor'\] of the model must have 8 numbers.*7"),
            ({"factor": 1.0}, r"must be greater than 1, got 1.0.*Leave the model unpatched"),
        ],
    )
    def test_refuses_a_model_that_cannot_be(self, changes, match):
        model = model_of(LONGROPE)
        rope = getattr(model.config, "rope_parameters", None) or model.config.rope_scaling
        rope.update(changes)
        if "factor" in changes:  # transformers 4 computes it
            model.config.max_position_embeddings = WINDOW
        with pytest.raises(ValueError, match=match):
            patch_llama(model)


class TestConfigThatAsksForIt:
    def load(self, tmp_path, rope):
        """As `from_pretrained` does."""
        model = tiny_llama()
        model.config.save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        written = json.loads(file.read_text())
        written.pop("rope_scaling", None)
        name = "rope_parameters" if "rope_parameters" in written else "rope_scaling"
        written[name] = {"rope_theta": 1e4, **rope} if name == "rope_parameters" else rope
        file.write_text(json.dumps(written))
        loaded = LlamaForCausalLM(AutoConfig.from_pretrained(tmp_path)).eval()
        loaded.load_state_dict(model.state_dict())
        return loaded, model

    def test_takes_effect(self, tmp_path):
        asking, model = self.load(tmp_path, DYNAMIC_YARN)
        patch_llama(asking)
        patch_llama(model, rescale_every=STEP, beta_fast=16.0)
        ids = random_ids(LENGTH)
        assert torch.equal(logits_of(asking, ids), logits_of(model, ids))
        patch_llama(asking, rescale_every=8)
        patch_llama(model, rescale_every=8, beta_fast=16.0)
        assert torch.equal(logits_of(asking, ids), logits_of(model, ids))

    def test_takes_effect_class_wide(self, tmp_path):
        patch_llama()
        asking, model = self.load(tmp_path, DYNAMIC_YARN)
        patch_llama(model, rescale_every=STEP, beta_fast=16.0)
        ids = random_ids(LENGTH)
        assert torch.equal(logits_of(asking, ids), logits_of(model, ids))

    def test_takes_effect_by_layer_type(self):
        """In layers without a window; the others keep their scale, whatever they ask for."""
        model = tiny("gemma3_text")
        config = copy.deepcopy(model.config)
        if getattr(config, "rope_parameters", None):
            for rope in config.rope_parameters.values():
                rope.update(DYNAMIC_YARN)
        else:
            config.rope_scaling = DYNAMIC_YARN
        asking = type(model)(config).eval()
        asking.load_state_dict(model.state_dict())
        ids = random_ids(LENGTH)
        expected = logits_of(model, ids[:, :WINDOW])
        assert torch.equal(logits_of(asking, ids[:, :WINDOW]), expected)
        patch_llama(asking)
        patch_llama(model, rescale_every=STEP, beta_fast=16.0)
        assert torch.equal(logits_of(asking, ids), logits_of(model, ids))

    def test_is_stock_within_the_window_until_it_is_patched(self, tmp_path):
        asking, model = self.load(tmp_path, DYNAMIC_YARN)
        ids = random_ids(WINDOW)
        assert torch.equal(logits_of(asking, ids), logits_of(model, ids))
        with pytest.raises(ValueError, match=r"'dynamic_yarn' must be patched.*got 50 tokens"):
            logits_of(asking, random_ids(LENGTH))

    def test_refuses_unknown_options(self, tmp_path):
        asking, _ = self.load(tmp_path, {"rope_type": "default"})
        rope = dict(DYNAMIC_YARN, rope_theta=1e4, rescale=3, schedule="forward")
        newer = hasattr(asking.config, "rope_parameters")
        setattr(asking.config, "rope_parameters" if newer else "rope_scaling", rope)
        with pytest.raises(TypeError, match=r"must be among \[.*got \['rescale', 'schedule'\]"):
            patch_llama(asking)


class TestRefusals:
    @pytest.mark.parametrize(
        ("rope", "options", "match"),
        [
            (DYNAMIC, {"beta_fast": 16.0}, r"type 'dynamic' must be among.*got \['beta_fast'\]"),
            (DYNAMIC, {"finetuned": False}, r"got \['finetuned'\]"),
            (LONGROPE, {"rescale_every": 8}, r"type 'longrope'.*got \['rescale_every'\]"),
            (LINEAR, {"finetuned": True}, "finetuned=True needs a model"),
        ],
    )
    def test_options_that_mean_nothing(self, rope, options, match):
        with pytest.raises(ValueError, match=match):
            patch_llama(model_of(rope), **options)

    @pytest.mark.parametrize("name", ["alpha", "mrope_section"])
    def test_parameters_that_change_the_meaning(self, name):
        model = model_of(DYNAMIC)
        rope = getattr(model.config, "rope_parameters", None) or model.config.rope_scaling
        rope[name] = 1000.0
        with pytest.raises(ValueError, match=rf"\['{name}'\] of the model must be None, got 1000"):
            patch_llama(model)
