"""With whom a rank shares gradients, and how much its replica counts in their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.native.throttle import throttle_for
from lightning_smp.weights.ownership import Ownership

__all__ = ["Sharers", "SharingGroups", "Stages", "WeightAgreement", "sharers_of"]

Stages: TypeAlias = tuple[int, ...]
Sharers: TypeAlias = tuple[Stages, bool]
"""Who holds copies of a parameter: the stages, and whether only ranks of the same tp_rank do."""
MakeGroup: TypeAlias = Callable[[tuple[int, ...]], "dist.ProcessGroup | None"]


def sharers_of(parameter: nn.Parameter, ownership: Ownership) -> Sharers:
    """Return who the gradient of a parameter is summed over.

    Over dp; over rdp where it comes from the samples of the whole tensor group already.
    """
    return ownership.stages_of(parameter), ownership.tensor.sees_group(parameter)


class SharingGroups:
    """The process groups over which gradients are summed, one per distinct set of sharers.

    Collective over the world at construction: every rank must construct it with equal arguments,
    because `make_group` is called once per set, in the same order everywhere.
    """

    def __init__(
        self,
        ownership: Ownership,
        stage_ranks: Sequence[Sequence[int]],
        make_group: MakeGroup,
        tp_rank_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """Creates the groups.

        Args:
            ownership: which stages hold which parameter.
            stage_ranks: per stage the global ranks that hold equal copies, by dp_rank.
            make_group: creates the process group of the given ascending global ranks; called on
                every rank, member or not.
            tp_rank_of: position of a global rank in its tensor group.
        """
        self.pp_rank: Final = ownership.pp_rank
        self.dp_ranks: Final = tuple(stage_ranks[ownership.pp_rank])
        own = ownership.tensor.tp.rank
        tp_ranks = range(ownership.tensor.tp.size)
        self._groups: dict[Sharers, dist.ProcessGroup | None] = {}
        shared = {sharers_of(parameter, ownership) for parameter in ownership.parameters()}
        plain = {((stage,), False) for stage in range(ownership.pp_size)}
        for stages, by_tp_rank in sorted(shared | plain):
            ranks = sorted(rank for stage in stages for rank in stage_ranks[stage])
            parts = [tuple(r for r in ranks if tp_rank_of(r) == tp_rank) for tp_rank in tp_ranks]
            made = [
                make_group(part) if len(part) > 1 else None
                for part in (parts if by_tp_rank else [tuple(ranks)])
            ]
            self._groups[stages, by_tp_rank] = made[own if by_tp_rank else 0]
        self._throttles = {
            sharers: throttle
            for sharers, group in self._groups.items()
            if group is not None and self._may_wait(sharers) and (throttle := throttle_for(group))
        }

    def __getitem__(self, sharers: Sharers) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share; None where nothing needs to be summed."""
        return self._groups[sharers]

    def all_reduce(
        self, sharers: Sharers, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work | None:
        """Start the reduction of `tensor`, in place, once the group's bound leaves room.

        Collective over the group of `sharers`; blocks while too many of its collectives are in
        flight.
        """
        group, throttle = self._groups[sharers], self._throttles.get(sharers)

        def start() -> dist.Work | None:
            work: dist.Work | None = dist.all_reduce(tensor, op, group=group, async_op=True)
            return work

        return start() if throttle is None else throttle.issue(start)

    def _may_wait(self, sharers: Sharers) -> bool:
        """Whether this rank may wait for one reduction of a group before it starts the next.

        Not where stages share: a member may reach its reduction only after it has received from
        this very rank, later in the step.
        """
        return sharers[0] == (self.pp_rank,)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks of this stage, one per replica; None for a single replica."""
        return self._groups[(self.pp_rank,), False]


class WeightAgreement:
    """One tiny all-reduce that tells every replica the weights of all.

    Collective over `group` at construction (asynchronous); `share` waits for it.
    """

    def __init__(
        self, weight: float, group: dist.ProcessGroup, size: int, device: torch.device
    ) -> None:
        """Starts the exchange of `weight` among the `size` ranks of `group`, on `device`."""
        self._weight = weight
        self._total: float | None = None
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
        return self._weight / self.total()

    def total(self) -> float:
        """Return the sum of all weights.

        Raises:
            UnsupportedError: as `share`.
        """
        if self._total is None:
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
            self._total = total
        return self._total
