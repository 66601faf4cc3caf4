"""Rope types: which schedule the rope parameters of a model and the options of a user make."""

import math
from dataclasses import fields, replace
from typing import Any

from .options import DynamicYaRNConfig, check_number
from .schedules import LongRoPESchedule, NTKSchedule, Schedule, YaRNSchedule

# The rope type of models that ask for Dynamic YaRN in their own config.
DYNAMIC_YARN = "dynamic_yarn"

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

# Options that the config of a model of our type may ask for.
WISHES = tuple(
    one.name for one in fields(DynamicYaRNConfig) if one.name not in ("schedule", "finetuned")
)


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
    check_number("rope_theta", rope["rope_theta"], float, above=0)
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
    unknown = sorted(set(wishes) - set(WISHES))
    if unknown:
        raise TypeError(
            f"rope_parameters of type {DYNAMIC_YARN!r} must be among {list(WISHES)}, got "
            f"{unknown}. Others are options of patch_llama()."
        )
    missing = {name: wish for name, wish in wishes.items() if getattr(options, name) is None}
    return replace(options, **missing)
