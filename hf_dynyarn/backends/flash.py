"""Attention by a flash kernel, through transformers' own entry point."""

from collections.abc import Iterator

import torch

from .. import versions
from ..plan import LayerCall
from ..segments import Segment
from . import Attended


def attend(
    call: LayerCall,
    segment: Segment,
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Iterator[Attended]:
    """Attends by a flash kernel, whose causal mask is aligned to the last key as ours is."""
    plan = call.plan
    visible = None
    if plan.masks.visible is not None:
        visible = plan.masks.visible[:, first : plan.masks.last_key(segment.stop)].to(query.device)
        # A row that is still all padding shows its last token: a kernel may fail without any key.
        newest = visible[:, -1:] | ~visible.any(-1, keepdim=True)
        visible = torch.cat((visible[:, :-1], newest), dim=1)
    output = versions.flash_attention(
        plan.backend,
        query.transpose(1, 2).to(value.dtype),
        key.transpose(1, 2).to(value.dtype),
        value.transpose(1, 2),
        visible,
        query_length=query.shape[2],
        is_causal=True,
        dropout=call.dropout,
        softmax_scale=call.scaling,
        sliding_window=call.window,
        **plan.workspace.bounds(segment, first, query.device),
    )
    yield first, output, None
