"""What the split layers of one block share while its forward runs: inputs, and random streams.

Note [Streams of a block]
Dropout must fall alike on all ranks where each has the whole values, and otherwise where each has a
slice. So a block runs on the stream for whole values; after its first column-wise layer on that for
slices; and after its row-wise layer on the former again, or, where that layer has given own samples
back, on the one outside, which differs between ranks with samples of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["BlockDraws", "EntryScope"]

_Stream: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class BlockDraws:
    """The random streams of one call of a block; see Note [Streams of a block].

    Attributes:
        whole: opens that for whole values; None: the one outside is alike on all ranks.
        slices: opens that for slices.
        ends_whole: whether a row-wise layer gives own samples back.
    """

    whole: _Stream | None
    slices: _Stream
    ends_whole: bool


class EntryScope:
    """Shared by the split layers of one block (query, key and value, for example)."""

    def __init__(self) -> None:
        self._depth = 0
        self._known: list[tuple[Tensor, int, Tensor]] = []
        self._draws: BlockDraws | None = None
        self._whole, self._slices = ExitStack(), ExitStack()
        self._in_slices = False

    @contextmanager
    def running(self, draws: BlockDraws | None) -> Iterator[None]:
        """While the block's forward runs; `draws` are its random streams, None: as outside."""
        outer = self._draws, self._whole, self._slices, self._in_slices
        self._draws, self._in_slices = draws, False
        self._depth += 1
        try:
            with ExitStack() as self._whole, ExitStack() as self._slices:
                if draws is not None and draws.whole is not None:
                    self._whole.enter_context(draws.whole())
                yield
        finally:
            self._draws, self._whole, self._slices, self._in_slices = outer
            self._depth -= 1
            self._known.clear()

    def enter_slices(self) -> None:
        """From here on every rank has a slice of the values."""
        if self._draws is not None and not self._in_slices:
            self._in_slices = True
            self._slices.enter_context(self._draws.slices())

    def leave_slices(self) -> None:
        """From here on every rank has the whole values again, or those of its own samples."""
        if self._draws is None:
            return
        self._in_slices = False
        self._slices.close()
        if self._draws.ends_whole:
            self._whole.close()

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
