"""The list scheduler: walks through simulated time and gives every idle rank its best ready action.

Note "No deadlock". A microbatch *opens* on a rank with its first forward there, and in the step
with its first forward anywhere; it closes after its last action there or anywhere. Limits hold back
openings only, never an action of an open microbatch, and openings happen in ascending order, on
each rank and in the step. So the lowest unfinished microbatch is never held back for good: those
above it cannot take its place. Hence every call ends with all actions ordered, for every graph and
every limit of at least one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lightning_smp.schedule.work import BACKWARD, FORWARD, KINDS, WEIGHT, Need, Work

__all__ = ["Policy", "list_schedule"]

_SAME_TIME = 1e-9  # of the total cost: sums of equal costs in another order are the same time


@dataclass(frozen=True, slots=True)
class Policy:
    """What the list scheduler prefers and where it holds back.

    Attributes:
        active: Most microbatches open in the step.
        limits: For each rank, the most microbatches open on it.
        priority: For each action name, its priority among actions of its kind; smaller goes first.
        forwards_first: Whether a rank starts backwards only after its last forward; otherwise a
            ready backward goes before any forward. The second part of a split backward goes last.
    """

    active: int
    limits: Sequence[int]
    priority: Sequence[tuple[int, ...]]
    forwards_first: bool = False


class _Event(NamedTuple):
    """At ``time`` the action ended (``is_end``), or its last input arrived."""

    time: float
    name: int
    is_end: bool


def list_schedule(work: Work, policy: Policy) -> list[list[int]]:
    """Order all actions of the step; see the note "No deadlock".

    Returns:
        For each rank, the names of its actions in order.
    """
    return _ListScheduler(work, policy).run()


class _ListScheduler:
    """The state of one walk through time. Lives for one call of :func:`list_schedule`."""

    def __init__(self, work: Work, policy: Policy) -> None:
        ranks = range(work.num_ranks)
        self.work = work
        self.policy = policy
        self.tolerance = _SAME_TIME * sum(work.costs)
        self.orders: list[list[int]] = [[] for _ in ranks]
        self.now = 0.0
        self.events: list[_Event] = []
        self.is_idle = [True for _ in ranks]
        self.ready_backwards: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in ranks]
        self.ready_forwards: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in ranks]
        self.ready_openings: list[set[int]] = [set() for _ in ranks]
        self.ready_weights: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in ranks]
        self.gate = _Gate(work, policy)
        self.forwards_left = [0 for _ in ranks]
        self.missing = [0] * len(work.actions)
        self.arrivals = [0.0] * len(work.actions)
        self.feeds: list[list[Need]] = [[] for _ in work.actions]
        for name in work.todo:
            self.missing[name] = len(work.needs[name])
            for need, delay in work.needs[name]:
                self.feeds[need].append((name, delay))
            if name % KINDS == FORWARD:
                self.forwards_left[work.ranks[name]] += 1

    def run(self) -> list[list[int]]:
        self.events = [
            _Event(0.0, name, False) for name in self.work.todo if not self.missing[name]
        ]
        heapify(self.events)
        while self.events:
            self.now = self.events[0].time
            woken: set[int] = set()
            while self.events and self.events[0].time <= self.now + self.tolerance:
                event = heappop(self.events)
                woken |= self._finish(event) if event.is_end else self._make_ready(event.name)
            while woken:
                rank = min(woken)
                woken.discard(rank)
                woken |= self._start_on(rank)
        assert sum(map(len, self.orders)) == len(self.work.todo)
        return self.orders

    def _finish(self, event: _Event) -> set[int]:
        """End an action; return the ranks that may have something to start now."""
        rank = self.work.ranks[event.name]
        self.is_idle[rank] = True
        woken = {rank}
        for name, delay in self.feeds[event.name]:
            arrival = max(self.arrivals[name], event.time + delay)
            self.arrivals[name] = arrival
            self.missing[name] -= 1
            if self.missing[name]:
                continue
            if arrival <= self.now + self.tolerance:
                woken |= self._make_ready(name)
            else:
                heappush(self.events, _Event(arrival, name, False))
        if self.gate.close(event.name):
            woken.update(range(self.work.num_ranks))
        return woken

    def _make_ready(self, name: int) -> set[int]:
        rank = self.work.ranks[name]
        entry = (self.policy.priority[name], name)
        if name % KINDS == BACKWARD:
            heappush(self.ready_backwards[rank], entry)
        elif name % KINDS == WEIGHT:
            heappush(self.ready_weights[rank], entry)
        elif self.gate.is_opening(name):
            self.ready_openings[rank].add(name)
        else:
            heappush(self.ready_forwards[rank], entry)
        return {rank}

    def _start_on(self, rank: int) -> set[int]:
        """Start the best ready action, if any; return the ranks that an opening may have freed."""
        if not self.is_idle[rank]:
            return set()
        name = self._choose(rank)
        if name is None:
            return set()
        self.is_idle[rank] = False
        self.orders[rank].append(name)
        heappush(self.events, _Event(self.now + self.work.costs[name], name, True))
        if name % KINDS != FORWARD:
            return set()
        self.forwards_left[rank] -= 1
        return set(range(self.work.num_ranks)) if self.gate.open(name) else set()

    def _choose(self, rank: int) -> int | None:
        backwards = self.ready_backwards[rank]
        if backwards and not (self.policy.forwards_first and self.forwards_left[rank]):
            return heappop(backwards)[1]
        forward = self._choose_forward(rank)
        weights = self.ready_weights[rank]
        return heappop(weights)[1] if forward is None and weights else forward

    def _choose_forward(self, rank: int) -> int | None:
        forwards = self.ready_forwards[rank]
        opening = self.gate.next_opening(rank)
        if opening not in self.ready_openings[rank]:
            return heappop(forwards)[1] if forwards else None
        if forwards and forwards[0] < (self.policy.priority[opening], opening):
            return heappop(forwards)[1]
        self.ready_openings[rank].discard(opening)
        return opening


class _Gate:
    """Counts open microbatches, in the step and on each rank, and says which may open next."""

    def __init__(self, work: Work, policy: Policy) -> None:
        self.work = work
        self.policy = policy
        self.left = [0] * work.num_microbatches
        self.left_on = [[0] * work.num_microbatches for _ in range(work.num_ranks)]
        self.openings: list[list[int]] = [[] for _ in range(work.num_ranks)]
        for name in work.todo:
            rank, microbatch = work.ranks[name], work.actions[name].microbatch
            if not self.left_on[rank][microbatch]:
                self.openings[rank].append(name)
            self.left[microbatch] += 1
            self.left_on[rank][microbatch] += 1
        self.opening_names = {name for names in self.openings for name in names}
        self.opened_on = [0] * work.num_ranks
        self.to_open = [m for m, left in enumerate(self.left) if left]
        self.num_opened = 0
        self.num_active = 0
        self.num_active_on = [0] * work.num_ranks

    def is_opening(self, name: int) -> bool:
        """Tell whether the forward is the first of its microbatch on its rank."""
        return name in self.opening_names

    def next_opening(self, rank: int) -> int:
        """Name the forward that may open a microbatch on the rank now; -1 if none may."""
        names, position = self.openings[rank], self.opened_on[rank]
        if position == len(names) or self.num_active_on[rank] >= self.policy.limits[rank]:
            return -1
        microbatch = self.work.actions[names[position]].microbatch
        if microbatch > self._next_in_step():
            return -1
        if microbatch == self._next_in_step() and self.num_active >= self.policy.active:
            return -1
        return names[position]

    def open(self, name: int) -> bool:
        """Note the start of a forward; return whether other ranks may open more because of it."""
        if name not in self.opening_names:
            return False
        rank = self.work.ranks[name]
        opens_step = self.work.actions[name].microbatch == self._next_in_step()
        self.opened_on[rank] += 1
        self.num_active_on[rank] += 1
        self.num_active += opens_step
        self.num_opened += opens_step
        return opens_step

    def close(self, name: int) -> bool:
        """Note the end of an action; return whether its microbatch closed in the step."""
        rank, microbatch = self.work.ranks[name], self.work.actions[name].microbatch
        self.left_on[rank][microbatch] -= 1
        self.left[microbatch] -= 1
        self.num_active_on[rank] -= not self.left_on[rank][microbatch]
        self.num_active -= not self.left[microbatch]
        return not self.left[microbatch]

    def _next_in_step(self) -> int:
        """Return the lowest microbatch that is open nowhere yet."""
        if self.num_opened == len(self.to_open):
            return self.work.num_microbatches
        return self.to_open[self.num_opened]
