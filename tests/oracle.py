"""The contract, computed the slow way: NumPy, float64, complex rotations, one query at a time.

Nothing here comes from the package under test. A Llama is read from its state dict.
"""

import math

import numpy as np

PLAIN = 10**9  # a window that no text reaches: plain RoPE


def scale_at(position, window, step, max_scale=math.inf):
    """s(p): 1 up to the window, then stairs of `step` tokens, each as high as its far end."""
    beyond = position + 1 - window
    if beyond <= 0:
        return 1.0
    return min((window + math.ceil(beyond / step) * step) / window, max_scale)


def frequencies(scale, dim, base, window, beta_fast=32, beta_slow=1, truncate=True):
    """Radians per token of each pair at this scale."""

    def pair_that_turns(times):
        return dim * math.log(window / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    result = []
    for pair in range(dim // 2):
        theta = base ** (-2 * pair / dim)
        stretch = min(max((pair - low) / (high - low), 0), 1)
        result.append((1 - stretch) * theta + stretch * theta / scale)
    return np.array(result)


def gain_at(scale, attention_factor=None):
    if scale <= 1:
        return 1.0
    return 0.1 * math.log(scale) + 1 if attention_factor is None else attention_factor


def llama_logits(
    model,
    tokens,
    window,
    step,
    *,
    positions=None,
    allowed=None,
    max_scale=math.inf,
    attention_factor=None,
    **ramp,
):
    """Logits (T, vocabulary) of one row.

    Args:
        model: a LlamaForCausalLM; only its config's sizes and its weights are used.
        tokens: (T,) integers.
        window: L0, in tokens.
        step: width of a stair, in tokens.
        positions: (T,), default 0 .. T-1.
        allowed: (T, T) which key each query sees, default causal.
        max_scale: cap of the scale.
        attention_factor: gain beyond the window, in place of the formula.
        **ramp: betas and truncate.
    """
    config = model.config
    weights = {name: w.detach().double().numpy() for name, w in model.state_dict().items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {
        "rope_theta": getattr(config, "rope_theta", None)
    }
    base = rope["rope_theta"]
    count = len(tokens)
    positions = np.arange(count) if positions is None else np.asarray(positions)
    allowed = np.tri(count, dtype=bool) if allowed is None else np.asarray(allowed)
    scales = [scale_at(p, window, step, max_scale) for p in positions]

    def norm(states, weight):
        return states / np.sqrt((states**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def split(states, number):  # (T, number, D/2) complex
        states = states.reshape(count, number, dim)
        return states[..., : dim // 2] + 1j * states[..., dim // 2 :]

    hidden = weights["model.embed_tokens.weight"][np.asarray(tokens)]
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        normed = norm(hidden, weights[prefix + "input_layernorm.weight"])
        query = split(normed @ weights[prefix + "self_attn.q_proj.weight"].T, heads)
        key = split(normed @ weights[prefix + "self_attn.k_proj.weight"].T, kv_heads)
        value = (normed @ weights[prefix + "self_attn.v_proj.weight"].T).reshape(
            count, kv_heads, dim
        )
        attended = np.zeros((count, heads, dim))
        for i in range(count):
            freq = frequencies(scales[i], dim, base, window, **ramp)
            gain = gain_at(scales[i], attention_factor)
            seen = np.flatnonzero(allowed[i])
            turned = key[seen] * gain * np.exp(1j * positions[seen][:, None, None] * freq)
            for head in range(heads):
                group = head // (heads // kv_heads)
                mine = query[i, head] * gain * np.exp(1j * positions[i] * freq)
                score = (turned[:, group].conj() * mine).sum(-1).real / math.sqrt(dim)
                weight = np.exp(score - score.max())
                attended[i, head] = (weight / weight.sum()) @ value[seen, group]
        hidden = (
            hidden + attended.reshape(count, -1) @ weights[prefix + "self_attn.o_proj.weight"].T
        )
        normed = norm(hidden, weights[prefix + "post_attention_layernorm.weight"])
        gate = normed @ weights[prefix + "mlp.gate_proj.weight"].T
        up = normed @ weights[prefix + "mlp.up_proj.weight"].T
        hidden = (
            hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T
        )
    return norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
