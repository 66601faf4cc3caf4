"""One step of vLLM for the Triton kernels: what decodes, made on the device, and prompts in pieces.

vLLM puts the requests that decode first. Theirs are a few queries each, whose lengths, scales,
frequencies and gains are computed on the device of the tensors there: nothing waits for it, and all
lies in buffers that keep their addresses, so that a graph can hold the step. The queries of prompts
are cut where their scale changes, by the lengths that vLLM keeps on the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from ..backends import fused_triton
from ..backends.fused import MOST_QUERIES
from ..backends.pages import rotate_pages
from .asked import interleaved, is_of_draft, of_layers, schedule_of
from .metadata import Piece, pieces_of


@dataclass(frozen=True)
class Ragged:
    """Where queries are if not each request has as many: rows of `T` slots, filled from the right.

    Attributes:
        queries: places, among the tokens of the step, of the query of each slot, `(B * T,)`; that
            of a slot which is not filled is anyone's.
        slots: of each token, `(tokens,)`.
    """

    queries: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Decoding:
    """The newest tokens of some requests: what `fused_triton.launch` takes, all on the device.

    Attributes:
        tokens: how many there are, the first ones of the step.
        lengths: keys of each request, `(B,)`; 0 where a graph has more requests than there are.
        starts: zeros, `(B,)`.
        scale: of each query, `(B, T)`.
        inv_freq: `(B, T, R)`.
        gain: `(B, T)`.
        block_table: `(B, blocks)`.
        splits: into how many the keys are cut, by sizes that a graph does not change.
        scratch: for their results.
        ragged: None where each request has `T` queries.
    """

    tokens: int
    lengths: torch.Tensor
    starts: torch.Tensor
    scale: torch.Tensor
    inv_freq: torch.Tensor
    gain: torch.Tensor
    block_table: torch.Tensor
    splits: int
    scratch: torch.Tensor
    ragged: Ragged | None


@dataclass(frozen=True)
class Group:
    """Pieces of prompts whose keys there is room for at one time.

    Attributes:
        pieces: their places in the step, and how many keys the last query of each sees.
        places: of each piece: its request, the first row of its keys in the scratch, and how many
            there are, `(pieces, 3)` int32.
        inv_freq: of each piece, `(pieces, R)`.
        gain: of each piece, `(pieces,)`.
    """

    pieces: list[Piece]
    places: torch.Tensor
    inv_freq: torch.Tensor
    gain: torch.Tensor


@dataclass(frozen=True)
class Prompts:
    """The other tokens of a step, after those of `Decoding`.

    Attributes:
        first: how many come before.
        cos: for the queries, `(tokens, R)` float32.
        sin: `(tokens, R)` float32.
        groups: of pieces.
        block_table: of all requests of the step, `(requests, blocks)`.
    """

    first: int
    cos: torch.Tensor
    sin: torch.Tensor
    groups: list[Group]
    block_table: torch.Tensor


@dataclass(frozen=True)
class FusedMetadata:
    """One step, for all layers."""

    decoding: Decoding | None
    prompts: Prompts | None


class FusedMetadataBuilder(AttentionMetadataBuilder[FusedMetadata]):
    """Makes the metadata of each step."""

    reorder_batch_threshold: int

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        vllm_config = of_layers(vllm_config, layer_names)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        queries = max_decode_query_len(vllm_config)
        of_draft = is_of_draft(vllm_config)
        if of_draft and vllm_config.speculative_config.uses_draft_model():
            queries += 1  # a draft model also reads the token that was sampled last
        self.reorder_batch_threshold = min(queries, MOST_QUERIES)
        # vLLM's bound on the lengths, on the host, is exact for prompts of the engine's own model.
        self.bound_is_exact = queries <= MOST_QUERIES and not of_draft
        self.schedule = schedule_of(vllm_config)
        # Of the host's roundings, as everywhere else.
        self.constants = tuple(
            constant.to(device) for constant in self.schedule.constants(torch.device("cpu"))
        )
        self.heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        block = kv_cache_spec.block_size
        self.room = -(-vllm_config.model_config.max_model_len // block) * block
        self.processors = fused_triton.processors_of(device)
        rows = max(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self._allocate(rows)
        self._compile(rows)

    def _allocate(self, rows: int) -> None:
        """Makes the buffers of all steps, for so many requests."""
        queries = rows * self.reorder_batch_threshold
        self.starts = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.scale, self.gain = torch.zeros(2, queries, device=self.device)
        self.inv_freq = torch.zeros(queries, self.schedule.rotary_dim // 2, device=self.device)
        self.back = torch.arange(-self.reorder_batch_threshold, 0, device=self.device)
        self.scratch = torch.empty(
            max(
                fused_triton.scratch_of(
                    count * tokens * self.heads,
                    self.splits(count, tokens),
                    self.kv_cache_spec.head_size,
                )
                for tokens in range(1, self.reorder_batch_threshold + 1)
                for count in range(1, rows + 1)
            ),
            device=self.device,
            dtype=torch.float32,
        )

    @torch.inference_mode()
    def _compile(self, rows: int) -> None:
        """Runs the kernels once, so that no request waits for a compiler, and no graph meets one.

        Triton compiles anew for a number that is 1, or that 16 divides.
        """
        spec = self.kv_cache_spec
        shape = (1, spec.num_kv_heads, spec.block_size, spec.head_size)
        key = torch.zeros(shape, dtype=spec.dtype, device=self.device)
        value = torch.zeros_like(key)
        kinds: dict[tuple[int, bool, bool], int] = {}
        for tokens in range(1, self.reorder_batch_threshold + 1):
            for count in range(1, rows + 1):
                splits = self.splits(count, tokens)
                kinds.setdefault((tokens, splits == 1, splits % 16 == 0), count)
        table = torch.zeros(
            (rows, self.room // spec.block_size), dtype=torch.int32, device=self.device
        )
        interleave = interleaved(self.vllm_config)
        for (tokens, *_), count in kinds.items():
            queries = count * tokens
            fused_triton.launch(
                key.new_zeros(count, tokens, self.heads, spec.head_size).transpose(1, 2),
                key,
                value,
                1.0,
                self.starts[:count],  # lengths of 0
                self.starts[:count],
                self.scale[:queries].view(count, tokens),
                self.inv_freq[:queries].view(count, tokens, -1),
                self.gain[:queries].view(count, tokens),
                None,
                interleave,
                table[:count],
                splits=self.splits(count, tokens),
                scratch=self.scratch,
            )
        place = torch.tensor([[0, 0, 1]], dtype=torch.int32, device=self.device)
        out = key.new_zeros(1, *key.shape[1::2])
        turn = self.inv_freq[:1], self.gain[:1]
        rotate_pages(key, value, table, place, 1, *turn, out, torch.zeros_like(out), interleave)

    def splits(self, rows: int, tokens: int) -> int:
        """Into how many splits the keys of requests of so many queries are cut."""
        spec = self.kv_cache_spec
        queries = self.heads // spec.num_kv_heads * tokens
        sizes = fused_triton.sizes_of(spec.head_size, spec.dtype, queries)
        programs = fused_triton.programs_of(self.heads, spec.num_kv_heads, tokens, sizes)
        return fused_triton.splits_of(rows * programs, self.room, self.processors)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Graphs of steps in which each request has as many queries, few enough for the kernel."""
        if max_decode_query_len(vllm_config) > MOST_QUERIES:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FusedMetadata:
        """Called by vLLM once per step."""
        requests, others, tokens, _ = split_decodes_and_prefills(
            common_attn_metadata, self.reorder_batch_threshold
        )
        return FusedMetadata(
            self._decoding(common_attn_metadata, requests, tokens) if requests else None,
            self._prompts(common_attn_metadata, requests, tokens) if others else None,
        )

    def _decoding(self, common: CommonAttentionMetadata, rows: int, tokens: int) -> Decoding:
        bounds = common.query_start_loc_cpu[: rows + 1].numpy()
        counts = np.diff(bounds)
        most = max(1, int(counts.max()))
        lengths = common.seq_lens[:rows]
        scale = self.schedule.scale(lengths[:, None] + self.back[-most:])
        queries = rows * most
        self.scale[:queries] = scale.flatten()
        self.gain[:queries] = self.schedule.gain(scale).flatten()
        self.inv_freq[:queries] = self.schedule.inv_freq(scale, *self.constants).flatten(0, 1)
        # A graph may have more requests than there are, with no query, and they come last.
        uniform = most == 1 or bool(((counts == most) | (counts == 0)).all())
        return Decoding(
            tokens,
            lengths,
            self.starts[:rows],
            self.scale[:queries].view(rows, most),
            self.inv_freq[:queries].view(rows, most, -1),
            self.gain[:queries].view(rows, most),
            common.block_table_tensor[:rows],
            self.splits(rows, most),
            self.scratch,
            None if uniform and tokens == queries else self._ragged(common, rows, most, tokens),
        )

    def _ragged(self, common: CommonAttentionMetadata, rows: int, most: int, tokens: int) -> Ragged:
        ends = common.query_start_loc[1 : rows + 1]
        places = (ends[:, None] + self.back[-most:]).clamp(min=0)
        token = torch.arange(tokens, dtype=ends.dtype, device=self.device)
        row = torch.searchsorted(ends, token, right=True).clamp(max=rows - 1)
        slots = row * most + (most - ends[row] + token)
        # Tokens that pad the step lie beyond the last request.
        return Ragged(places.flatten(), slots.clamp(max=rows * most - 1))

    def _prompts(self, common: CommonAttentionMetadata, first: int, tokens: int) -> Prompts:
        pieces = list(self._pieces(common, first))
        positions = [
            torch.arange(piece.keys - (piece.stop - piece.start), piece.keys, device="cpu")
            for piece in pieces
        ]
        scales = [
            torch.full((len(some),), piece.scale, dtype=torch.float64, device="cpu")
            for some, piece in zip(positions, pieces, strict=True)
        ]
        cos, sin = self._tables(self._sent(torch.cat(positions)), self._sent(torch.cat(scales)))
        groups = [self._group(few) for few in self._few(pieces)]
        return Prompts(tokens, cos, sin, groups, common.block_table_tensor)

    def _pieces(self, common: CommonAttentionMetadata, first: int) -> Iterator[Piece]:
        """Pieces of the requests from `first` on."""
        lengths = common.seq_lens_cpu_upper_bound
        if lengths is None or not self.bound_is_exact:
            lengths = common.seq_lens.cpu()
        bounds = common.query_start_loc_cpu.tolist()
        for request, length in enumerate(lengths[: common.num_reqs].tolist()):
            start, stop = bounds[request], bounds[request + 1]
            if request >= first and start < stop:
                yield from pieces_of(self.schedule, request, start, stop, length)

    def _few(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Parts pieces, for the scratch has room for the keys of the longest text."""
        few: list[Piece] = []
        keys = 0
        for piece in pieces:
            if few and keys + piece.keys > self.room:
                yield few
                few, keys = [], 0
            few.append(piece)
            keys += piece.keys
        yield few

    def _group(self, pieces: list[Piece]) -> Group:
        keys = np.array([piece.keys for piece in pieces])
        requests = np.array([piece.request for piece in pieces])
        places = np.stack((requests, keys.cumsum() - keys, keys), 1).astype(np.int32)
        scale = torch.tensor([piece.scale for piece in pieces], dtype=torch.float64, device="cpu")
        scale = self._sent(scale)
        return Group(
            pieces,
            self._sent(torch.from_numpy(places)),
            self.schedule.inv_freq(scale, *self.constants),
            self.schedule.gain(scale),
        )

    def _tables(
        self, positions: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for queries: `(tokens, R)` each."""
        # As exact as the kernels are, far from 0 too.
        angles = positions[:, None] * self.schedule.inv_freq(scale, *self.constants).double()
        gain = self.schedule.gain(scale)[:, None]
        return angles.cos().float() * gain, angles.sin().float() * gain

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's on the device, without waiting until it is there."""
        if is_pin_memory_available():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
