"""Notices that ranks wait for each other for ever, or for one that has ended."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Final

from lightning_smp.calls import Call, Calls, Sheet, endless_wait
from lightning_smp.failure_board import Board
from lightning_smp.topology import Topology

__all__ = ["STUCK", "RollCall"]

STUCK: Final = "no rank can go on"
"""How the failure of ranks begins that wait for ever."""

_PATIENCE_S: Final = 0.75  # in one call, until the others are looked at
_PROOF_S: Final = 1.5  # until they are looked at again: who has moved by then does not wait
_RARELY_S: Final = 10.0  # between two looks of a few ranks; of many, their looks add up
_LIBRARIES: Final = tuple(
    str(Path(str(folder)))
    for folder in (
        Path(__file__).parent,
        *(sysconfig.get_paths()[k] for k in ("stdlib", "purelib")),
    )
)


class RollCall:
    """One rank's part, for its watching thread.

    A rank that stays in one place says where, once; one that stays in a call looks where the others
    are, ever more rarely. Two looks with the same result are a proof, since every rank of a chain
    of waits was in the same call both times.

    Args:
        rank: this rank.
        calls: its calls.
        topology: the grid of all ranks.
        board: where ranks write to each other.
    """

    def __init__(self, rank: int, calls: Calls, topology: Topology, board: Board) -> None:
        self._rank = rank
        self._calls = calls
        self._topology = topology
        self._board = board
        self._main = threading.main_thread().ident
        self._current = calls.where()
        self._since_s = time.monotonic()
        self._look_s = _PATIENCE_S
        self._rarely_s = _RARELY_S + topology.size / 8
        self._said: Sheet | None = None
        self._suspect: list[Sheet] = []
        self._ended: dict[int, tuple[str, Sheet]] = {}

    def beat(self) -> str | None:
        """Tells the others where this rank is; returns why it waits for ever, if it does.

        Raises:
            RuntimeError: the store is gone.
        """
        sheet = self._calls.where()
        waited_s = self._waited_s(sheet)
        self._say(sheet if waited_s else None)
        if not sheet.open or waited_s < self._look_s:
            return None
        found = self._look(sheet)
        # Looks cost the store's host time: who suspects nothing waits as long again.
        self._look_s = waited_s + (_PROOF_S if found else min(waited_s, self._rarely_s))
        if found is None:
            return None
        text, proof = found
        is_proven, self._suspect = proof == self._suspect, proof
        return text if is_proven else None

    def beat_alone(self) -> str | None:
        """The same where the store is gone: of the others only the ends are known, if at all."""
        sheet = self._calls.where()
        if self._waited_s(sheet) < _PATIENCE_S:
            return None
        sheets = {self._rank: replace(sheet, place=self._place())}
        chain = endless_wait(sheets, self._last_sheets(), self._topology, self._rank)
        return None if chain is None else self._told(chain, sheets)

    def note_end(self, rank: int) -> None:
        """Remembers how a rank ended, since the store may end with it."""
        if rank not in self._ended and (end := self._board.end_of(rank)) is not None:
            self._ended[rank] = end

    def why_lost(self, call: Call, board: Board) -> str | None:
        """Why a call lost its connection: other ones of its ranks have ended, if they have.

        Args:
            call: what this rank was in.
            board: the one of the calling thread.
        """
        ended = dict(self._ended)
        members = (call.peer,) if call.axis is None else self._topology.group(call.axis, self._rank)
        try:
            for rank in members:
                if rank not in ended and (end := board.end_of(rank)) is not None:
                    ended[rank] = end
        except RuntimeError:  # the store has ended with its host
            pass
        found = [rank for rank in members if rank in ended]
        if not found:
            return None
        ends = "; ".join(f"rank {rank} {_ending(*ended[rank])}" for rank in found)
        return f"{ends}, while rank {self._rank} waits in {call}. {_RULE}"

    def others(self, board: Board) -> list[str]:
        """Where the ranks that have not moved for a while are, in words."""
        ranks = [rank for rank in range(self._topology.size) if rank != self._rank]
        return [f"rank {rank} is in {sheet}" for rank, sheet in board.sheets(ranks).items()]

    def _waited_s(self, sheet: Sheet) -> float:
        """Since when this rank has been where it is; 0 if it has moved since the last beat."""
        now_s = time.monotonic()
        if sheet is not self._current:
            self._current, self._since_s, self._look_s = sheet, now_s, _PATIENCE_S
            return 0.0
        return now_s - self._since_s

    def _say(self, sheet: Sheet | None) -> None:
        if sheet is not self._said:
            self._said = sheet
            placed = None if sheet is None else replace(sheet, place=self._place())
            self._board.enter(self._rank, placed)

    def _last_sheets(self) -> dict[int, Sheet]:
        return {rank: sheet for rank, (_, sheet) in self._ended.items()}

    def _look(self, own: Sheet) -> tuple[str, list[Sheet]] | None:
        """Why this rank waits for ever, and the places that prove it."""
        others = set(self._members(own)) - {self._rank}
        sheets = {self._rank: replace(own, place=self._place())}
        while others:  # those that are waited for, and those whom they wait for
            for rank in others:
                self.note_end(rank)
            sheets |= self._board.sheets(others - set(self._ended))
            known = set(sheets) | set(self._ended) | others
            others = {r for o in others & set(sheets) for r in self._members(sheets[o], o)} - known
        ended = self._last_sheets()
        chain = endless_wait(sheets, ended, self._topology, self._rank)
        if chain is None:
            return None
        proof = [ended.get(rank) or sheets[rank] for rank in chain]
        return self._told(chain, sheets), proof

    def _told(self, chain: list[int], sheets: dict[int, Sheet]) -> str:
        parts = [
            f"rank {rank} waits in {sheets[rank]} for rank {after}"
            for rank, after in pairwise(chain)
        ]
        if chain[-1] in self._ended:
            parts.append(f"rank {chain[-1]} {_ending(*self._ended[chain[-1]])}")
        return f"{STUCK}: {', '.join(parts)}. {_RULE}"

    def _members(self, sheet: Sheet, rank: int | None = None) -> Iterable[int]:
        rank = self._rank if rank is None else rank
        for call in sheet.open:
            if call.axis is None:
                yield call.peer
            else:
                yield from self._topology.group(call.axis, rank)

    def _place(self) -> str:
        """Where the main thread is in the user's code."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((*_LIBRARIES, "<")):
                return f"{Path(file).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


_RULE: Final = (
    "All ranks of a group must make the group's calls, in one order; look for code that depends on "
    "the rank, and for ranks with different numbers of batches"
)


def _ending(end: str, sheet: Sheet) -> str:
    """How a rank came to its end."""
    if sheet.failed:
        return f"{end} in {' in '.join(map(str, sheet.failed))}"
    return (
        f"{end} without a call of the library"
        if sheet.last is None
        else f"{end} after {sheet.last}"
    )
