"""Positions to rotations, as pure functions: Dynamic YaRN and its kin.

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
import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

SCHEDULES = ("position", "forward")

# The rope type of models that ask for Dynamic YaRN in their own config.
DYNAMIC_YARN = "dynamic_yarn"


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

    @abstractmethod
    def inv_freq(self, scale: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale.

        Args:
            scale: `(...)` float64.

        Returns:
            `(..., D/2)` float32, radians per token.
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

    def inv_freq(self, scale: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale, `(..., D/2)`: equations (2) to (5)."""
        if self.trained is None:
            periods = _periods(self.rope_theta, self.rotary_dim)
            trained = 1.0 / periods
        else:
            trained = torch.tensor(self.trained, dtype=torch.float32)
            periods = 1.0 / trained
        ramp = self._ramp()
        stretched = 1.0 / (scale.float()[..., None] * periods)
        # 1 - (1 - w), not w: the roundings of the reference implementation.
        keep = 1 - ramp
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

    def _ramp(self) -> torch.Tensor:
        """Stretch `w_i` of each pair, equations (3) and (4): `(D/2,)` float32, 0 as trained."""
        low, high = self._pair_that_turns(self.beta_fast), self._pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float32)
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

    def inv_freq(self, scale: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale, `(..., D/2)`."""
        grown = self.factor * scale - (self.factor - 1)
        base = self.rope_theta * grown ** (self.rotary_dim / (self.rotary_dim - 2))
        stretched = 1.0 / _periods(base.float()[..., None], self.rotary_dim)
        trained = 1.0 / _periods(self.rope_theta, self.rotary_dim)
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

    def inv_freq(self, scale: torch.Tensor) -> torch.Tensor:
        """Frequencies at each scale, `(..., D/2)`."""
        periods = _periods(self.rope_theta, self.rotary_dim)
        short, long = (
            1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
            for factors in (self.short_factor, self.long_factor)
        )
        return torch.where(scale[..., None] > 1, long, short)

    def gain(self, scale: torch.Tensor) -> torch.Tensor:
        """The model's gain, whatever the scale."""
        return torch.full_like(scale, self.attention_factor, dtype=torch.float32)


# By transformers' name of the rope type.
SCHEDULE_OF: dict[str, type[Schedule]] = {
    "default": YaRNSchedule,
    "linear": YaRNSchedule,
    "llama3": YaRNSchedule,
    "yarn": YaRNSchedule,
    DYNAMIC_YARN: YaRNSchedule,
    "dynamic": NTKSchedule,
    "longrope": LongRoPESchedule,
}

# Rope types whose parameters name the trained window; elsewhere it is `max_position_embeddings`.
NAMES_WINDOW = ("yarn", "longrope", DYNAMIC_YARN)


def make_schedule(
    rope: dict[str, Any],
    head_dim: int,
    max_position_embeddings: int,
    options: DynamicYaRNConfig,
) -> Schedule:
    """Fills the defaults of `options` in from the model.

    Args:
        rope: the model's `rope_parameters`, in the spelling of transformers 5.
        head_dim: dimension of a head.
        max_position_embeddings: the model's own, in tokens.
        options: what the user asks for.

    Raises:
        ValueError: the rope type is not supported, or an option contradicts the model.
    """
    rope_type = rope["rope_type"]
    if rope_type not in SCHEDULE_OF:
        raise ValueError(
            f"the rope type of the model must be one of {tuple(SCHEDULE_OF)}, got {rope_type!r}. "
            "Load the model with one of these, or leave it unpatched."
        )
    for name in ("alpha", "mrope_section"):
        if rope.get(name) is not None:
            raise ValueError(
                f"rope_parameters[{name!r}] of the model must be None, got {rope[name]!r}. "
                "Leave the model unpatched."
            )
    _check_number("rope_theta", rope["rope_theta"], float, above=0)
    if rope_type == DYNAMIC_YARN:
        options = _with_wishes(options, rope)
    kind = SCHEDULE_OF[rope_type]
    known = ("original_max_position_embeddings", "schedule", *kind.OPTIONS)
    useless = [
        field.name
        for field in fields(options)
        if field.name not in known and getattr(options, field.name) is not None
    ]
    if useless:
        raise ValueError(
            f"the options for a model of rope type {rope_type!r} must be among {known}, got "
            f"{useless}. Leave these out."
        )
    trained = rope.get("original_max_position_embeddings") if rope_type in NAMES_WINDOW else None
    trained = trained or max_position_embeddings
    rope = {"original_max_position_embeddings": trained, **rope}
    rope["factor"] = rope.get("factor") or max_position_embeddings / trained
    rotary_dim = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    window = options.original_max_position_embeddings or trained
    values = {
        "rotary_dim": rotary_dim,
        "rope_theta": float(rope["rope_theta"]),
        "original_max_position_embeddings": window,
        "rescale_every": options.rescale_every or max(1, window // 32),
        "max_scale": math.inf if options.max_scale is None else float(options.max_scale),
        "per_forward": options.schedule == "forward",
    }
    return kind(**{**values, **kind.fields_of(rope, rotary_dim, options)})


def _with_wishes(options: DynamicYaRNConfig, rope: dict[str, Any]) -> DynamicYaRNConfig:
    """Fills in what the config of a model of type `dynamic_yarn` asks for.

    Raises:
        TypeError: its rope parameters are none of ours.
    """
    foreign = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    wishes = {name: value for name, value in rope.items() if name not in foreign}
    known = [one.name for one in fields(options) if one.name not in ("schedule", "finetuned")]
    unknown = sorted(set(wishes) - set(known))
    if unknown:
        raise TypeError(
            f"rope_parameters of type {DYNAMIC_YARN!r} must be among {known}, got {unknown}. "
            "Others are options of patch_llama()."
        )
    missing = {name: wish for name, wish in wishes.items() if getattr(options, name) is None}
    return replace(options, **missing)


def _periods(rope_theta: float | torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """`1 / theta_i` of equation (2), tokens per radian: `(..., D/2)` float32."""
    return rope_theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _trained_frequencies(rope: dict[str, Any], rotary_dim: int) -> tuple[float, ...] | None:
    """Frequencies of `linear` and `llama3` models, in transformers' roundings; None for others."""
    theta = 1.0 / _periods(rope["rope_theta"], rotary_dim)
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
