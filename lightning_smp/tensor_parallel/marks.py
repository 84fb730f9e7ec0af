"""Marks on modules: whether to distribute them, and with which arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

__all__ = ["Mark", "mark_of", "set_tensor_parallelism", "tensor_parallelism"]

_ATTRIBUTE: Final = "_smp_tensor_parallelism"


@dataclass(frozen=True)
class Mark:
    """What was asked for a module.

    Attributes:
        enabled: whether to distribute it.
        arguments: replace arguments of the distributed module's constructor that have these names.
    """

    enabled: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)


def mark_of(module: nn.Module) -> Mark | None:
    """Return the mark of a module; None where nothing was asked."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Mark) else None


@contextmanager
def tensor_parallelism(enabled: bool = True, **arguments: Any) -> Iterator[None]:
    """Mark the modules that are constructed inside; of nested contexts the innermost counts.

    Marked modules are replaced when the model is wrapped, if their class is supported; of nested
    supported modules the outermost is.

    Args:
        enabled: whether to distribute them.
        arguments: replace arguments of the distributed modules' constructors of the same names.
    """
    mark = Mark(enabled, arguments)
    before = nn.Module.__init__

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.__dict__[_ATTRIBUTE] = mark  # the innermost context writes last

    nn.Module.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = before  # type: ignore[method-assign]


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **arguments: Any) -> None:
    """Mark an existing module and everything in it; call it before the model is wrapped.

    Args:
        module: root of the subtree.
        enabled: whether to distribute it; False keeps the whole subtree as it is.
        arguments: as in `tensor_parallelism`.
    """
    for inner in module.modules():
        inner.__dict__[_ATTRIBUTE] = Mark(enabled, arguments)
