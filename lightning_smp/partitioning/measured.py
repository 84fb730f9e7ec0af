"""A new split from measured times: which one, and what a step would take. Pure.

The same on every rank, because all are given the same times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_smp.partitioning.analysis import Analysis
from lightning_smp.partitioning.atoms import find_atoms
from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.partitioning.plan import Partition, Policy, TiedParameters, plan_partition
from lightning_smp.schedule import Edge, Segment, SegmentGraph, make_schedule, simulate

__all__ = ["MeasuredUnits", "repartition"]


@dataclass(frozen=True)
class MeasuredUnits:
    """What the units cost in real steps.

    Attributes:
        order: names of the units that outer code calls, in order, with repetitions.
        seconds: by name of the unit, of its forwards and of its backwards in one microbatch.
    """

    order: tuple[str, ...]
    seconds: Mapping[str, tuple[float, float]]

    def costs(self, former: Mapping[str, AtomCost]) -> dict[str, AtomCost]:
        """The costs of all units, with these times; what was never measured takes none.

        Args:
            former: what is known of memory.
        """
        calls = Counter(self.order)
        found = {}
        for name, cost in former.items():
            forward_s, backward_s = self.seconds.get(name, (0.0, 0.0))
            kept = cost.saved_bytes * calls[name] // max(1, cost.calls)
            found[name] = replace(
                cost, calls=calls[name], forward_s=forward_s, backward_s=backward_s,
                saved_bytes=kept,
            )  # fmt: skip
        return found

    def stage_seconds(self, partition: Partition) -> list[float]:
        """What one microbatch takes on each stage."""
        sums = [0.0] * partition.num_stages
        for name, seconds in self.seconds.items():
            sums[partition.stage_of[name]] += sum(seconds)
        return sums

    def stage_bytes(self, partition: Partition) -> list[float]:
        """What each stage holds by the estimate that the split goes by."""
        in_flight = (partition.num_stages + 1) / 2
        sums = [0.0] * partition.num_stages
        for name, cost in partition.costs.items():
            sums[partition.stage_of[name]] += cost.state_bytes + in_flight * cost.saved_bytes
        return sums

    def step_seconds(
        self, partition: Partition, microbatches: int, pipeline: Any, active: int | None
    ) -> float:
        """What a step takes by the schedule, without transfers and the host's own work.

        Args:
            partition: the split.
            microbatches: how many.
            pipeline: kind of schedule.
            active: most microbatches in flight on a stage.
        """
        graphs = [self._graph(partition)] * microbatches
        if not graphs[0].segments:
            return 0.0
        schedule = make_schedule(graphs, pipeline, active_microbatches=active)
        return simulate(graphs, schedule).makespan

    def _graph(self, partition: Partition) -> SegmentGraph:
        """One segment for each run of calls on one stage."""
        calls = Counter(self.order)
        segments: list[Segment] = []
        for name in self.order:
            stage = partition.stage_of[name]
            if name in partition.floating and segments:
                stage = segments[-1].rank
            if not segments or segments[-1].rank != stage:
                segments.append(Segment(stage, 0.0, 0.0, True))
            forward_s, backward_s = (
                seconds / calls[name] for seconds in self.seconds.get(name, (0.0, 0.0))
            )
            last = segments[-1]
            segments[-1] = replace(
                last,
                forward_cost=last.forward_cost + forward_s,
                backward_cost=last.backward_cost + backward_s,
                weight_cost=last.weight_cost + max(0.0, backward_s - forward_s),
            )
        edges = [Edge(i, i + 1, has_gradient=True) for i in range(len(segments) - 1)]
        return SegmentGraph(partition.num_stages, tuple(segments), tuple(edges))


def repartition(
    root: nn.Module,
    current: Partition,
    measured: MeasuredUnits,
    *,
    memory_weight: float,
    memory_limit: float | None,
    tied_parameters: TiedParameters,
    policy: Policy,
) -> Partition:
    """Splits a model that is split already anew, by measured times.

    Args:
        root: the module tree; its parameters may be placeholders.
        current: where its units are.
        measured: the times.
        memory_weight: from 0 (balance time) to 1 (balance memory).
        memory_limit: most bytes on a stage, by estimate; None for any.
        tied_parameters: as for the first split.
        policy: as for the first split.

    Raises:
        PartitionError: there is no split within the memory limit.
    """
    analysis = Analysis(
        order=measured.order,
        costs=measured.costs(current.costs),
        mutable_buffers=frozenset(current.mutable_buffers),
    )
    return plan_partition(
        root, analysis, find_atoms(root), current.num_stages, memory_weight=memory_weight,
        tied_parameters=tied_parameters, memory_limit=memory_limit,
        virtual_stages=current.virtual_stages, policy=policy,
    )  # fmt: skip
