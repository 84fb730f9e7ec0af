"""Attributes of outer modules that the step writes, kept apart for each suspended microbatch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import nn

from lightning_smp.errors import UnsupportedError

__all__ = ["AttributeSwap", "AttributeWatch"]

_MISSING = object()

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes that every module has, and torch looks after."""


_CONTAINERS = (list, dict, set, deque)


class AttributeWatch:
    """Finds which attributes of outer modules a step writes.

    Args:
        modules: (name, module) of every module outside of units.

    Attributes:
        fills_containers: whether, at a look, a list, dict or set held other things than before.
            Such contents are not kept apart for each microbatch.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._before = [(name, module, dict(module.__dict__)) for name, module in modules]
        self._contents = [
            (held, _contents(held))
            for _, _, before in self._before
            for attribute, held in before.items()
            if attribute not in _OF_TORCH and isinstance(held, _CONTAINERS)
        ]
        self._written: dict[tuple[str, str], None] = {}
        self.fills_containers = False

    def look(self) -> None:
        """Notes what has been written so far; the step may put it back before it ends."""
        self._look_at_attributes()
        for held, before in self._contents:
            now = _contents(held)
            if len(now) != len(before) or not all(map(is_, now, before)):
                self.fills_containers = True

    def note(self, names: Iterable[tuple[str, str]]) -> None:
        """Notes (module, attribute) pairs that are written in modules which nobody looks at."""
        self._written.update(dict.fromkeys(names))

    def _look_at_attributes(self) -> None:
        for name, module, before in self._before:
            for attribute, held in module.__dict__.items():
                if attribute not in _OF_TORCH and held is not before.get(attribute, _MISSING):
                    self._written[name, attribute] = None

    def written(self) -> tuple[tuple[str, str], ...]:
        """(module, attribute) pairs whose object is, or was at a look, another one than before."""
        self._look_at_attributes()
        return tuple(self._written)


def _contents(held: Any) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else [*held]


class AttributeSwap:
    """Gives each suspended microbatch back the attributes that it has written.

    What a microbatch has not written before it was suspended it finds as the others left it, so
    that a counter goes on counting. What an earlier microbatch gets back is not seen by those that
    begin meanwhile: they find what the latest microbatch wrote.

    Args:
        names: (module, attribute) pairs.
        root: the module that the names start from.
    """

    def __init__(self, names: Iterable[tuple[str, str]], root: nn.Module | None = None) -> None:
        self._places = [
            (f"{module}.{name}".lstrip("."), root.get_submodule(module), name)
            for module, name in names
            if root is not None
        ]
        self._own: dict[int, dict[str, Any]] = {}
        self._found: dict[str, Any] = {}
        self._latest: dict[str, tuple[int, Any]] = {}

    def enter(self, microbatch: int) -> None:
        """The microbatch begins or goes on."""
        if not self._places:
            return
        own = self._own.get(microbatch, {})
        for path, module, name in self._places:
            if path in own:
                setattr(module, name, own[path])
            self._found[path] = module.__dict__.get(name, _MISSING)

    def leave(self, microbatch: int) -> None:
        """The microbatch is suspended or has ended.

        Raises:
            UnsupportedError: a number was written both before and after a suspension; counting
                over microbatches that take turns would lose some.
        """
        if not self._places:
            return
        own = self._own.setdefault(microbatch, {})
        for path, module, name in self._places:
            held = module.__dict__.get(name, _MISSING)
            found, self._found[path] = self._found.get(path, _MISSING), held
            latest, seen = self._latest.get(path, (-1, _MISSING))
            if held is found or held is _MISSING:
                if path in own and latest > microbatch:
                    self._show(path, module, name, seen)
                continue
            if path in own and isinstance(held, (int, float)):
                raise UnsupportedError(
                    f"the step changes the number `{path}` several times, and other microbatches "
                    "run in between. Change it once in a step, or set microbatches=1."
                )
            if path in own and latest > microbatch:
                self._show(path, module, name, seen)
            else:
                self._latest[path] = (max(latest, microbatch), held)
            own[path] = held

    def _show(self, path: str, module: nn.Module, name: str, held: Any) -> None:
        """What those find that begin now."""
        setattr(module, name, held)
        self._found[path] = held
