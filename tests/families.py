"""A tiny model of every family, and what the contract says of each of its layers."""

import copy

import pytest
import torch
from conftest import VOCABULARY, WINDOW
from oracle import frequencies, gain_at, scale_at, stretched
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from hf_dynyarn.versions import TRANSFORMERS

STEP = 4

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
PARTIAL = {"partial_rotary_factor": 0.5}
SLIDING = {"sliding_window": 12}
BOTH = {"layer_types": ["sliding_attention", "full_attention"] * 2}

TRAINED_YARN = {
    "rope_type": "yarn",
    "factor": 1.5,
    "original_max_position_embeddings": WINDOW,
    "truncate": False,
}

# Gemma 3's, a base for each type of layer; its scaling is for layers without a window alone.
BASES = {"rope_theta": 3e5, "rope_local_base_freq": 1e3}
LINEAR = {"rope_type": "linear", "factor": 2.0}

# Family, what its config has beside the common sizes, and of each layer what it does: "r" rotates
# by the contract, "w" has a window within the trained one, "n" rotates nothing.
CASES = {
    "arcee": ({}, "rrrr"),
    "cohere": ({"use_qk_norm": True}, "rrrr"),
    "cohere2": ({**SLIDING, **BOTH}, "wnwn"),
    "exaone4": ({**SLIDING, "sliding_window_pattern": 2}, "wnwn"),
    "exaone4-no window": (
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        "rrrr",
    ),
    "gemma": ({}, "rrrr"),
    "gemma3_text": ({**SLIDING, **BOTH, **BASES, "query_pre_attn_scalar": 24}, "wrwr"),
    "gemma3_text-linear": ({**SLIDING, **BOTH, **BASES, "rope_scaling": LINEAR}, "wrwr"),
    "glm": (PARTIAL, "rrrr"),
    "glm4": (PARTIAL, "rrrr"),
    "gpt_oss": ({**SLIDING, **MOE, "num_local_experts": 4, "rope_scaling": TRAINED_YARN}, "wrwr"),
    "granite": ({"attention_multiplier": 0.3, "residual_multiplier": 0.7}, "rrrr"),
    "llama": ({"attention_bias": True}, "rrrr"),
    "ministral": ({**SLIDING, **BOTH}, "wrwr"),
    "mistral": ({"sliding_window": None}, "rrrr"),
    "mistral-window": (SLIDING, "wwww"),
    "mistral-window past the trained one": ({"sliding_window": WINDOW + 8}, "rrrr"),
    "mixtral": ({"num_local_experts": 4, "sliding_window": None}, "rrrr"),
    "minimax_m2": ({**MOE, "num_local_experts": 4, "rotary_dim": 8, **PARTIAL}, "rrrr"),
    "olmo": ({"clip_qkv": 2.0}, "rrrr"),
    "olmo2": ({}, "rrrr"),
    "olmo3": ({**SLIDING, **BOTH, "rope_theta": 1.5e5, "rope_scaling": TRAINED_YARN}, "wrwr"),
    "olmo3-before its long training": ({**SLIDING, **BOTH, "rope_theta": 1e3}, "wrwr"),
    "phi": (PARTIAL, "rrrr"),
    "phi3": ({}, "rrrr"),
    "phi3-partial": (PARTIAL, "rrrr"),
    "qwen2": ({}, "rrrr"),
    "qwen2-window": (
        {**SLIDING, "use_sliding_window": True, "max_window_layers": 2},
        "rrww",
    ),
    "qwen2_moe": ({**MOE, "num_experts": 4, "shared_expert_intermediate_size": 48}, "rrrr"),
    "qwen3": ({}, "rrrr"),
    "qwen3_moe": ({**MOE, "num_experts": 4, "mlp_only_layers": [1]}, "rrrr"),
    "seed_oss": ({}, "rrrr"),
    "smollm3": ({"no_rope_layers": [1, 0, 1, 0]}, "rnrn"),
    "starcoder2": ({"sliding_window": None}, "rrrr"),
}

INTERLEAVED = ("cohere", "cohere2", "glm", "glm4")

BACKENDS = {"gpt_oss": ["eager"]}  # of others: sdpa and eager

# For other tests.
MORE = {
    "phi3-longrope": (
        {
            "max_position_embeddings": 4 * WINDOW,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
                "long_factor": [1.0, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0],
            },
        },
        "rrrr",
    ),
}


def tiny(case, attn_implementation=None, seed=0):
    """A model whose norms and biases matter too."""
    attn_implementation = attn_implementation or BACKENDS.get(case, ["sdpa"])[0]
    model_type, (options, _) = case.split("-")[0], {**CASES, **MORE}[case]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {model_type}")
    if model_type == "qwen2_moe" and TRANSFORMERS < (5, 0):
        pytest.skip("refused on this transformers: see test_patch.py")
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": WINDOW,
            "initializer_range": 0.15,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
            **({"original_max_position_embeddings": WINDOW} if model_type == "phi3" else {}),
            **copy.deepcopy(options),  # transformers fills rope parameters in, in place
        }
    )
    if model_type == "olmo3" and "full_attention" not in getattr(
        config, "rope_parameters", {"full_attention": ...}
    ):
        pytest.skip("refused on this transformers: see test_models.py")
    config._attn_implementation = attn_implementation
    config._experts_implementation = "eager"  # the only one that takes float64
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.5 * torch.randn_like(weight)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = -1
    return model


def base_of(config, kind):
    """The base of the frequencies of a layer that is "w" or "r"."""
    layer_type = {"w": "sliding_attention", "r": "full_attention"}[kind]
    rope = getattr(config, "rope_parameters", None)
    if rope:
        return rope.get(layer_type, rope)["rope_theta"]
    local = getattr(config, "rope_local_base_freq", config.rope_theta)
    return local if kind == "w" else config.rope_theta


def turn_of(case, model):
    """What the contract says of each layer and position."""
    dim = int(16 * CASES[case][0].get("partial_rotary_factor", 1))

    def turn(index, position):
        kind = CASES[case][1][index]
        if kind == "n":
            return None
        theta = base_of(model.config, kind)
        scale = 1.0 if kind == "w" else scale_at(position, WINDOW, STEP)
        ramp = {}
        if case == "gpt_oss" or (case, kind) == ("olmo3", "r"):
            scale, ramp = max(scale, TRAINED_YARN["factor"]), {"truncate": False}
            if case == "olmo3" and getattr(model.config, "rope_parameters", None):
                ramp = {}  # stock does not see `truncate` where parameters are by layer type
        if (case, kind) == ("gemma3_text-linear", "r"):
            trained = frequencies(1.0, dim, theta, WINDOW) / LINEAR["factor"]
            return stretched(trained, scale, WINDOW), gain_at(scale)
        return frequencies(scale, dim, theta, WINDOW, **ramp), gain_at(scale)

    return turn
