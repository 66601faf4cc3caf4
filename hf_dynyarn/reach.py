"""How a class-wide patch reaches models that are there and models that come: through their classes.

Only classes of supported families get anything: a model of another family runs no line of ours, so
that `torch.compile` and `torch.export` find it as it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel

_NOTHING = object()


class Reach:
    """Attributes of classes, those that are imported and those that will be, until `remove`.

    Args:
        attributes_of: gives, by name, the attributes that a class gets.
    """

    def __init__(self, attributes_of: Callable[[type], dict[str, Any]]) -> None:
        self._attributes_of = attributes_of
        self._before: list[tuple[type, str, Any]] = []
        for known in _subclasses(PreTrainedModel):
            self._reach(known)
        stock: Any = PreTrainedModel.__init_subclass__.__func__

        def reach_later(cls: Any, /, **kwargs: Any) -> None:
            stock(cls, **kwargs)
            self._reach(cls)

        self._put(PreTrainedModel, "__init_subclass__", classmethod(reach_later))

    def _reach(self, cls: type) -> None:
        for name, value in self._attributes_of(cls).items():
            self._put(cls, name, value)

    def _put(self, cls: type, name: str, value: Any) -> None:
        self._before.append((cls, name, vars(cls).get(name, _NOTHING)))
        setattr(cls, name, value)

    def remove(self) -> None:
        """Gives every class back what it had."""
        for cls, name, before in reversed(self._before):
            if before is _NOTHING:
                delattr(cls, name)
            else:
                setattr(cls, name, before)
        self._before.clear()


def _subclasses(cls: type) -> Iterator[type]:
    found: list[type] = cls.__subclasses__()
    for one in found:
        yield one
        yield from _subclasses(one)
