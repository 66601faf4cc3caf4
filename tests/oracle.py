"""The contract, computed the slow way: float64, complex rotations, one query at a time.

Nothing here comes from the package under test. `llama_logits` reads a Llama from its state dict;
`stepwise_logits` lets the stock model of any family do all but the rotation.
"""

import inspect
import math

import numpy as np
import torch
from transformers import DynamicCache, LlamaForCausalLM

# The name that the installed transformers gives to a cache.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)

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


def stretched(trained, scale, window):
    """The same of frequencies that need not be powers of a base, pair by pair."""
    turns = window * trained / (2 * math.pi)

    def pair_that_turns(times):
        return np.interp(-math.log(times), -np.log(turns), np.arange(len(turns)))

    low, high = math.floor(pair_that_turns(32)), math.ceil(pair_that_turns(1))
    stretch = np.clip((np.arange(len(turns)) - low) / (high - low), 0, 1)
    return (1 - stretch) * trained + stretch * trained / scale


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


def stepwise_logits(model, tokens, turn, interleaved=False):
    """Logits (T, vocabulary) of one row, by the stock model, one token and one fresh cache a time.

    Args:
        model: a stock model for causal language modelling, in float64.
        tokens: (T,) integers.
        turn: gives a layer's frequencies (D/2,) and gain for the query at a position, or None
            where the layer rotates nothing.
        interleaved: whether the pairs of a head are `(2i, 2i + 1)`.
    """
    decoder = model.get_decoder()
    count = decoder.config.num_hidden_layers
    keys, values, logits = [None] * count, [None] * count, []
    now = [0]

    def tell(layer, args, kwargs):
        freq, gain = turn(layer.layer_idx, now[0]) or (np.zeros(1), 1.0)
        width = kwargs["position_embeddings"][0].shape[-1]  # one number per pair, or two
        angles = torch.tensor(np.tile(freq, max(width // len(freq), 1)) * now[0])[None, None]
        if model.config.model_type.startswith("cohere"):  # which has each number twice in a row
            angles = torch.tensor(np.repeat(freq, 2) * now[0])[None, None]
        return args, {**kwargs, "position_embeddings": (angles.cos() * gain, angles.sin() * gain)}

    hooks = [
        layer.self_attn.register_forward_pre_hook(tell, with_kwargs=True)
        for layer in decoder.layers
    ]
    for position, token in enumerate(tokens):
        now[0] = position
        cache = DynamicCache()
        turns = [turn(index, position) for index in range(count)]
        for index in range(count if position else 0):
            cache.update(turned(keys[index], turns[index], interleaved), values[index], index)
        with torch.no_grad():
            output = model(
                torch.tensor([[int(token)]]),
                position_ids=torch.tensor([[position]]),
                **{CACHE: cache},
            )
        logits.append(output.logits[0, -1])
        for index, layer in enumerate(cache.layers):
            new = turned(layer.keys[:, :, -1:], turns[index], interleaved, back_from=position)
            keys[index] = new if position == 0 else torch.cat((keys[index], new), dim=2)
            values[index] = layer.values
    for hook in hooks:
        hook.remove()
    return torch.stack(logits)


def turned(keys, turn, interleaved, back_from=None):
    """Keys (1, H, L, D) of positions 0 .. L-1, rotated; or one key, rotated back from its own."""
    if turn is None:
        return keys
    freq, gain = turn
    positions = np.arange(keys.shape[2]) if back_from is None else np.array([-back_from])
    gain = gain if back_from is None else 1 / gain
    factor = torch.tensor(gain * np.exp(1j * positions[:, None] * freq))
    half = len(freq)
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    pairs = torch.complex(keys[..., first], keys[..., second]) * factor
    result = keys.clone()
    result[..., first], result[..., second] = pairs.real, pairs.imag
    return result
