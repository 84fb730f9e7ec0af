"""Remembers, while a block runs, what its layers have brought in from the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

__all__ = ["EntryScope"]


class EntryScope:
    """Shared by the split layers of one block (query, key and value, for example)."""

    def __init__(self) -> None:
        self._depth = 0
        self._known: list[tuple[Tensor, int, Tensor]] = []
        self._slices = ExitStack()

    @contextmanager
    def running(self, slices: AbstractContextManager[None]) -> Iterator[None]:
        """While the block's forward runs; `slices` is its random stream for slices."""
        self._depth += 1
        outer, self._slices = self._slices, ExitStack()
        try:
            with self._slices as stack:
                stack.enter_context(slices)
                yield
        finally:
            self._slices = outer
            self._depth -= 1
            self._known.clear()

    def leave_slices(self) -> None:
        """From here on every rank has the same values: end the random stream for slices."""
        self._slices.close()

    def entered(self, x: Tensor, bring: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``bring(x)``, once for one unchanged tensor while the block runs."""
        if not self._depth:
            return bring(x)
        version = 0 if x.is_inference() else x._version
        for source, seen, result in self._known:
            if source is x and seen == version:
                return result
        result = bring(x)
        self._known.append((x, version, result))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> EntryScope:
        copied: EntryScope = memo.setdefault(id(self), EntryScope())
        return copied
