"""Segments: columns of new tokens in which no row changes its scale or, mostly, its document."""

from dataclasses import dataclass

import torch

from .schedules import Schedule


@dataclass(frozen=True)
class Segment:
    """Columns `[start, stop)` of the new tokens.

    In these, each row has one scale and sees no key before `first`, nor any before the last of
    `begins` that it has reached.
    """

    start: int
    stop: int
    first: int
    scales: list[float]  # of each row
    inv_freq: torch.Tensor  # (B, D/2) float32, on the CPU
    gain: torch.Tensor  # (B,) float32, on the CPU
    trained: bool  # whether of `AttentionPlan.trained_segments`
    begins: tuple[int, ...] = ()  # new tokens at which further documents begin


def new_starts(positions: torch.Tensor, past: int) -> torch.Tensor:
    """Which new tokens start a document after another, `(B, T)`.

    Args:
        positions: `(B, 1 + T)`, the newest held ones before the new ones.
        past: number of keys held.

    Returns:
        `(B, T)` bool.

    Raises:
        ValueError: the new tokens neither go on from the cache nor start a document at 0.
    """
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if past == 0:
        starts[:, 0] = False  # nothing lies before it
    elif (starts[:, 0] & (positions[:, 1] != 0)).any():
        raise ValueError(
            "position_ids must go on from the tokens in the cache, at "
            f"{(positions[:, 0] + 1).tolist()}, or start a document at 0, got "
            f"{positions[:, 1].tolist()}. Leave them out, or pass the attention_mask of all tokens."
            f"{if_all_is_held(past)}"
        )
    return starts


def if_all_is_held(past: int) -> str:
    """What to do where a prompt holds nothing new; `generate` does not look, and calls the model.

    Args:
        past: number of keys held.
    """
    if past == 0:
        return ""
    return (
        f" If the cache, which holds {past} tokens, holds the whole prompt already, call "
        "cache.crop(-n) to take its last n tokens off, so that there is one of the prompt to read."
    )


def cut_into_segments(
    schedule: Schedule,
    positions: torch.Tensor,
    starts: torch.Tensor | None,
    past: int,
    trained: bool,
    side_by_side: bool = False,
) -> list[Segment]:
    """Cuts the new tokens where any row's scale changes or any row starts a document.

    Args:
        schedule: the schedule in force.
        positions: `(B, T)`, of the new tokens, on the CPU.
        starts: `(B, T)`, which of them start a document, or None.
        past: number of keys held.
        trained: whether all are at the scale that the model was trained at.
        side_by_side: whether documents of one scale stay together in a segment, of one row.
    """
    if trained:
        scale = torch.full_like(positions, schedule.min_scale, dtype=torch.float64)
    else:
        scale = _over_padding(schedule.scale(positions), positions >= 0)
    cuts = (scale[:, 1:] != scale[:, :-1]).any(0)
    first = torch.zeros_like(positions)
    if starts is not None:
        cuts |= starts[:, 1:].any(0) & (not side_by_side)
        first = _first_keys(starts, past)
    cut_at = [0, *(cuts.nonzero()[:, 0] + 1).tolist()]
    stops = [*cut_at[1:], positions.shape[1]]
    begins = starts[0].nonzero()[:, 0].tolist() if starts is not None and side_by_side else []
    first, scale = first[:, cut_at].amin(0), scale[:, cut_at]
    inv_freq, gain = schedule.inv_freq(scale), schedule.gain(scale)
    return [
        Segment(
            start,
            stop,
            int(first[i]),
            scale[:, i].tolist(),
            inv_freq[:, i],
            gain[:, i],
            trained,
            tuple(begin for begin in begins if start < begin < stop),
        )
        for i, (start, stop) in enumerate(zip(cut_at, stops, strict=True))
    ]


def told_apart(segments: list[Segment], starts: torch.Tensor, past: int, was_packed: bool) -> bool:
    """Whether `Segment.first` alone keeps every row to its own document."""
    first = _first_keys(starts, past)[:, [segment.start for segment in segments]]
    unknown = was_packed and bool((first == 0).any())
    return not unknown and bool((first == first[:1]).all())


def _first_keys(starts: torch.Tensor, past: int) -> torch.Tensor:
    """First key of each new token's document, 0 where it began in an earlier call: `(B, T)`."""
    keys = past + torch.arange(starts.shape[1], device=starts.device)
    return torch.where(starts, keys, 0).cummax(-1).values


def _over_padding(scale: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Gives padding the scale of the token before it, else after it, so that it cuts nothing."""
    columns = torch.arange(scale.shape[1], device=scale.device)
    before = torch.where(valid, columns, -1).cummax(-1).values
    after = valid.long().argmax(-1, keepdim=True)
    return scale.gather(1, torch.where(before < 0, after, before))
