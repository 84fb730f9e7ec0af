"""Attributes of outer modules that the step writes, kept apart for each suspended microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["AttributeSwap", "AttributeWatch"]

_MISSING = object()


class AttributeWatch:
    """Finds which attributes of outer modules a step writes.

    Args:
        modules: (name, module) of every module outside of units.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._before = [(name, module, dict(module.__dict__)) for name, module in modules]

    def written(self) -> tuple[tuple[str, str], ...]:
        """(module, attribute) pairs whose object is another one than before."""
        return tuple(
            (name, attribute)
            for name, module, before in self._before
            for attribute, held in module.__dict__.items()
            if not attribute.startswith("_") and held is not before.get(attribute, _MISSING)
        )


class AttributeSwap:
    """Gives each microbatch its own view of the attributes that the step writes.

    Args:
        names: (module, attribute) pairs.
        modules: name -> module.
    """

    def __init__(
        self, names: Iterable[tuple[str, str]], modules: dict[str, nn.Module] | None = None
    ) -> None:
        self._places = [((modules or {})[module], name) for module, name in names]
        self._saved: dict[int, list[Any]] = {}

    def enter(self, microbatch: int) -> None:
        """The microbatch goes on: puts its attributes back, if it was suspended before."""
        saved = self._saved.pop(microbatch, None)
        if saved is None:
            return
        for (module, name), held in zip(self._places, saved, strict=True):
            if held is not _MISSING:
                setattr(module, name, held)

    def leave(self, microbatch: int) -> None:
        """The microbatch is suspended: keeps its attributes."""
        if self._places:
            self._saved[microbatch] = [
                module.__dict__.get(name, _MISSING) for module, name in self._places
            ]
