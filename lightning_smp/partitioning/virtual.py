"""Evens out virtual stages: chunks of one round alike, and all chunks of a stage together. Pure.

The exact split makes the slowest *chunk* as fast as possible. With few items to a chunk (80 layers
in 48 chunks) that leaves open what decides: a stage works as long as all of its chunks together,
and a group of microbatches passes the chunks of a round as fast as the slowest of them. So rounds
of equal chunks (2, 2 and 1 layers) are tried as well, and each start is improved by passing items
on, one at a time, from a heavy stage to a light one: every boundary between their chunks of one
round moves by one item, so that the stages between keep their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from lightning_smp.partitioning.split import Item, stage_costs

__all__ = ["even_out"]

_MAX_MOVES = 256
_GAIN = 1e-9


def even_out(
    items: Sequence[Item], chunks: Sequence[int], num_stages: int, memory_weight: float
) -> list[int]:
    """Returns the chunk of each item, so that stages and rounds are as even as was found.

    Args:
        items: In execution order.
        chunks: The chunk of each item; returned as it is where tied items break the order.
        num_stages: Chunk c lives on stage ``c % num_stages``.
        memory_weight: From 0 (compute alone counts) to 1 (memory alone counts).
    """
    num_chunks = max(chunks, default=-1) + 1
    sizes = [chunks.count(chunk) for chunk in range(num_chunks)]
    is_monotone = all(a <= b for a, b in pairwise(chunks))
    if not sizes or not is_monotone or num_chunks % num_stages or 0 in sizes:
        return list(chunks)
    weights = stage_costs(items, range(len(items)), len(items), memory_weight)
    sums = list(accumulate(weights, initial=0.0))
    best: _Moves | None = None
    for start in (sizes, *_rounds(len(items), num_stages, num_chunks // num_stages)):
        moves = _Moves(sums, start, num_stages)
        moves.improve_all()
        if best is None or moves.badness < best.badness * (1.0 - _GAIN):
            best = moves
    assert best is not None
    return [chunk for chunk, size in enumerate(best.sizes) for _ in range(size)]


def _rounds(num_items: int, num_stages: int, num_rounds: int) -> Iterator[list[int]]:
    """Yields sizes that are equal within each round but for what is left over.

    What is left over goes to the first and the last chunk, where models have small items
    (embeddings, norms); the rounds with one item more are the first or the last ones.
    """
    per_stage, left = divmod(num_items, num_stages)
    size, more = divmod(per_stage, num_rounds)
    for larger in {tuple(range(more)), tuple(range(num_rounds - more, num_rounds))}:
        for at_begin in range(left + 1):
            sizes = [
                size + (chunk // num_stages in larger) for chunk in range(num_stages * num_rounds)
            ]
            sizes[0] += at_begin
            sizes[-1] += left - at_begin
            if min(sizes) > 0:
                yield sizes


class _Moves:
    """Sizes of the chunks, and how bad they are."""

    def __init__(self, sums: Sequence[float], sizes: Sequence[int], num_stages: int) -> None:
        self.sums, self.sizes, self.num_stages = sums, list(sizes), num_stages
        self.loads, self.badness = self._judge(self.sizes)

    def improve_all(self) -> None:
        """Moves items as long as that helps."""
        for _ in range(_MAX_MOVES):
            if not self._improve():
                return

    def _improve(self) -> bool:
        """Makes the first move that helps, from the heaviest to the lightest stage."""
        order = sorted(range(self.num_stages), key=lambda stage: -self.loads[stage])
        return any(
            self._pass_on(heavy, light)
            for heavy in order
            for light in reversed(order)
            if self.loads[light] < self.loads[heavy]
        )

    def _pass_on(self, heavy: int, light: int) -> bool:
        for first in range(0, len(self.sizes), self.num_stages):
            if self.sizes[first + heavy] < 2:
                continue
            sizes = list(self.sizes)
            sizes[first + heavy] -= 1
            sizes[first + light] += 1
            loads, badness = self._judge(sizes)
            if badness < self.badness * (1.0 - _GAIN):
                self.sizes, self.loads, self.badness = sizes, loads, badness
                return True
        return False

    def _judge(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        """Loads of the stages; the slowest of them and of each round, then the sum of squares."""
        ends = list(accumulate(sizes, initial=0))
        chunks = [self.sums[end] - self.sums[begin] for begin, end in pairwise(ends)]
        starts = range(0, len(chunks), self.num_stages)
        rounds = [chunks[first : first + self.num_stages] for first in starts]
        loads = [sum(column) for column in zip(*rounds, strict=True)]
        squares = sum(load * load for load in loads) / self.num_stages
        return loads, max(loads) + sum(map(max, rounds)) + squares
