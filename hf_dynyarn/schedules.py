"""Positions to scales, frequencies and gains: Dynamic YaRN and its kin.

With `L0` the trained window (tokens), `D` the rotated dimension of a head and `n = p + 1` for the
token at 0-based position `p`:

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

Models trained with other frequencies than (2) (`linear`, `llama3`) keep them as their `theta_i`,
and dim(r) is the pair that turns `r` times with these. Models trained to stretch in another way
(`dynamic`, `longrope`) go on in that way, with the scale of (1), or with the switch from short to
long, at each position.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .options import DynamicYaRNConfig


@dataclass(frozen=True)
class Schedule(ABC):
    """From positions to scales, and from scales to frequencies and gain, for one model.

    This is a `DynamicYaRNConfig` without defaults left to fill in; `make_schedule` makes it. Each
    subclass is one way to stretch. Two equal schedules rotate alike, so a cache filled under one
    may be continued under the other.

    Args:
        rotary_dim: how many dimensions `D` of a head are rotated, the first ones.
        rope_theta: base of the frequencies.
        original_max_position_embeddings: the trained window `L0`, in tokens.
        min_scale: lower bound of the scale: 1, or the trained factor of a fine-tuned model.

    The others are those of `DynamicYaRNConfig`.

    Raises:
        ValueError: `max_scale < min_scale`.
    """

    # Options of `DynamicYaRNConfig` that mean something to this kind, beside `schedule` and
    # `original_max_position_embeddings`.
    OPTIONS: ClassVar[tuple[str, ...]] = ("rescale_every", "max_scale")

    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    rescale_every: int
    max_scale: float = math.inf
    min_scale: float = 1.0
    per_forward: bool = False

    def __post_init__(self) -> None:
        if self.max_scale < self.min_scale:
            raise ValueError(
                f"max_scale must be at least the factor {self.min_scale} that the model was "
                f"fine-tuned with, got {self.max_scale}. Raise it, or pass finetuned=False."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Schedule":
        return self  # nothing in it changes, and a graph that knows it serves copies of a cache

    @classmethod
    def fields_of(
        cls, rope: dict[str, Any], rotary_dim: int, options: DynamicYaRNConfig
    ) -> dict[str, Any]:
        """Gives the fields that only this kind has, or takes in another way than the others do.

        Args:
            rope: the model's rope parameters; `factor` and the trained window are there.
            rotary_dim: the rotated dimension.
            options: what the user asks for.
        """
        return {}

    def constants(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What `inv_freq` goes by beside the scale: `(D/2,)` float32 each, on the device.

        A graph cannot make them of Python's numbers without leaving the device, so they are made
        once, before.
        """
        return ()

    @abstractmethod
    def inv_freq(self, scale: torch.Tensor, *constants: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale.

        Args:
            scale: `(...)` float64.
            *constants: what `constants` gives. Default: they are made anew.

        Returns:
            `(..., D/2)` float32, radians per token, on the device of `scale`.
        """

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

    def gain(self, scale: torch.Tensor) -> torch.Tensor:
        """Gain on cos and sin at each scale.

        Args:
            scale: `(...)` float64.

        Returns:
            `(...)` float32.
        """
        return torch.ones_like(scale, dtype=torch.float32)


@dataclass(frozen=True)
class YaRNSchedule(Schedule):
    """Dynamic YaRN: equations (1) to (6).

    Args:
        trained: frequencies that the model was trained with, radians per token, where they are not
            those of (2). They fall from pair to pair.
        mscale: with `mscale_all_dim`, in place of (6): the gain is `(0.1 mscale ln s + 1) / (0.1
            mscale_all_dim ln s + 1)`, as DeepSeek has it.
        mscale_all_dim: see `mscale`.

    The others are those of `Schedule` and `DynamicYaRNConfig`.

    Raises:
        ValueError: `beta_fast <= beta_slow`.
    """

    OPTIONS = (
        *Schedule.OPTIONS,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
        "finetuned",
    )

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    trained: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast must be greater than beta_slow, got beta_fast={self.beta_fast} and "
                f"beta_slow={self.beta_slow} (where left out, the model's own, else 32 and 1)."
            )

    @classmethod
    def fields_of(
        cls, rope: dict[str, Any], rotary_dim: int, options: DynamicYaRNConfig
    ) -> dict[str, Any]:
        finetuned, truncate = options.finetuned, options.truncate
        if finetuned is None:
            finetuned = bool(rope.get("finetuned"))
        if finetuned and rope["rope_type"] != "yarn":
            raise ValueError(
                "finetuned=True needs a model whose rope_parameters have the factor it was trained "
                f"with, got rope type {rope['rope_type']!r}. Leave finetuned out."
            )
        return {
            "min_scale": max(1.0, float(rope["factor"])) if finetuned else 1.0,
            "beta_fast": float(options.beta_fast or rope.get("beta_fast") or 32),
            "beta_slow": float(options.beta_slow or rope.get("beta_slow") or 1),
            "attention_factor": options.attention_factor or rope.get("attention_factor"),
            "truncate": rope.get("truncate", True) if truncate is None else truncate,
            "mscale": rope.get("mscale"),
            "mscale_all_dim": rope.get("mscale_all_dim"),
            "trained": _trained_frequencies(rope, rotary_dim),
        }

    def constants(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Periods, trained frequencies and the part of these that is kept: equations (2) to (4)."""
        if self.trained is None:
            periods = _periods(self.rope_theta, self.rotary_dim, device)
            trained = 1.0 / periods
        else:
            trained = torch.tensor(self.trained, dtype=torch.float32, device=device)
            periods = 1.0 / trained
        # 1 - w, of which stretching takes 1 - (1 - w): the roundings of the reference.
        return periods, trained, 1 - self._ramp(device)

    def inv_freq(self, scale: torch.Tensor, *constants: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale, `(..., D/2)`: equation (5)."""
        periods, trained, keep = constants or self.constants(scale.device)
        stretched = 1.0 / (scale.float()[..., None] * periods)
        mixed = stretched * (1 - keep) + trained * keep
        # At scale 1 the two summands need not add up to theta_i in float32; the trained model has
        # theta_i itself.
        return torch.where(scale[..., None] > 1, mixed, trained)

    def gain(self, scale: torch.Tensor) -> torch.Tensor:
        """Gain on cos and sin at each scale: equation (6), or as `mscale` has it."""
        if self.attention_factor is not None:
            beyond = torch.full_like(scale, self.attention_factor)
        elif self.mscale and self.mscale_all_dim:
            log = 0.1 * scale.log()
            beyond = (self.mscale * log + 1.0) / (self.mscale_all_dim * log + 1.0)
        else:
            beyond = 0.1 * scale.log() + 1.0
        return torch.where(scale > 1, beyond, 1.0).float()

    def _ramp(self, device: torch.device) -> torch.Tensor:
        """Stretch `w_i` of each pair, equations (3) and (4): `(D/2,)` float32, 0 as trained."""
        low, high = self._pair_that_turns(self.beta_fast), self._pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float32, device=device)
        return ((pairs - low) / (high - low)).clamp(0, 1)

    def _pair_that_turns(self, times: float) -> float:
        """Which pair, a fraction, turns so many times in the trained window: equation (3)."""
        window, log_theta = self.original_max_position_embeddings, math.log(self.rope_theta)
        if self.trained is None:
            return self.rotary_dim * math.log(window / (times * 2 * math.pi)) / (2 * log_theta)
        # How much more than `times` each pair turns, logarithmic: falls through 0 at the pair.
        excess = [math.log(window * freq / (times * 2 * math.pi)) for freq in self.trained]
        pair = max(sum(value >= 0 for value in excess) - 1, 0)
        between = excess[pair] >= 0 and pair + 1 < len(excess)
        slope = excess[pair] - excess[pair + 1] if between else 2 * log_theta / self.rotary_dim
        return pair + excess[pair] / slope


@dataclass(frozen=True)
class NTKSchedule(Schedule):
    """Dynamic NTK, for models whose config says `dynamic`: (1), and a base that grows with it.

    theta_i(s) = (rope_theta (factor s - (factor - 1))^(D / (D - 2)))^(-2i/D)

    as in transformers' `_compute_dynamic_ntk_parameters` at a length of `s L0`. No gain.

    Args:
        factor: the model's own.
    """

    factor: float = 1.0

    @classmethod
    def fields_of(
        cls, rope: dict[str, Any], rotary_dim: int, options: DynamicYaRNConfig
    ) -> dict[str, Any]:
        return {"factor": float(rope["factor"])}

    def inv_freq(self, scale: torch.Tensor, *constants: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale, `(..., D/2)`."""
        grown = self.factor * scale - (self.factor - 1)
        base = self.rope_theta * grown ** (self.rotary_dim / (self.rotary_dim - 2))
        stretched = 1.0 / _periods(base.float()[..., None], self.rotary_dim, scale.device)
        trained = 1.0 / _periods(self.rope_theta, self.rotary_dim, scale.device)
        return torch.where(scale[..., None] > 1, stretched, trained)


@dataclass(frozen=True)
class LongRoPESchedule(Schedule):
    """LongRoPE (arXiv:2402.13753): short factors up to the trained window, the long ones beyond.

    The scale is 1 or `factor`, and the gain that of the model throughout.

    Args:
        factor: how many times the trained window the long factors were made for.
        short_factor: by which each pair is slowed within the window.
        long_factor: by which each pair is slowed beyond it.
        attention_factor: gain on cos and sin.

    Raises:
        ValueError: `factor <= 1`, or a list of factors has another length than `D/2`.
    """

    OPTIONS = ()

    factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor <= 1:
            raise ValueError(
                "the factor of a longrope model must be greater than 1, got "
                f"{self.factor}: nothing to stretch. Leave the model unpatched."
            )
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != self.rotary_dim // 2:
                raise ValueError(
                    f"rope_parameters[{name!r}] of the model must have {self.rotary_dim // 2} "
                    f"numbers, one for each pair, got {len(getattr(self, name))}."
                )

    @classmethod
    def fields_of(
        cls, rope: dict[str, Any], rotary_dim: int, options: DynamicYaRNConfig
    ) -> dict[str, Any]:
        factor, gain = float(rope["factor"]), rope.get("attention_factor")
        if gain is None:
            trained = rope["original_max_position_embeddings"]
            gain = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(trained))
        return {
            "rescale_every": 1,
            "factor": factor,
            "short_factor": tuple(rope["short_factor"]),
            "long_factor": tuple(rope["long_factor"]),
            "attention_factor": float(gain),
        }

    def scale(self, positions: torch.Tensor) -> torch.Tensor:
        """1 up to the window, else `factor`: `(B, T)` float64."""
        return torch.where(super().scale(positions) > 1, self.factor, 1.0).double()

    def constants(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Short and long frequencies."""
        periods = _periods(self.rope_theta, self.rotary_dim, device)
        return tuple(
            1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * periods)
            for factors in (self.short_factor, self.long_factor)
        )

    def inv_freq(self, scale: torch.Tensor, *constants: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale, `(..., D/2)`."""
        short, long = constants or self.constants(scale.device)
        return torch.where(scale[..., None] > 1, long, short)

    def gain(self, scale: torch.Tensor) -> torch.Tensor:
        """The model's gain, whatever the scale."""
        return torch.full_like(scale, self.attention_factor, dtype=torch.float32)


def _periods(
    rope_theta: float | torch.Tensor, rotary_dim: int, device: torch.device | str
) -> torch.Tensor:
    """`1 / theta_i` of equation (2), tokens per radian: `(..., D/2)` float32."""
    even = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    return rope_theta ** (even / rotary_dim)


def _trained_frequencies(rope: dict[str, Any], rotary_dim: int) -> tuple[float, ...] | None:
    """Frequencies of `linear` and `llama3` models, in transformers' roundings; None for others."""
    theta = 1.0 / _periods(rope["rope_theta"], rotary_dim, "cpu")
    if rope["rope_type"] == "linear":
        return tuple((theta / rope["factor"]).tolist())
    if rope["rope_type"] != "llama3":
        return None
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    # As often as a pair turns in the window before Llama 3.1's own stretch, it is slowed: not at
    # all from `high` turns, by `factor` up to `low`, and in between by a mixture.
    period = 2 * math.pi / theta
    share = (rope["original_max_position_embeddings"] / period - low) / (high - low)
    slowed = theta / rope["factor"]
    mixed = (1 - share) * theta / rope["factor"] + share * theta
    return tuple(torch.where(share > 1, theta, torch.where(share < 0, slowed, mixed)).tolist())
