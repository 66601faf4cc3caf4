"""Bounds of packed documents, which a caller may give beside their positions.

Bounds are cumulative lengths over the tokens of all rows, one row after the other: `(N + 1,)`, from
0 to `B * T`, for `N` documents; flash kernels know them as `cu_seqlens`.
"""

from typing import Any

import torch

# As transformers calls them: of the queries' documents and of the keys'.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")


def bounds_of_call(kwargs: dict[str, Any], past: int) -> torch.Tensor | None:
    """The bounds that a call gives, `(1 or 2, N + 1)`, one row for each of `BOUNDS`.

    Args:
        kwargs: of the decoder.
        past: number of tokens in the cache.

    Raises:
        TypeError: they are not integer tensors of one dimension.
        ValueError: they come with what they contradict.
    """
    given = {name: kwargs[name] for name in BOUNDS if kwargs.get(name) is not None}
    if not given:
        return None
    for name, bounds in given.items():
        integers = isinstance(bounds, torch.Tensor) and not bounds.is_floating_point()
        if not integers or bounds.dim() != 1 or len(bounds) == 0:
            raise TypeError(
                f"{name} must be an integer torch.Tensor (documents + 1,), got {bounds!r}."
            )
    if len({bounds.shape for bounds in given.values()}) > 1 or past > 0:
        raise ValueError(
            f"{' and '.join(given)} must be of the same documents, none of which goes on from the "
            f"cache, got {[len(bounds) - 1 for bounds in given.values()]} documents and a cache of "
            f"{past} tokens. Leave them out: position_ids tell documents apart."
        )
    if kwargs.get("attention_mask") is not None:
        raise ValueError(
            f"{' and '.join(given)} must come without an attention_mask, which cannot tell "
            "documents apart, got both. Leave the attention_mask out."
        )
    return torch.stack(list(given.values()))


def positions_within(bounds: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Position of each token in its own document, `(B, T)`.

    Args:
        bounds: `(N + 1,)`, not checked yet.
        batch: number of rows.
        length: tokens of a row.
    """
    tokens = torch.arange(batch * length, device=bounds.device)
    document = torch.searchsorted(bounds.to(tokens), tokens, right=True) - 1
    return (tokens - bounds[document.clamp(min=0)]).clamp(min=0).view(batch, length)


def check_bounds(bounds: torch.Tensor, starts: torch.Tensor) -> None:
    """Checks bounds, and that positions tell the same documents.

    Args:
        bounds: `(1 or 2, N + 1)`, on the CPU.
        starts: `(B, T)` bool, which tokens start a document after another, by their positions.

    Raises:
        ValueError: they are no bounds, or of other documents.
    """
    own = bounds[0].tolist()
    if own[:1] != [0] or own[-1:] != [starts.numel()] or own != sorted(own):
        raise ValueError(
            f"{BOUNDS[0]} must rise from 0 to the number of tokens, {starts.numel()}, got {own}. "
            "Leave it out: position_ids tell documents apart."
        )
    if bounds.ne(bounds[0]).any():
        raise ValueError(
            f"{BOUNDS[1]} must be {BOUNDS[0]}, {own}, got {bounds[-1].tolist()}. Leave them out: "
            "position_ids tell documents apart."
        )
    ours = starts.clone()
    ours[:, 0] = True  # of each row
    theirs = torch.zeros(starts.numel() + 1, dtype=torch.bool, device=starts.device)
    theirs[bounds[0]] = True
    if ours.flatten().ne(theirs[:-1]).any():
        raise ValueError(
            f"position_ids must restart where {BOUNDS[0]} says that a document starts, {own[:-1]}, "
            f"and nowhere else, got {ours.flatten().nonzero()[:, 0].tolist()}. Leave one of them "
            "out."
        )
