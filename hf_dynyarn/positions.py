"""Positions of held tokens, `(B, T)`, -1 where padding: the newest, and where documents start."""

import torch
from torch import nn


def last_positions(positions: torch.Tensor) -> torch.Tensor:
    """Position of the newest token of each row that is not padding, -1 where there is none.

    Args:
        positions: `(B, T)`, at least one token.

    Returns:
        `(B,)`
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    newest = torch.where(positions >= 0, index, 0).amax(-1, keepdim=True)
    return positions.gather(1, newest)[:, 0]


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """Which tokens start a document: those whose position does not follow the one before.

    Args:
        positions: `(B, T)`, -1 where padding, which starts nothing and stands between nothing.

    Returns:
        `(B, T)` bool. The first token of a row counts unless its position is 0.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    # Index of the newest token up to each column that is not padding, -1 before the first.
    newest = torch.where(positions >= 0, index, -1).cummax(-1).values
    before = nn.functional.pad(newest[:, :-1], (1, 0), value=-1)
    expected = torch.where(before < 0, 0, positions.gather(1, before.clamp(min=0)) + 1)
    return (positions >= 0) & (positions != expected)
