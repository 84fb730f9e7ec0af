"""The textbook orders, written down without simulating: all-forwards-first and one-F-one-B.

Every order here is a merge, rank by rank, of a fixed list of forwards with a fixed list of
backwards. Both lists follow one total order of the whole step (``waves``), so neither alone can
deadlock; their merge can, on graphs it was not meant for, and must be played before use. The second
parts of split backwards are woven into the merged order.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smp.schedule.work import BACKWARD, FORWARD, KINDS, WEIGHT, Work

__all__ = ["Waves", "merge_one_f_one_b", "one_after_the_other", "waves", "weave_weights"]


@dataclass(frozen=True, slots=True)
class Waves:
    """For each rank, its forwards and its backwards in the order of a priority."""

    forwards: list[list[int]]
    backwards: list[list[int]]


def waves(work: Work, priority: Sequence[tuple[int, ...]]) -> Waves:
    """Sort each rank's forwards and backwards (whole, or their first parts) by priority."""
    forwards: list[list[int]] = [[] for _ in range(work.num_ranks)]
    backwards: list[list[int]] = [[] for _ in range(work.num_ranks)]
    for name in sorted(work.todo, key=priority.__getitem__):
        if name % KINDS != WEIGHT:
            lists = forwards if name % KINDS == FORWARD else backwards
            lists[work.ranks[name]].append(name)
    return Waves(forwards, backwards)


def one_after_the_other(lists: Waves) -> list[list[int]]:
    """Put each rank's backwards after all of its forwards (GPipe)."""
    return [f + b for f, b in zip(lists.forwards, lists.backwards, strict=True)]


def weave_weights(
    work: Work, orders: Sequence[Sequence[int]], delays: Sequence[int]
) -> list[list[int]]:
    """Put the second part of each split backward behind the first of a later one.

    With a delay of ``rank`` on a chain this is ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section
    2.1): no rank keeps more alive than rank 0 does under 1F1B.

    Args:
        work: The step.
        orders: The order of each rank without second parts.
        delays: For each rank, how many first parts are executed before the first second part
            follows the next one.
    """
    woven = []
    for order, delay in zip(orders, delays, strict=True):
        waiting: deque[int] = deque()
        row = []
        for name in order:
            row.append(name)
            if name % KINDS == BACKWARD and not work.is_last_use(name):
                waiting.append(name - BACKWARD + WEIGHT)
                if len(waiting) > delay:
                    row.append(waiting.popleft())
        woven.append(row + list(waiting))
    return woven


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
        self.with_backward = {name - BACKWARD for name in backwards}
        self.to_run = set(forwards)
        self.alive: set[int] = set()
        self.left = Counter(self.microbatches.values())
        self.open: set[int] = set()

    def can_forward(self, active: int) -> bool:
        """Tell whether the next forward belongs to an open microbatch or may open one."""
        if not self.forwards:
            return False
        return len(self.open) < active or self.microbatches[self.forwards[0]] in self.open

    def can_backward(self) -> bool:
        """Tell whether the next backward's own forward was executed."""
        return bool(self.backwards) and self.backwards[0] - BACKWARD not in self.to_run

    def take(self, names: deque[int]) -> int:
        """Execute the next forward or backward."""
        name, microbatch = names[0], self.microbatches[names.popleft()]
        if name % KINDS == BACKWARD:
            self.alive.discard(name - BACKWARD)
        else:
            self.to_run.discard(name)
            self.alive |= {name} & self.with_backward
        self.left[microbatch] -= 1
        (self.open.add if self.left[microbatch] else self.open.discard)(microbatch)
        return name
