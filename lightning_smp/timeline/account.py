"""Where the time of a step went, stage by stage. Pure.

Of each rank's wall time, *work* is the time in actions outside of waits. The rest is idle:

- *warm-up and drain*: waits before the rank has finished its first action, and the time after its
  last action until the last rank has finished its own. A pipeline cannot do without them.
- *imbalance*: later waits while the sender was still at work on what is waited for.
- *communication*: the part of waits after the sender had made it.
- *host*: all else, that is the time between actions, and before the first and after the last one.

The five add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smp.timeline.events import StepRecord, Wait

__all__ = ["Account", "accounts", "bubble"]


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds of one rank's step, by what they went into; see the module."""

    wall: float
    work: float
    warmup_drain: float
    imbalance: float
    communication: float
    host: float

    @property
    def idle(self) -> dict[str, float]:
        """Share of the wall time that was lost to each cause."""
        names = ("warmup_drain", "imbalance", "communication", "host")
        return {name: getattr(self, name) / self.wall for name in names}


def accounts(ranks: Sequence[StepRecord]) -> list[Account]:
    """One account for each rank.

    Args:
        ranks: what each stage measured, by stage.
    """
    last = max((rank.spans[-1].end for rank in ranks if rank.spans), default=0.0)
    made = [
        {
            (s.kind != "F", s.microbatch, s.segment): s.end
            for s in rank.spans if s.kind != "W"
        }
        for rank in ranks
    ]  # fmt: skip
    return [_account(rank, made, last) for rank in ranks]


def _account(
    rank: StepRecord, made: Sequence[dict[tuple[bool, int, int], float]], last: float
) -> Account:
    if not rank.spans:
        return Account(
            rank.wall, 0.0, min(last, rank.wall), 0.0, 0.0, rank.wall - min(last, rank.wall)
        )
    first = rank.spans[0].end
    warmup = imbalance = communication = 0.0
    for wait in rank.waits:
        length = wait.end - wait.start
        ready = made[wait.sender].get((wait.is_gradient, wait.microbatch, wait.segment), wait.start)
        late = min(max(wait.end - ready, 0.0), length)
        communication += late
        if wait.start < first:
            warmup += length - late
        else:
            imbalance += length - late
    drain = max(min(last, rank.wall) - rank.spans[-1].end, 0.0)
    inside = sum(_overlap(wait, rank) for wait in rank.waits)
    work = sum(span.end - span.start for span in rank.spans) - inside
    known = work + warmup + drain + imbalance + communication
    return Account(rank.wall, work, warmup + drain, imbalance, communication, rank.wall - known)


def _overlap(wait: Wait, rank: StepRecord) -> float:
    """How much of a wait lies in actions."""
    return sum(
        max(min(wait.end, span.end) - max(wait.start, span.start), 0.0) for span in rank.spans
    )


def bubble(found: Sequence[Account]) -> float:
    """Share of all ranks' time that was not work."""
    wall = sum(account.wall for account in found)
    return 1.0 - sum(account.work for account in found) / wall if wall else 0.0
