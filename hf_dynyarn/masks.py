"""What a query of one forward call sees, and the masks that say so.

Masks are built per tile of queries, never for the whole call, and not at all where a causal or a
full kernel says the same.
"""

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Masks:
    """What each new token sees of the keys held before and of the new ones.

    Attributes:
        past: number of keys held before, `P`.
        total: number of all keys, `P + T`.
        visible: `(B, P + T)` bool, False where a key is padding; None where none is.
        documents: `(B, P + T)` number of each key's document; None where the first key of each
            segment tells them apart.
        custom: the caller's `(B, H, T, P + T)` mask, bool (True: attend) or additive, in place of
            causality and padding.
        additive: whether masks must be additive.
        gap: the most padding that lies between the tokens of any row.
    """

    past: int
    total: int
    visible: torch.Tensor | None
    documents: torch.Tensor | None
    custom: torch.Tensor | None
    additive: bool
    gap: int = 0

    def __post_init__(self) -> None:
        self._tail: tuple[object, torch.Tensor] | None = None

    @property
    def plainly_causal(self) -> bool:
        """Whether every token sees all that came before it, and nothing else."""
        return self.custom is None and self.visible is None and self.documents is None

    def last_key(self, stop: int) -> int:
        """End of the keys that new tokens up to `stop` may see: causal, unless by a custom mask."""
        return self.total if self.custom is not None else self.past + stop

    def first_key(self, start: int, first: int, window: int | None) -> int:
        """First key that new token `start` may see in any row, of those from `first` on.

        Args:
            start: the new token.
            first: first key of its segment.
            window: how many keys a query sees, or None for all. A custom mask has its own.
        """
        if window is None or self.custom is not None:
            return first
        return max(first, self.past + start - window + 1 - self.gap)

    def needed(self, queries: int, keys: int, window: int | None = None) -> bool:
        """Whether a full kernel or a causal one would see the wrong keys.

        A full kernel serves one query, a causal kernel as many queries as keys.
        """
        if not self.plainly_causal:
            return True
        cut = window is not None and keys > window
        return queries > 1 and (queries != keys or cut or self.additive)

    def tail(
        self, queries: int, groups: int, like: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """Causal mask, additive, of queries that are the last keys, repeated for each of `groups`.

        It is wide enough for all keys: its last columns serve any tile of as many queries, so that
        the segments and layers of a call share it.

        Args:
            queries: number of queries.
            groups: query heads of a key head.
            like: gives the device and the dtype.
            window: how many keys a query sees, or None for all.

        Returns:
            `(1, 1, groups * queries, P + T)`
        """
        wanted = (queries, groups, window, like.device, like.dtype)
        if self._tail is None or self._tail[0] != wanted:
            mask = like.new_zeros((groups, queries, self.total))
            hidden = like.new_full((queries, queries), -torch.inf).triu(1)
            mask[:, :, self.total - queries :] = hidden
            if window is not None:
                hidden = like.new_full((queries, self.total), -torch.inf)
                mask += hidden.tril(self.total - queries - window)
            self._tail = (wanted, mask.view(1, 1, groups * queries, self.total))
        return self._tail[1]

    def of(
        self, start: int, stop: int, first: int, like: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """Mask of new tokens `[start, stop)` over keys `[first, last_key(stop))`.

        Args:
            start: first new token.
            stop: new token after the last one.
            first: first key.
            like: gives the device, and the dtype where the mask is additive.
            window: how many keys a query sees, or None for all.

        Returns:
            `(B or 1, H or 1, queries, keys)`, True where a query attends; additive where the
            caller's own is, or for eager.
        """
        last = self.last_key(stop)
        lowest = torch.finfo(like.dtype).min
        if self.custom is not None:
            mask = self.custom[:, :, start:stop, first:last].to(like.device)
        else:
            mask = self._causal_mask(start, stop, first, last, window, like.device)
        if mask.dtype != torch.bool:
            # Clamped, since the lowest number of a wider dtype becomes -inf, and rows of these NaN;
            # and only then, since a narrower dtype cannot hold our lowest number.
            return mask.to(like.dtype).clamp(min=lowest)
        if self.additive:
            return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, lowest)
        return mask

    def _causal_mask(
        self,
        start: int,
        stop: int,
        first: int,
        last: int,
        window: int | None,
        device: torch.device,
    ) -> torch.Tensor:
        query_index = torch.arange(self.past + start, self.past + stop, device=device)[:, None]
        key_index = torch.arange(first, last, device=device)
        allowed = (key_index <= query_index)[None]  # (1, queries, keys)
        if window is not None and self.visible is not None and self.gap > 0:
            # A window counts tokens, not what lies between them.
            tokens = self.visible.to(device).cumsum(-1)
            of_queries = tokens[:, self.past + start : self.past + stop, None]
            allowed = allowed & (tokens[:, None, first:last] > of_queries - window)
        elif window is not None:
            allowed = allowed & (key_index > query_index - window)
        if self.documents is not None:
            documents = self.documents.to(device)
            of_queries = documents[:, self.past + start : self.past + stop, None]
            allowed = allowed & (documents[:, None, first:last] == of_queries)
        if self.visible is not None:
            # A padding token sees itself: a row of the mask without any key would give NaN.
            visible = self.visible[:, None, first:last].to(device)
            allowed = allowed & (visible | (key_index == query_index))
        return allowed[:, None]


def widest_gap(visible: torch.Tensor) -> torch.Tensor:
    """The most padding that lies between the tokens of any row.

    Args:
        visible: `(B, L)` bool, False where padding.

    Returns:
        A number of tokens, on the device.
    """
    tokens = visible.cumsum(-1)
    between = ~visible & (tokens > 0) & (tokens < tokens[:, -1:])
    return between.sum(-1).amax()


def check_kind(attention_mask: object) -> None:
    """Raises a TypeError unless a mask is a tensor."""
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(
            f"attention_mask must be a torch.Tensor or None, got {type(attention_mask).__name__}. "
            "Pass one of these, or leave a model unpatched that makes others of its images."
        )


def split_mask(
    attention_mask: torch.Tensor | None, batch: int, length: int, total: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Checks the caller's mask; returns it as `(padding, None)` if 2-D, `(None, mask)` if 4-D."""
    if attention_mask is None:
        return None, None
    check_kind(attention_mask)
    shape = tuple(attention_mask.shape)
    if shape == (batch, total):
        return attention_mask.to(device=device, dtype=torch.bool), None
    if len(shape) == 4 and shape[0] in (1, batch) and shape[2:] == (length, total):
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise TypeError(
                f"a 4-D attention_mask must be bool or floating point, got {attention_mask.dtype}."
            )
        return None, attention_mask
    raise ValueError(
        "attention_mask must be (batch, tokens in the cache + new tokens) = "
        f"{(batch, total)}, or 4-D {(batch, 'heads or 1', length, total)}, got {shape}."
    )
