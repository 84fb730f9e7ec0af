"""Replicas with different numbers of batches: those that are through shadow the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from lightning_smp.errors import CommunicationError
from lightning_smp.process_state import state

if TYPE_CHECKING:
    from lightning_smp.script.replicas import Replicas

__all__ = ["Joining"]

_UNPLACED: Final = -1
"""Through without a step: the first one places the model, which takes all ranks."""
_THROUGH: Final = 0
_STEP: Final = 1
_BUFFERS: Final = 2
_REDUCTION: Final = 3


class Joining:
    """One `join` context on one rank.

    Before each collective over replicas the ranks tell each other what comes; who is through takes
    part in it, with zeros.

    Args:
        replicas: whose collectives are shadowed.
        initial: whether gradients stay divided by the number of all replicas.
        throws: whether all ranks raise when the first one is through.
    """

    def __init__(self, replicas: Replicas, *, initial: bool, throws: bool) -> None:
        self._replicas = replicas
        self._groups = replicas.deployment.groups
        self._initial = initial
        self._throws = throws
        self._active = list(range(self._groups.world_size))

    @property
    def divisor(self) -> int:
        """By how many replicas gradients are divided."""
        return self._groups.dp_size if self._initial else len(self._active_replicas())

    def announce_step(self) -> None:
        """A training step begins. Collective over the world.

        Before any other collective of the step, so that nobody waits in one for a rank that is
        through already.
        """
        self._exchange(_STEP)

    def announce_buffers(self) -> None:
        """Buffers will be shared. Collective over the world."""
        self._exchange(_BUFFERS)

    def announce_reduction(self) -> None:
        """Gradients will be reduced. Collective over the world."""
        self._exchange(_REDUCTION)

    @property
    def active(self) -> list[int]:
        """Global ranks that had batches when the ranks last told each other."""
        return self._active

    def shadow(self) -> None:
        """This rank is through: takes part until all are, then gets the weights of the last."""
        replicas = self._replicas
        mine = _THROUGH if replicas.deployment.sharing is not None else _UNPLACED
        while (coming := self._exchange(mine)) > _THROUGH:
            if coming == _BUFFERS:
                replicas.share_buffers(self.active)
            elif coming == _REDUCTION:
                self._reduce_nothing()
        replicas.joining = None
        if mine == _THROUGH:
            replicas.share_weights(self.active)

    def _reduce_nothing(self) -> None:
        parameters = self._replicas.deployment.local_parameters()
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._replicas.reduce_as_shadow()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _active_replicas(self) -> list[int]:
        group = self._groups.topology.group("dp", self._groups.rank)
        return [rank for rank in group if rank in self._active]

    def _exchange(self, mine: int) -> int:
        """What the active ranks are about to do."""
        row = torch.zeros(self._groups.world_size, dtype=torch.int64)
        row[self._groups.rank] = mine
        with state.calls.collective("model.join()", "world"):
            dist.all_reduce(row, group=self._groups.world_control)
        said: list[int] = row.tolist()
        active = [rank for rank, what in enumerate(said) if what > _THROUGH]
        self._check(said)
        if active:
            self._active = active
        if self._throws and 0 < len(active) < len(said):
            raise RuntimeError(
                f"join(throw_on_early_termination=True): ranks "
                f"{[rank for rank in range(len(said)) if rank not in active]} have no more batches."
            )
        return max(said)

    def _check(self, said: list[int]) -> None:
        for members in self._groups.topology.groups("mp"):
            if len({said[rank] for rank in members}) > 1:
                batches = ", ".join(
                    f"rank {rank} {'has a batch' if said[rank] > _THROUGH else 'is through'}"
                    for rank in members
                )
                raise CommunicationError(
                    f"join(): the ranks of one replica have different numbers of batches: "
                    f"{batches}. All ranks of a pipeline and of a tensor-parallel group need "
                    "equally many; only replicas may differ."
                )
        if _UNPLACED in said and max(said) > _THROUGH:
            raise CommunicationError(
                f"join(): ranks {[rank for rank, what in enumerate(said) if what == _UNPLACED]} "
                "have no batch at all, and the model's first step, which all ranks take part in, "
                "is still to come. Give each replica one batch at least."
            )
        if len(set(said) - {_THROUGH}) > 1:
            raise CommunicationError(
                f"join(): the replicas are at different points of a step: by rank, {said}. All "
                "must run the same steps while they have batches."
            )
