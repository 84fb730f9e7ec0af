"""What the ranks of one run write to the store for each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

from lightning_smp.calls import Sheet

__all__ = ["ANSWER_S", "Board"]

ANSWER_S: Final = 6.0
"""The store's host may be stopped: nothing waits longer for its answer."""
_ON_ITS_WAY: Final = ""


class Board:
    """One rank's access to it.

    Every method raises RuntimeError where the store is gone, and waits where its host is stopped.

    Args:
        store: of the default process group; a connection of one's own is made.
        run: number of the run in this process.
    """

    def __init__(self, store: Any, run: int) -> None:
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._prefix = f"lightning_smp/run{run}"

    # ---- failures -----------------------------------------------------------------------------

    def post(self, text: str) -> str:
        """Writes a failure, unless there is one; returns the first."""
        return str(self._store.compare_set(f"{self._prefix}/failure", "", text), "utf-8")

    def failure(self) -> str | None:
        """The first failure."""
        return self._text("failure")

    def hear(self) -> None:
        """Counts a rank that knows of the failure."""
        self._store.add(f"{self._prefix}/heard", 1)

    def heard(self) -> int:
        """How many other ranks know of the failure."""
        return int(self._store.add(f"{self._prefix}/heard", 0))

    # ---- life and end ---------------------------------------------------------------------------

    def beat(self, rank: int) -> None:
        """A sign of life."""
        self._store.add(f"{self._prefix}/beat/{rank}", 1)

    def beats(self, ranks: Sequence[int]) -> dict[int, int]:
        """How many signs of life each rank has given."""
        return {rank: self._store.add(f"{self._prefix}/beat/{rank}", 0) for rank in ranks}

    def leave(self, rank: int, end: str, sheet: Sheet) -> None:
        """From now on the rank makes no calls and needs nothing from here.

        Args:
            rank: this one.
            end: how it came to its end, in words.
            sheet: its last calls.
        """
        self._store.set(f"{self._prefix}/left/{rank}", json.dumps([end, sheet.to_plain()]))

    def has_left(self, rank: int) -> bool:
        """Whether the rank needs nothing more."""
        return bool(self._store.check([f"{self._prefix}/left/{rank}"]))

    def end_of(self, rank: int) -> tuple[str, Sheet] | None:
        """How a rank came to its end, and its last calls; None if it still works."""
        text = self._text(f"left/{rank}")
        if text is None:
            return None
        end, sheet = json.loads(text)
        return end, Sheet.from_plain(sheet)

    def end_script(self, rank: int) -> None:
        """The rank's script is about to end."""
        self._store.set(f"{self._prefix}/ended/{rank}", "1")

    def has_ended_script(self, rank: int) -> bool:
        """Whether the rank's script has ended, with no run after this one."""
        return bool(self._store.check([f"{self._prefix}/ended/{rank}"]))

    def end_store(self) -> None:
        """The store's host is about to end."""
        self._store.set(f"{self._prefix}/store_ends", "1")

    def store_ends(self) -> bool:
        """Whether the store's host is about to end."""
        return bool(self._store.check([f"{self._prefix}/store_ends"]))

    def release(self, rank: int) -> None:
        """The rank can do without the store."""
        self._store.set(f"{self._prefix}/released/{rank}", "1")

    def needs_store(self, rank: int) -> bool:
        """Whether the rank has neither left nor said that it can do without the store."""
        return not self.has_left(rank) and not self._store.check(
            [f"{self._prefix}/released/{rank}"]
        )

    # ---- calls --------------------------------------------------------------------------------

    def enter(self, rank: int, sheet: Sheet | None) -> None:
        """Says where the rank stays; None: it is on its way."""
        text = _ON_ITS_WAY if sheet is None else json.dumps(sheet.to_plain())
        self._store.set(f"{self._prefix}/sheet/{rank}", text)

    def sheets(self, ranks: Iterable[int]) -> dict[int, Sheet]:
        """Where ranks stay, without those that are on their way."""
        found = {rank: self._text(f"sheet/{rank}") for rank in ranks}
        return {rank: Sheet.from_plain(json.loads(text)) for rank, text in found.items() if text}

    def _text(self, name: str) -> str | None:
        key = f"{self._prefix}/{name}"
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else None
