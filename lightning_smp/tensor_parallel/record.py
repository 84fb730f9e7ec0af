"""The sharding record: which part of a full tensor each tensor-parallel rank holds.

Pure data and arithmetic; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_smp.deferred import Part
from lightning_smp.errors import ConfigError

__all__ = ["Range", "Sharding", "split_sizes"]

Range: TypeAlias = tuple[int, int]
"""First index and the index after the last."""


@lru_cache(maxsize=1024)
def split_sizes(length: int, num_ranks: int, unit: int = 1) -> tuple[int, ...]:
    """Return how many of `length` indices each rank holds; the first ranks hold what is left over.

    Args:
        length: number of indices, a multiple of `unit`.
        num_ranks: number of ranks.
        unit: indices that stay together (the channels of one attention head, for example).

    Raises:
        ConfigError: `unit` does not divide `length`.
    """
    if length % unit:
        raise ConfigError(
            f"{length} indices were to be split into units of {unit}, which does not divide them. "
            "Use a unit that does."
        )
    each, more = divmod(length // unit, num_ranks)
    return tuple(unit * (each + (rank < more)) for rank in range(num_ranks))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one tensor is split along one dimension.

    Attributes:
        dim: the dimension that is split, from 0.
        shape: shape of the full tensor.
        ranges: per rank the index ranges along `dim` that it holds, in the order in which they lie
            in its local tensor. Several for fused blocks (query, key, value); sizes may differ
            between ranks. All together they cover every index once.
    """

    dim: int
    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise ConfigError(f"dimension {self.dim} of a tensor of shape {self.shape} was split.")
        covered = sorted(r for ranges in self.ranges for r in ranges if r[0] != r[1])
        ends = [0, *(stop for _, stop in covered)]
        starts = [*(start for start, _ in covered), self.shape[self.dim]]
        if starts != ends:
            raise ConfigError(
                f"The ranges {covered} do not cover the {self.shape[self.dim]} indices of "
                f"dimension {self.dim} exactly once."
            )

    @classmethod
    def split(
        cls,
        shape: Sequence[int],
        dim: int,
        num_ranks: int,
        *,
        blocks: Sequence[int] | None = None,
        unit: int | Sequence[int] = 1,
    ) -> Sharding:
        """Return the split of each block of `dim` over the ranks, as even as it goes.

        Args:
            shape: of the full tensor.
            dim: the dimension to split; may be negative.
            num_ranks: number of ranks.
            blocks: lengths of the fused blocks along `dim`, each of which is split by itself;
                by default one block.
            unit: indices that stay together, for all blocks or per block.

        Raises:
            ConfigError: blocks that do not add up to the length, units that do not divide them.
        """
        dim = dim % len(shape)
        lengths = [shape[dim]] if blocks is None else list(blocks)
        units = [unit] * len(lengths) if isinstance(unit, int) else list(unit)
        ranges: list[list[Range]] = [[] for _ in range(num_ranks)]
        offset = 0
        for length, together in zip(lengths, units, strict=True):
            bounds = accumulate(split_sizes(length, num_ranks, together), initial=offset)
            for rank, bound in enumerate(pairwise(bounds)):
                ranges[rank].append(bound)
            offset += length
        return cls(dim, tuple(shape), tuple(map(tuple, ranges)))

    def part(self, rank: int) -> Part:
        """Return what `rank` holds, for tensors that are still to be made."""
        return Part(self.dim, self.ranges[rank])

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the tensor is split over."""
        return len(self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of indices along `dim` that each rank holds."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what `rank` holds."""
        return (*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Return the number of elements that `rank` holds."""
        return torch.Size(self.local_shape(rank)).numel()

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return torch.Size(self.shape).numel()

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """Return a copy of what `rank` holds of `full`, in C order.

        Raises:
            ConfigError: `full` has another shape than the record says.
        """
        if tuple(full.shape) != self.shape:
            raise ConfigError(
                f"A tensor of shape {tuple(full.shape)} was to be split, but the record is for "
                f"{self.shape}. Give the full tensor."
            )
        return self.part(rank).of(full)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from what all ranks hold, in order of rank.

        Raises:
            ConfigError: a shard has another shape than the record says.
        """
        found = [tuple(shard.shape) for shard in shards]
        wanted = [self.local_shape(rank) for rank in range(self.num_ranks)]
        if found != wanted:
            raise ConfigError(
                f"Shards of shapes {found} were to be joined; the record says {wanted}. Give the "
                "tensors of all ranks of the tensor group, in order."
            )
        full = shards[0].new_empty(self.shape)
        for rank, shard in enumerate(shards):
            for (start, stop), part in zip(
                self.ranges[rank], self._parts(rank, shard), strict=True
            ):
                full.narrow(self.dim, start, stop - start).copy_(part)
        return full

    def _parts(self, rank: int, shard: Tensor) -> Iterator[Tensor]:
        lengths = [stop - start for start, stop in self.ranges[rank]]
        yield from shard.split(lengths, self.dim)
