"""Rotary embeddings as functions of tensors: cosines and sines of angles, and rotating by them."""

import torch


def rotary_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, gain: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of `position * frequency`, times the gain.

    Angles are float32 whatever `dtype` is: bfloat16 cannot count past 256.

    Args:
        positions: `(B, T)` integers.
        inv_freq: `(B, D/2)` float32, radians per token.
        gain: `(B,)` float32.
        dtype: of the result.

    Returns:
        cos and sin, each `(B, T, D/2)`.
    """
    angles = positions[..., None].float() * inv_freq[:, None, :]
    gain = gain[:, None, None]
    return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)


def rotate(
    states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates pair `(i, i + D/2)` of every head, the layout of transformers' Llama. Never in place.

    Args:
        states: `(B, H, T, head_dim)` queries or keys, of which the first `D` numbers are rotated.
        cos: `(B, T, D/2)`.
        sin: `(B, T, D/2)`.
        interleaved: whether the pairs are `(2i, 2i + 1)`. The result has them as `(i, i + D/2)` all
            the same: what counts is that queries and keys agree.
        out: where to write the result, of the shape of `states` and apart from it; nothing is then
            differentiable.

    Returns:
        `(B, H, T, head_dim)`, in the wider of the two dtypes; `out` where it is given.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # (B, 1, T, D/2)
    if interleaved:
        first, second = states[..., : 2 * half : 2], states[..., 1 : 2 * half : 2]
    else:
        first, second = states[..., :half], states[..., half : 2 * half]
    rest = states[..., 2 * half :]
    if out is not None and out.dtype == torch.promote_types(states.dtype, cos.dtype):
        # The roundings of the sums below, without writing the result twice.
        torch.mul(first, cos, out=out[..., :half]).sub_(second * sin)
        torch.mul(second, cos, out=out[..., half : 2 * half]).add_(first * sin)
        out[..., 2 * half :] = rest
        return out
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated if out is None else out.copy_(rotated)
