"""The textbook orders, written down without simulating: all-forwards-first and one-F-one-B.

Every order here is a merge, rank by rank, of a fixed list of forwards with a fixed list of
backwards. Both lists follow one total order of the whole step (``waves``), so neither alone can
deadlock; their merge can, on graphs it was not meant for, and must be played before use.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smp.schedule.work import Work

__all__ = ["Waves", "merge_one_f_one_b", "one_after_the_other", "waves"]


@dataclass(frozen=True, slots=True)
class Waves:
    """For each rank, its forwards and its backwards in the order of a priority."""

    forwards: list[list[int]]
    backwards: list[list[int]]


def waves(work: Work, priority: Sequence[tuple[int, ...]]) -> Waves:
    """Sort each rank's forwards and backwards by priority."""
    forwards: list[list[int]] = [[] for _ in range(work.num_ranks)]
    backwards: list[list[int]] = [[] for _ in range(work.num_ranks)]
    for name in sorted(work.todo, key=priority.__getitem__):
        (backwards if name % 2 else forwards)[work.ranks[name]].append(name)
    return Waves(forwards, backwards)


def one_after_the_other(lists: Waves) -> list[list[int]]:
    """Put each rank's backwards after all of its forwards (GPipe)."""
    return [f + b for f, b in zip(lists.forwards, lists.backwards, strict=True)]


def merge_one_f_one_b(
    work: Work, lists: Waves, *, slots: Sequence[int], active: int
) -> list[list[int]] | None:
    """Fill each rank's slots with forwards, then alternate one backward and one forward.

    Args:
        work: The step.
        lists: Forwards and backwards of each rank.
        slots: For each rank, the most segments alive at once.
        active: For each rank alike, the most microbatches open at once.

    Returns:
        The order of each rank, or None where a rank could go on only by breaking ``active``.
    """
    orders = []
    for forwards, backwards, limit in zip(lists.forwards, lists.backwards, slots, strict=True):
        order = _merge_rank(work, forwards, backwards, limit, active)
        if order is None:
            return None
        orders.append(order)
    return orders


def _merge_rank(
    work: Work, forwards: list[int], backwards: list[int], slots: int, active: int
) -> list[int] | None:
    rank = _RankMerge(work, forwards, backwards)
    order: list[int] = []
    while rank.forwards or rank.backwards:
        can_backward = rank.can_backward()
        if rank.can_forward(active) and not (can_backward and len(rank.alive) >= slots):
            order.append(rank.take(rank.forwards))
        elif can_backward:
            order.append(rank.take(rank.backwards))
        else:
            return None
    return order


class _RankMerge:
    """What is left to merge on one rank, and what is alive and open there."""

    def __init__(self, work: Work, forwards: list[int], backwards: list[int]) -> None:
        self.microbatches = {name: work.actions[name].microbatch for name in forwards + backwards}
        self.forwards = deque(forwards)
        self.backwards = deque(backwards)
        self.with_backward = {name - 1 for name in backwards}
        self.to_run = set(forwards)
        self.alive = self.with_backward - self.to_run
        self.left = Counter(self.microbatches.values())
        self.open = {self.microbatches[name + 1] for name in self.alive}

    def can_forward(self, active: int) -> bool:
        """Tell whether the next forward belongs to an open microbatch or may open one."""
        if not self.forwards:
            return False
        return len(self.open) < active or self.microbatches[self.forwards[0]] in self.open

    def can_backward(self) -> bool:
        """Tell whether the next backward's own forward was executed."""
        return bool(self.backwards) and self.backwards[0] - 1 not in self.to_run

    def take(self, names: deque[int]) -> int:
        """Execute the next forward or backward."""
        name, microbatch = names[0], self.microbatches[names.popleft()]
        if name % 2:
            self.alive.discard(name - 1)
        else:
            self.to_run.discard(name)
            self.alive |= {name} & self.with_backward
        self.left[microbatch] -= 1
        (self.open.add if self.left[microbatch] else self.open.discard)(microbatch)
        return name
