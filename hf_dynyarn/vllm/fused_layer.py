"""vLLM's attention over un-rotated keys by Triton kernels, on the devices that have Triton.

Few queries of a request go through the fused kernels, which rotate keys while they read them. For
the pieces of prompts one kernel reads the pages and writes keys, rotated, and values side by side,
and torch's attention does the rest.
"""

import math
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer

from ..backends.fused_triton import launch
from ..backends.pages import rotate_pages
from ..backends.sdpa import attend_to_last
from ..rope import rotate
from .backend import DynamicYaRNAttention
from .fused_metadata import Decoding, Group, Prompts


class FusedAttention(DynamicYaRNAttention):
    """The attention of one layer, with the kernels."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,  # FusedMetadata, or None while vLLM warms up
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends; the arguments are those of `DynamicYaRNAttention.forward`."""
        if attn_metadata is None:
            return output.fill_(0)
        halves = self._halves(kv_cache)
        cache = halves[:, :, 0], halves[:, :, 1]
        result = output.view(-1, self.num_heads, self.head_size)
        if attn_metadata.decoding is not None:
            self._decode_newest(query, cache, attn_metadata.decoding, result)
        if attn_metadata.prompts is not None:
            self._attend_prompts(query, cache, attn_metadata.prompts, result)
        return output

    def _decode_newest(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        decoding: Decoding,
        result: torch.Tensor,
    ) -> None:
        """Attends for the first queries of `(T, Hq, D)`, into the like."""
        (rows, tokens), ragged = decoding.scale.shape, decoding.ragged
        shape = (rows, tokens, self.num_heads, self.head_size)
        own = query[: decoding.tokens] if ragged is None else query[ragged.queries]
        out = result[: decoding.tokens].view(shape) if ragged is None else query.new_empty(shape)
        launch(
            own.view(shape).transpose(1, 2),
            *cache,
            self.scale,
            decoding.lengths,
            decoding.starts,
            decoding.scale,
            decoding.inv_freq,
            decoding.gain,
            None,
            self.interleaved,
            decoding.block_table,
            splits=decoding.splits,
            scratch=decoding.scratch,
            out=out,
        )
        if ragged is not None:
            result[: decoding.tokens] = out.flatten(0, 1)[ragged.slots]

    def _attend_prompts(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        prompts: Prompts,
        result: torch.Tensor,
    ) -> None:
        """Attends for the other queries of `(T, Hq, D)`, into the like."""
        own = query[prompts.first : prompts.first + len(prompts.cos)].transpose(0, 1)[None]
        rotated = rotate(own, prompts.cos[None], prompts.sin[None], self.interleaved)
        rotated = rotated.to(query.dtype)  # (1, Hq, T, D)
        for group in prompts.groups:
            keys, values = self._unpaged(cache, prompts.block_table, group)
            last = 0
            for piece in group.pieces:
                first, last = last, last + piece.keys
                places = slice(piece.start - prompts.first, piece.stop - prompts.first)
                of_piece = (states[:, :, first:last] for states in (keys, values))
                attended = attend_to_last(self.scale, rotated[:, :, places], *of_piece)
                result[piece.start : piece.stop] = attended[0]

    def _unpaged(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        block_table: torch.Tensor,
        group: Group,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of the pieces one after the other, `(1, Hkv, keys, D)` each."""
        rows = sum(piece.keys for piece in group.pieces)
        shape = (2, rows, self.num_kv_heads, self.head_size)
        keys, values = self.scratch.both[: math.prod(shape)].view(shape)
        rotate_pages(
            *cache,
            block_table,
            group.places,
            max(piece.keys for piece in group.pieces),
            group.inv_freq,
            group.gain,
            keys,
            values,
            self.interleaved,
        )
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
