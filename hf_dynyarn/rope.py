"""Dynamic YaRN as pure functions: from positions to the rotation of queries and keys.

With `L0` the trained window (tokens), `D` the head dimension and `n = p + 1` for the token at
0-based position `p`:

    (1) s(p)      = 1                                         n <= L0
                  = (L0 + ceil((n - L0) / step) * step) / L0  n >  L0, at most `max_scale`
    (2) theta_i   = rope_theta^(-2i/D),  i = 0 .. D/2 - 1     radians per token
    (3) dim(r)    = D ln(L0 / (2 pi r)) / (2 ln rope_theta)   the pair that turns r times in L0
    (4) w_i       = clamp((i - lo) / (hi - lo), 0, 1)         from dim(beta_fast) to dim(beta_slow)
    (5) freq_i(s) = (1 - w_i) theta_i + w_i theta_i / s
    (6) gain(s)   = 1 for s <= 1, else 0.1 ln s + 1           on cos and sin: on logits squared

(2) to (6) are YaRN (Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4), computed in the
order of transformers' `_compute_yarn_parameters`, so that `freq(s)` has the bits of its `yarn` at
`factor = s`. (1) is this package's: the paper (section 3.3) takes one `s = max(1, n / L0)` for a
whole forward call, which is kept as `schedule="forward"`. The reference module
(github.com/jquesnelle/yarn) differs from the paper: its scale never shrinks again after a long
text, has no `max(1, .)`, and its patch ignores the model's own base. Here both schedules follow
the paper.
"""

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

import torch

SCHEDULES = ("position", "forward")


@dataclass(frozen=True)
class DynamicYaRNConfig:
    """Options of Dynamic YaRN. Every default means: as the model's own config says.

    Args:
        original_max_position_embeddings: the trained window `L0`, in tokens. Default: the value of
            that name in the model's `rope_parameters`, else its `max_position_embeddings`.
        rescale_every: width of a stair of the scale, in tokens. Default: `max(1, L0 // 32)`.
        max_scale: upper bound of the scale, at least 1. Default: no bound.
        schedule: `"position"`, the scale belongs to the query's position (exact under any cut of
            the text), or `"forward"`, the paper's one scale per forward call and row (cached and
            uncached results differ).
        beta_fast: rotations in `L0` tokens from which a pair is left as trained. Default: the
            model's own, else 32.
        beta_slow: rotations in `L0` tokens up to which a pair is fully stretched. Default: the
            model's own, else 1.
        attention_factor: gain on cos and sin beyond `L0`. Default: the model's own, else `0.1 ln s
            + 1`.
        truncate: whether the bounds of the ramp are rounded outwards to whole pairs. Default: the
            model's own, else True.
        finetuned: True where the weights were trained with the config's `factor`, so that the scale
            never goes below it. Default: the model's own key, else False.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, or two options contradict each other.
    """

    original_max_position_embeddings: int | None = None
    rescale_every: int | None = None
    max_scale: float | None = None
    schedule: str = "position"
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    finetuned: bool | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, got {self.schedule!r}.")
        _check_number(
            "original_max_position_embeddings",
            self.original_max_position_embeddings,
            int,
            at_least=1,
        )
        _check_number("rescale_every", self.rescale_every, int, at_least=1)
        _check_number("max_scale", self.max_scale, float, at_least=1)
        for name in ("beta_fast", "beta_slow", "attention_factor"):
            _check_number(name, getattr(self, name), float, above=0)
        for name in ("truncate", "finetuned"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(
                    f"{name} must be a bool or None, got {value!r} of type {type(value).__name__}."
                )
        if self.schedule == "forward" and self.rescale_every is not None:
            raise ValueError(
                'rescale_every must be None with schedule="forward", which has no stairs, got '
                f"{self.rescale_every}. "
                'Leave it out, or use schedule="position".'
            )

    @classmethod
    def from_options(
        cls, config: "DynamicYaRNConfig | None", options: dict[str, Any]
    ) -> "DynamicYaRNConfig":
        """Makes a config of either a ready one or keyword options.

        Raises:
            TypeError: `config` is of another type, both are given, or an option is unknown.
        """
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config must be a {cls.__name__}, got {type(config).__name__}.")
        if config is not None and options:
            raise TypeError(
                f"options must come as a {cls.__name__} or as keywords, got both: "
                f"{sorted(options)}."
            )
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"options must be among {known}, got {unknown}.")
        return config if config is not None else cls(**options)


@dataclass(frozen=True)
class YaRNSchedule:
    """Dynamic YaRN for one model: a `DynamicYaRNConfig` without defaults left to fill in.

    Two equal schedules rotate alike, so a cache filled under one may be continued under the other.

    Args:
        head_dim: dimension `D` of a head, all of it rotated.
        rope_theta: base of the frequencies.
        original_max_position_embeddings: the trained window `L0`, in tokens.
        min_scale: lower bound of the scale: 1, or the trained factor of a fine-tuned model.

    The others are those of `DynamicYaRNConfig`.

    Raises:
        ValueError: `beta_fast <= beta_slow`, or `max_scale < min_scale`.
    """

    head_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    rescale_every: int
    max_scale: float = math.inf
    min_scale: float = 1.0
    per_forward: bool = False
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast must be greater than beta_slow, got beta_fast={self.beta_fast} and "
                f"beta_slow={self.beta_slow} (where left out, the model's own, else 32 and 1)."
            )
        if self.max_scale < self.min_scale:
            raise ValueError(
                f"max_scale must be at least the factor {self.min_scale} that the model was "
                f"fine-tuned with, got {self.max_scale}. Raise it, or pass finetuned=False."
            )

    def scale(self, positions: torch.Tensor) -> torch.Tensor:
        """Scale of each token of a forward call: equation (1), or the paper's if `per_forward`.

        Args:
            positions: `(B, T)` integers, 0-based; -1 marks padding, whose scale means nothing.

        Returns:
            `(B, T)` float64.
        """
        window, step = self.original_max_position_embeddings, self.rescale_every
        if self.per_forward:
            length = (positions.amax(-1, keepdim=True) + 1).expand_as(positions)
        else:
            stairs = -((window - 1 - positions) // step)  # -(-x // step): rounded up
            length = window + stairs * step
        scale = (length.double() / window).clamp(min=1.0)
        return scale.clamp(min=self.min_scale, max=self.max_scale)

    def inv_freq(self, scale: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale, equations (2) to (5).

        Args:
            scale: `(...)` float64.

        Returns:
            `(..., D/2)` float32, radians per token.
        """
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32)
        period = self.rope_theta ** (pairs / self.head_dim)  # 1 / theta_i, tokens per radian
        ramp = self._ramp()
        stretched = 1.0 / (scale.float()[..., None] * period)
        # 1 - (1 - w), not w: the roundings of the reference implementation.
        keep = 1 - ramp
        mixed = stretched * (1 - keep) + (1.0 / period) * keep
        # At scale 1 the two summands need not add up to theta_i in float32; the trained model has
        # theta_i itself.
        return torch.where(scale[..., None] > 1, mixed, 1.0 / period)

    def gain(self, scale: torch.Tensor) -> torch.Tensor:
        """Gain on cos and sin at each scale, equation (6).

        Args:
            scale: `(...)` float64.

        Returns:
            `(...)` float32.
        """
        beyond = 0.1 * scale.log() + 1.0 if self.attention_factor is None else self.attention_factor
        return torch.where(scale > 1, beyond, 1.0).float()

    def _ramp(self) -> torch.Tensor:
        """Stretch `w_i` of each pair, equations (3) and (4): `(D/2,)` float32, 0 as trained."""
        window, log_theta = self.original_max_position_embeddings, math.log(self.rope_theta)
        low, high = (
            self.head_dim * math.log(window / (turns * 2 * math.pi)) / (2 * log_theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(self.head_dim // 2, dtype=torch.float32)
        return ((pairs - low) / (high - low)).clamp(0, 1)


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


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pair `(i, i + D/2)` of every head, the layout of transformers' Llama. Never in place.

    Args:
        states: `(B, H, T, D)` queries or keys.
        cos: `(B, T, D/2)`.
        sin: `(B, T, D/2)`.

    Returns:
        `(B, H, T, D)`, in the wider of the two dtypes.
    """
    cos, sin = cos[:, None], sin[:, None]  # (B, 1, T, D/2)
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _check_number(
    name: str, value: Any, kind: type, *, at_least: float = -math.inf, above: float = -math.inf
) -> None:
    if value is None:
        return
    allowed = numbers.Integral if kind is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise TypeError(
            f"{name} must be a {kind.__name__} or None, got {value!r} of type "
            f"{type(value).__name__}."
        )
    number = float(value)
    if not (math.isfinite(number) and number >= at_least and number > above):
        bound = f"at least {at_least}" if at_least > -math.inf else f"greater than {above}"
        raise ValueError(f"{name} must be finite and {bound}, got {value!r}.")
