"""`DynamicYaRNConfig`: what a user may ask for, and how it is checked."""

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

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
        check_number(
            "original_max_position_embeddings",
            self.original_max_position_embeddings,
            int,
            at_least=1,
        )
        check_number("rescale_every", self.rescale_every, int, at_least=1)
        check_number("max_scale", self.max_scale, float, at_least=1)
        for name in ("beta_fast", "beta_slow", "attention_factor"):
            check_number(name, getattr(self, name), float, above=0)
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


def check_number(
    name: str, value: Any, kind: type, *, at_least: float = -math.inf, above: float = -math.inf
) -> None:
    """Raises a TypeError or a ValueError unless `value` is None or such a number."""
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
