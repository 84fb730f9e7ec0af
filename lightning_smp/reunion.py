"""Ranks that go on after a run, or after an error: whether what they share is still in step.

An error may leave messages under way, of which a later call would take the wrong one, or operations
that some ranks have begun and others never will. So before the ranks go on they meet at the job's
store, where nothing can be out of step, and compare how they come and how many operations each of
their groups has begun: all equal, nothing is under way but messages from one rank to another, whose
groups are made anew. Otherwise all ranks are refused, with what happened before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from lightning_smp.calls import Torn
from lightning_smp.errors import CommunicationError
from lightning_smp.failure_board import ANSWER_S
from lightning_smp.groups import Groups
from lightning_smp.kept_groups import KeptGroups
from lightning_smp.native.backend import num_operations

__all__ = ["Reunion", "Standing", "WhyMissing", "obstacle_after"]

WhyMissing = Callable[[list[int], float], "str | None"]
"""Given ranks that have not come and the seconds since this one has: why they never will, or None
while they may come."""

_POLL_S: Final = 0.01
_RARELY_S: Final = 0.16
_LOOK_S: Final = 0.5  # between two looks at those that are missing
_GO: Final = "go"
_RENEW: Final = "renew"
_REFUSAL: Final = "refusal"
_IF_TORN: Final = "refusal if torn"
_RULE: Final = (
    "After an error all ranks can go on only if each of them has met it at the same place. Let the "
    "error end the processes and start them anew (in a sweep, each trial in processes of its own), "
    "or raise it on every rank"
)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a rank comes to a reunion.

    Attributes:
        account: what it did before, in words that go on after "rank 0".
        failed: whether an error ended that.
        torn: whether messages may be under way.
        obstacle: why they could not be dealt with; None if they can.
    """

    account: str
    failed: bool
    torn: bool
    obstacle: str | None = None


class Reunion:
    """One meeting of all ranks; each has had as many before.

    Args:
        rank: this rank.
        size: number of all ranks.
        kept: the groups that are to be used again.
    """

    def __init__(self, rank: int, size: int, kept: KeptGroups) -> None:
        self._rank = rank
        self._size = size
        self._kept = kept
        own: Any = dist.distributed_c10d._get_default_store()
        store = own.clone()
        store.set_timeout(timedelta(seconds=ANSWER_S))
        self._store = store

    def hold(self, standing: Standing, limit_s: float, why_missing: WhyMissing) -> None:
        """Meets the other ranks. Collective over the world.

        Args:
            standing: of this rank.
            limit_s: how long the others may keep this rank waiting.
            why_missing: tells whether they will come.

        Raises:
            CommunicationError: on all ranks that come, if they cannot go on together.
        """
        begun = [(name, num_operations(group)) for name, group in self._kept.mine()]
        try:
            self._come(standing, begun)
            verdict = self._verdict(standing, limit_s, why_missing)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._rank} {standing.account}, and the store of rank 0 or the launcher is "
                f"gone: {str(error).partition(chr(10))[0]}. {_RULE}."
            ) from error
        if verdict == _RENEW:
            self._kept.renew_messages()
        elif verdict != _GO:
            raise CommunicationError(verdict)

    def _come(self, standing: Standing, begun: list[tuple[str, int]]) -> None:
        """Says how this rank comes, and notes where others differ."""
        number = self._store.add(f"lightning_smp/reunions/{self._rank}", 1)
        self._prefix = f"lightning_smp/reunion{number}"
        self._compare("failed", str(standing.failed), standing, _REFUSAL, "")
        others = " with other process groups"
        self._compare("groups", str(self._kept.kinds()), standing, _REFUSAL, others)
        for name, count in begun:
            others = " after other operations of a group"
            self._compare(f"begun in {name}", str(count), standing, _IF_TORN, others)
        if standing.obstacle is not None:
            self._note(_REFUSAL, f"rank {self._rank} {standing.account}: {standing.obstacle}")
        if standing.failed or standing.torn:
            self._store.set(self._key("torn"), "1")
        self._store.set(self._key(f"came/{self._rank}"), "1")

    def _verdict(self, standing: Standing, limit_s: float, why_missing: WhyMissing) -> str:
        """What all ranks do: the last one that comes says it, or one that gives up before."""
        if self._store.add(self._key("here"), 1) < self._size:
            return self._await_verdict(standing, limit_s, why_missing)
        is_torn = self._store.check([self._key("torn")])
        refusal = self._text(_REFUSAL) or (self._text(_IF_TORN) if is_torn else None)
        return self._decide(refusal or (_RENEW if is_torn else _GO))

    def _await_verdict(self, standing: Standing, limit_s: float, why_missing: WhyMissing) -> str:
        start_s = look_s = time.monotonic()
        missing, pause_s = list(range(self._size)), _POLL_S
        while (verdict := self._text("verdict")) is None:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RARELY_S)  # looks of many ranks cost the store's host time
            now_s = time.monotonic()
            if now_s - look_s < _LOOK_S:
                continue
            look_s = now_s
            missing = [r for r in missing if not self._store.check([self._key(f"came/{r}")])]
            reason = why_missing(missing, now_s - start_s) if missing else None
            if reason is None and now_s - start_s > limit_s:
                ranks = ", ".join(map(str, missing))
                reason = f"rank {ranks} did not come within the timeout of {limit_s:g} s"
            if reason is not None:
                text = f"rank {self._rank} {standing.account}, and {reason}. {_RULE}."
                return self._decide(text)
        return verdict

    def _compare(self, name: str, value: str, standing: Standing, note: str, how: str) -> None:
        """Notes that another rank that compares by this name has another value, if one has."""
        mine = json.dumps([value, self._rank, standing.account])
        first = str(self._store.compare_set(self._key(name), "", mine), "utf-8")
        theirs, rank, account = json.loads(first)
        if theirs != value:
            own = f"rank {self._rank} {standing.account}{how}"
            self._note(note, f"rank {rank} {account}, and {own}")

    def _note(self, name: str, reason: str) -> None:
        text = f"the ranks cannot go on together: {reason}. {_RULE}."
        self._store.compare_set(self._key(name), "", text)

    def _decide(self, verdict: str) -> str:
        """Gives the verdict, unless there is one; returns the first."""
        return str(self._store.compare_set(self._key("verdict"), "", verdict), "utf-8")

    def _text(self, name: str) -> str | None:
        key = self._key(name)
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def obstacle_after(torn: Torn, groups: Groups, backend: str) -> str | None:
    """Why messages that an error left under way cannot be dealt with; None if they can.

    Args:
        torn: the call that it left.
        groups: those of the run.
        backend: of groups that carry tensors.
    """
    exchanges = groups.pp_size > 1 or (groups.tp_size > 1 and not torn.in_step)
    if backend == "nccl" and exchanges:
        return "a message that is under way between GPUs cannot be taken back"
    return None
