"""Measures the units over real steps, then moves them so that the stages take equally long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from lightning_smp.deploy.deployment import Deployment
from lightning_smp.deploy.partitioning import ownership_of
from lightning_smp.engine.meter import UnitMeter
from lightning_smp.errors import PartitionError, UnsupportedError
from lightning_smp.partitioning import MeasuredUnits, Partition, repartition, report
from lightning_smp.weights.migration import Migration
from lightning_smp.wire import all_gather_objects, broadcast_object

__all__ = ["Rebalanced", "Rebalancer"]

_MEASURED_STEPS: Final = 10
_WORTH_MOVING: Final = 0.98
"""A new split's slowest stage must take at most this much of what it takes now."""

_USABLE_MEMORY: Final = 0.9


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """What rebalancing did.

    Attributes:
        unit_seconds: by name of the unit, of its forwards and backwards in one microbatch.
        moved: the units that moved.
        moved_bytes: what this rank's pipeline sent for that.
        stages_before: seconds of one microbatch on each stage, as measured.
        stages_after: the same, by the same times, after the move.
        predicted_before_s: a step by the schedule and these times, with the old split.
        predicted_after_s: with the new one.
        measured_before_s: median of the measured steps before.
        measured_after_s: after; None while they have not been made.
    """

    unit_seconds: Mapping[str, float]
    moved: tuple[str, ...]
    moved_bytes: int
    stages_before: tuple[float, ...]
    stages_after: tuple[float, ...]
    predicted_before_s: float
    predicted_after_s: float
    measured_before_s: float
    measured_after_s: float | None = None

    def __str__(self) -> str:
        """The gain, in words."""
        stages = (
            f"the slowest stage takes {_ms(max(self.stages_before))} a microbatch, "
            f"{_ms(sum(self.stages_before) / len(self.stages_before))} would be even"
        )
        if not self.moved:
            return f"Rebalancing moved nothing: {stages}, and no other split is 2 % better."
        text = (
            f"Rebalancing moved {len(self.moved)} units ({self.moved_bytes / 2**20:.1f} MiB): "
            f"{stages}, now {_ms(max(self.stages_after))}; a step is predicted to take "
            f"{_ms(self.predicted_after_s)} instead of {_ms(self.predicted_before_s)}"
        )
        if self.measured_after_s is None:
            return f"{text}; {_ms(self.measured_before_s)} were measured before."
        return (
            f"{text}; measured: {_ms(self.measured_after_s)} instead of "
            f"{_ms(self.measured_before_s)}."
        )


class Rebalancer:
    """Counts and measures training steps; rebalances once.

    All ranks must use it alike: the same steps, and `run` at the same point.

    Args:
        deployment: the model over the ranks.
        after_steps: rebalance after this many training steps; at least 2, since the first one
            records its program.
        say: shows the gain.

    Attributes:
        result: what was done; None before.
    """

    def __init__(
        self, deployment: Deployment, after_steps: int, say: Callable[[str], None]
    ) -> None:
        self.result: Rebalanced | None = None
        self._deployment = deployment
        self._say = say
        self._until = after_steps
        self._measured = min(after_steps - 1, _MEASURED_STEPS)
        self._steps = 0
        self._meter = UnitMeter(deployment.device)
        self._is_over = False

    @property
    def is_due(self) -> bool:
        """Whether `run` must be called before the next training step."""
        return not self._is_over and self._steps >= self._until

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A training step runs inside."""
        engine = self._deployment.engine
        if self._is_over or engine is None:
            yield
            return
        self._steps += 1
        if self._until - self._measured < self._steps <= self._until:
            engine.meter = self._meter
        try:
            yield
        finally:
            engine.meter = None

    def run(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Moves units, or tells what moving them has brought. Collective over the world.

        Outside of steps, and when the gradients of mirrored parameters are summed.

        Args:
            optimizers: keep state for parameters; torch's own objects.

        Raises:
            UnsupportedError: on all ranks, where state cannot move.
            PartitionError: the ranks have found different splits.
        """
        if self.result is None:
            self.result = self._rebalance(optimizers)
            self._is_over = not self.result.moved
            self._steps, self._until = 0, self._measured + 1  # the next one records
            self._meter = UnitMeter(self._deployment.device)
        else:
            walls: list[Any] = all_gather_objects(
                self._meter.result().wall_s, self._deployment.groups.world_control
            )
            self.result = replace(self.result, measured_after_s=max(walls))
            self._is_over = True
        self._say(str(self.result))

    def _rebalance(self, optimizers: Sequence[torch.optim.Optimizer]) -> Rebalanced:
        deployment = self._deployment
        engine, current = deployment.engine, deployment.partition
        assert engine is not None
        assert current is not None
        measured, microbatches, wall_s, memory = self._gather(current)
        new = self._plan(current, measured, memory)
        before = measured.stage_seconds(current)
        after = measured.stage_seconds(new)
        pipeline, active = engine.pipeline, engine.active_microbatches
        unit_seconds = {name: sum(times) for name, times in measured.seconds.items()}
        done = Rebalanced(
            unit_seconds, (), 0, tuple(before), tuple(before),
            measured.step_seconds(current, microbatches, pipeline, active),
            measured.step_seconds(new, microbatches, pipeline, active), wall_s,
        )  # fmt: skip
        if not measured.order or max(after) > _WORTH_MOVING * max(before):
            return replace(done, predicted_after_s=done.predicted_before_s)
        moved = {
            name: (stage, new.stage_of[name])
            for name, stage in current.stage_of.items()
            if new.stage_of[name] != stage and name not in current.floating
        }
        moved_bytes = self._move(new, moved, optimizers)
        self._say(report(new, deployment.module))
        return replace(done, moved=tuple(moved), moved_bytes=moved_bytes, stages_after=tuple(after))

    def _gather(self, current: Partition) -> tuple[MeasuredUnits, int, float, float | None]:
        """What all ranks measured: the units, microbatches, a step, a rank's memory."""
        deployment, groups = self._deployment, self._deployment.groups
        engine, runtime = deployment.engine, deployment.runtime
        assert engine is not None
        assert runtime is not None
        names = {unit.index: unit.name for unit in runtime.units}
        own = self._meter.result()
        mine = [
            current.fingerprint(), {names[index]: times for index, times in own.units.items()},
            own.wall_s, _memory_of(deployment.device),
        ]  # fmt: skip
        everyone: list[Any] = all_gather_objects(mine, groups.world_control)
        if any(other[0] != everyone[0][0] for other in everyone):
            raise PartitionError(
                "the replicas of the model are split in different ways, so they cannot be "
                "rebalanced alike: their batches have different shapes. Pad the first batch to "
                "one shape, or use rebalance_after_steps=0."
            )
        seen: dict[str, list[tuple[float, float]]] = {}
        for _, units, _, _ in everyone:
            for name, times in units.items():
                seen.setdefault(name, []).append(times)
        seconds = {
            name: (sum(f for f, _ in found) / len(found), sum(b for _, b in found) / len(found))
            for name, found in sorted(seen.items())
        }
        calls = [
            names[entry.key[0][1]]
            for entry in (engine.programs[0].entries if engine.programs else ())
            if isinstance(entry.key[0], tuple)
        ]
        first: Any = broadcast_object((calls, len(engine.programs)), 0, groups.world_control)
        memories = [other[3] for other in everyone if other[3] is not None]
        wall_s = max(other[2] for other in everyone)
        memory = min(memories) if memories else None
        return MeasuredUnits(tuple(first[0]), seconds), first[1], wall_s, memory

    def _plan(self, current: Partition, measured: MeasuredUnits, memory: float | None) -> Partition:
        """The new split, the same on all ranks. Collective over the world."""
        deployment = self._deployment
        config, control = deployment.config, deployment.groups.world_control
        if not measured.order:
            return current
        split = partial(
            repartition, deployment.module, current, measured,
            memory_weight=config.memory_weight or 0.0, tied_parameters=config.tied_parameters,
            policy=config.partition_policy,
        )  # fmt: skip
        new = split(memory_limit=None)
        if memory is not None:
            limit = max(memory, *measured.stage_bytes(current))
            if max(measured.stage_bytes(new)) > limit:
                try:
                    new = split(memory_limit=limit)
                except PartitionError:  # the chunks of virtual stages may not fit one by one
                    new = current
        marks = all_gather_objects(new.fingerprint(), control)
        if any(mark != marks[0] for mark in marks):
            raise PartitionError(
                "the ranks have found different splits for the same measured times: submodules "
                "share other tensors on some ranks than on others. Use rebalance_after_steps=0."
            )
        return new

    def _move(
        self, new: Partition, moved: dict[str, tuple[int, int]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> int:  # fmt: skip
        """Moves all state; returns the bytes that this pipeline sent. Collective over the world."""
        deployment = self._deployment
        engine = deployment.engine
        assert engine is not None
        ownership = ownership_of(deployment.module, new, deployment.groups.pp_rank)
        migration = Migration(deployment.module, deployment.ownership, ownership, moved, optimizers)
        offer, error = None, None
        try:
            offer = migration.offer()
        except UnsupportedError as refusal:
            error = str(refusal)
        everyone: list[Any] = all_gather_objects(
            [error, migration.mark], deployment.groups.world_control
        )
        for rank, (text, mark) in enumerate(everyone):
            if text is not None:
                raise UnsupportedError(f"rebalancing, on rank {rank}: {text}")
            if mark != everyone[0][1]:
                raise UnsupportedError(
                    f"rebalancing: the modules on rank {rank} have other buffers than those on "
                    "rank 0, as happens where a forward registers some. Register them in "
                    "__init__, or use rebalance_after_steps=0."
                )
        offers: list[Any] = engine.control.agree(offer)
        with torch.no_grad():
            migration.run(offers, engine.channels, deployment.device)
        deployment.reassign(new, ownership, optimizers)
        return migration.moved_bytes


def _memory_of(device: torch.device) -> float | None:
    """Bytes that a rank may use; None where nobody can say."""
    if device.type != "cuda":
        return None
    return _USABLE_MEMORY * torch.cuda.get_device_properties(device).total_memory


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
