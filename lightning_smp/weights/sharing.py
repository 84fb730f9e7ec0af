"""With whom a rank shares gradients, and how much its replica counts in their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from lightning_smp.errors import UnsupportedError
from lightning_smp.weights.ownership import Ownership

__all__ = ["SharingGroups", "Stages", "WeightAgreement"]

Stages: TypeAlias = tuple[int, ...]
MakeGroup: TypeAlias = Callable[[tuple[int, ...]], "dist.ProcessGroup | None"]


class SharingGroups:
    """The process groups over which gradients are summed, one per distinct set of stages.

    Collective over the world at construction: every rank must construct it with equal arguments,
    because `make_group` is called once per set, in the same order everywhere.
    """

    def __init__(
        self, ownership: Ownership, stage_ranks: Sequence[Sequence[int]], make_group: MakeGroup
    ) -> None:
        """Creates the groups.

        Args:
            ownership: which stages hold which parameter.
            stage_ranks: per stage the global ranks that hold equal copies, by dp_rank.
            make_group: creates the process group of the given ascending global ranks; called on
                every rank, member or not.
        """
        self.pp_rank: Final = ownership.pp_rank
        self.dp_ranks: Final = tuple(stage_ranks[ownership.pp_rank])
        self._groups: dict[Stages, dist.ProcessGroup | None] = {}
        shared = {ownership.stages_of(parameter) for parameter in ownership.parameters()}
        for stages in sorted(shared | {(stage,) for stage in range(ownership.pp_size)}):
            ranks = tuple(sorted(rank for stage in stages for rank in stage_ranks[stage]))
            self._groups[stages] = make_group(ranks) if len(ranks) > 1 else None

    def __getitem__(self, stages: Stages) -> dist.ProcessGroup | None:
        """Return the group of the ranks of `stages`; None where nothing needs to be summed."""
        return self._groups[stages]

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks of this stage, one per replica; None for a single replica."""
        return self._groups[(self.pp_rank,)]


class WeightAgreement:
    """One tiny all-reduce that tells every replica the weights of all.

    Collective over `group` at construction (asynchronous); `share` waits for it.
    """

    def __init__(
        self, weight: float, group: dist.ProcessGroup, size: int, device: torch.device
    ) -> None:
        """Starts the exchange of `weight` among the `size` ranks of `group`, on `device`."""
        self._weight = weight
        self._share: float | None = None
        # A stream of its own: reading the result must not wait for the backward's kernels.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(self._stream):
            row = torch.zeros(size, dtype=torch.float64)
            row[dist.get_group_rank(group, dist.get_rank())] = weight
            self._row = row.to(device)
            # One summand per place, so the sum is exact, whatever the algorithm.
            self._work = dist.all_reduce(self._row, group=group, async_op=True)

    def share(self) -> float:
        """Return w_r / sum of all weights, from the same numbers on every rank.

        Raises:
            UnsupportedError: on all ranks, if a weight is negative or not finite, or all are 0.
        """
        if self._share is None:
            with torch.cuda.stream(self._stream):
                self._work.wait()
                weights = self._row.tolist()
            total = math.fsum(weights) if all(map(math.isfinite, weights)) else math.nan
            if min(weights) < 0.0 or not 0.0 < total < math.inf:
                raise UnsupportedError(
                    f"The weights of the replicas are {weights}; each must be finite and at least "
                    f"0, and one must be positive. They are the numbers of samples, or what the "
                    f"step returned as loss_weight."
                )
            self._share = self._weight / total
        return self._share
