"""Buffers that tokens are written into: what fits beside what, room ahead, and who may write."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Buffers grow by an eighth, and by this many tokens at least.
LEAST_GROWTH = 256


class WeakLink:
    """A weak reference to one object, which what takes its holder apart passes by.

    Once transformers' exporters were used, torch takes caches apart wherever it looks for tensors,
    and puts them together again. A link that was so made leads nowhere.
    """

    __slots__ = ("__dict__", "_target")  # the target is in none of the attributes

    def __init__(self, target: Any) -> None:
        self._target = weakref.ref(target)

    def __call__(self) -> Any:
        """The object; None where it is gone."""
        return self._target() if hasattr(self, "_target") else None


def with_room(buffer: torch.Tensor, length: int, needed: int, dim: int) -> torch.Tensor:
    """A buffer whose first `length` entries along `dim` are those of `buffer`, with room to write.

    Args:
        buffer: any tensor.
        length: entries in use.
        needed: entries that will be in use.
        dim: the dimension that grows.

    Returns:
        The buffer itself where it is long enough, else a longer one.
    """
    # Tensors made in inference mode, or in a graph, must not be written to outside.
    writable = not (buffer.is_inference() or buffer.requires_grad)
    if needed <= buffer.shape[dim] and writable:
        return buffer
    shape = list(buffer.shape)
    shape[dim] = needed + max(LEAST_GROWTH, needed // 8)
    with ordinary_tensors():
        longer = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)
    longer.narrow(dim, 0, length).copy_(buffer.detach().narrow(dim, 0, length))
    return longer


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Within it, tensors are made whose writes torch counts, in inference mode too."""
    with_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
        yield


def writable(held: dict[str, Any]) -> dict[str, Any]:
    """The same, but that tensors of inference mode are copied into ordinary ones."""
    with ordinary_tensors():
        return {
            name: value.clone()
            if isinstance(value, torch.Tensor) and value.is_inference()
            else value
            for name, value in held.items()
        }


def kind_of(states: torch.Tensor) -> tuple[object, ...]:
    """Dtype, batch, heads and head dimension, with which states can be put beside each other."""
    return (states.dtype, *states.shape[:2], states.shape[-1])
