"""The reference: one device that takes the samples of all replicas in the same pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_smp.batch import split_batch
from lightning_smp.errors import UnsupportedError
from lightning_smp.lightning.stepper import loss_of
from lightning_smp.placed.random import digest_draws
from lightning_smp.placed.seeding import SeededUnits
from lightning_smp.verifying.probes import Probes

__all__ = ["OneDevice"]


class OneDevice(SingleDeviceStrategy):
    """Runs the user's step once for each replica and microbatch, with one loss for all of them.

    It shares with the pipeline how batches are split and how units are seeded, since both define
    what "equal" means for steps that draw random numbers or look at their whole batch; nothing of
    the placement, the schedule, the messages or the reductions.

    Args:
        device: where it runs.
        probes: note what the units give.
        microbatches: pieces of each replica's batch.
        seed: of the units' random streams.
    """

    def __init__(
        self, device: torch.device, probes: Probes, *, microbatches: int, seed: int
    ) -> None:
        super().__init__(device=device)
        self._probes = probes
        self._microbatches = microbatches
        self._seed = seed
        self._units: SeededUnits | None = None
        self.losses: list[list[float]] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss over the batches of all replicas."""
        batches, *others = (*args, *kwargs.values())
        module: Any = self.lightning_module
        if self._units is None:
            self._units = SeededUnits(module, self.root_device)
            self._units.install()
        step = module.trainer.fit_loop.total_batch_idx
        draws = digest_draws(self.root_device)
        parts: list[tuple[float, float, Any]] = []
        for replica, batch in enumerate(batches):
            self._probes.replica = replica
            pieces = split_batch(batch, self._microbatches, allow_uneven=True)
            total = sum(piece.num_samples for piece in pieces)
            for m, piece in enumerate(pieces):
                self._units.begin((self._seed, replica, 0, step, m))
                with self._units.repeating():
                    output = super().training_step(piece.value, *others)
                parts.append(_part(output, piece.num_samples, replica, total))
        if len(batches) > 1 and digest_draws(self.root_device) != draws:
            raise UnsupportedError(
                "the step draws random numbers outside of submodules, which each replica does on "
                "its own: one device cannot repeat that. Verify with one replica."
            )
        weights = sum(weight for weight, _, _ in parts)
        self.losses.append(_by_replica(parts, len(batches)))
        return sum(loss * (weight / weights) for weight, _, loss in parts)


def _part(output: Any, samples: int, replica: int, total: int) -> tuple[float, float, Any]:
    if output is None:
        raise UnsupportedError("training_step returned None; verify a step that has a loss.")
    given = output.get("loss_weight") if isinstance(output, Mapping) else None
    return (float(samples if given is None else given), float(replica), loss_of(output))


def _by_replica(parts: list[tuple[float, float, Any]], count: int) -> list[float]:
    found = []
    for replica in range(count):
        mine = [(weight, float(loss.detach())) for weight, r, loss in parts if r == replica]
        found.append(sum(w * loss for w, loss in mine) / sum(w for w, _ in mine))
    return found
