"""Memory and time of one layout, predicted from the profile of a step.

Note [What is estimated how]
Times are those of the kernels of a microbatch (partitioning/device.py); the degree of tensor
parallelism divides their work and adds all-reduces (two a unit and direction, as in Shoeybi et al.
2019). Every microbatch after the first adds its gradients to what is there. The order of a step is
the real schedule, simulated. Gradients are reduced over replicas while the last microbatch drains;
what is longer than its backward counts. The optimizer reads and writes its state once.

A stage's activations are those of the schedule's fullest moment. Tensor parallelism divides what is
inside a unit, but not what enters and leaves its parts (10 of 34 bytes per token and channel in a
transformer layer, Korthikanti et al. 2022, hence five outputs of a unit). With recomputation a unit
keeps its input, and one unit at a time all it needs. Parameters of two or more dimensions are
divided, others are not. The gradients of the step before are gone when a step begins
(lightning/handoff.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from lightning_smp.partitioning import Partition, plan_partition
from lightning_smp.partitioning.atoms import Atom
from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.partitioning.device import Kernel
from lightning_smp.partitioning.operations import nbytes
from lightning_smp.planning.devices import Device
from lightning_smp.planning.profile import Profile
from lightning_smp.schedule import (
    Edge,
    Schedule,
    Segment,
    SegmentGraph,
    Timeline,
    make_schedule,
    simulate,
)
from lightning_smp.schedule.scheduler import PipelineKind

__all__ = ["Estimate", "Estimator", "Layout", "Memory", "Setup"]

_UNDIVIDED_OUTPUTS = 5
_REDUCES_PER_UNIT = 2
_RECEIVES_AHEAD = 5
_SIMULATED_PER_STAGE = 3  # microbatches; further ones repeat the steady state


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What does not depend on the layout.

    Attributes:
        world_size: Number of GPUs.
        memory: Bytes that a rank may use.
        device: What a GPU can do.
        gpus_per_host: GPUs that are linked directly.
        batch_size: Samples of one optimizer step over all ranks.
        optimizer_states: Values that the optimizer keeps for a parameter.
        bucket_bytes: Size of a bucket of gradients.
        pipeline: Kind of schedule.
        memory_weight: As in the configuration.
    """

    world_size: int
    memory: float
    device: Device
    gpus_per_host: int = 8
    batch_size: int
    optimizer_states: int = 2
    bucket_bytes: float = 25 * 2**20
    pipeline: PipelineKind = "interleaved"
    memory_weight: float = 0.2


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Degrees of one run; a replica's batch is ``microbatches`` times ``microbatch_size``."""

    pp: int
    tp: int
    dp: int
    virtual: int
    microbatches: int
    microbatch_size: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, each part at its own fullest moment.

    With a single microbatch gradients are made while activations go, so that the two are never
    there together; ``reused`` is what of them takes the same memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    reused: float = 0.0

    @property
    def total(self) -> float:
        """Bytes at the fullest moment."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.buffers - self.reused


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is predicted of a layout.

    Attributes:
        layout: The layout.
        partition: Which unit is on which stage.
        memory: For each stage.
        step_s: Seconds of one optimizer step.
        bubble: Mean share of the step that a stage idles in the pipeline.
        timeline: The simulated step, of the first microbatches if there are many; None if only
            approximated.
    """

    layout: Layout
    partition: Partition
    memory: tuple[Memory, ...]
    step_s: float
    bubble: float
    timeline: Timeline | None

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(memory.total for memory in self.memory)


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of parameters and buffers of one stage, without tensor parallelism."""

    divided: float
    whole: float
    trained_divided: float
    trained_whole: float
    buffers: float

    @classmethod
    def of(cls, modules: Sequence[nn.Module], outer: Sequence[nn.Parameter]) -> _Held:
        held = {id(p): p for module in modules for p in module.parameters()}
        held.update({id(p): p for p in outer})

        def size(*, divided: bool, trained: bool) -> float:
            return sum(
                nbytes(p)
                for p in held.values()
                if (p.dim() > 1) == divided and (p.requires_grad or not trained)
            )

        return cls(
            divided=size(divided=True, trained=False),
            whole=size(divided=False, trained=False),
            trained_divided=size(divided=True, trained=True),
            trained_whole=size(divided=False, trained=True),
            buffers=sum(nbytes(b) for module in modules for b in module.buffers()),
        )

    def trained(self, tp: int) -> float:
        """Bytes of the gradients of one step."""
        return self.trained_divided / tp + self.trained_whole


class Estimator:
    """Predicts layouts of one model on one kind of machine."""

    def __init__(
        self, root: nn.Module, atoms: tuple[Atom, ...], profile: Profile, setup: Setup
    ) -> None:
        self.root, self.atoms, self.profile, self.setup = root, atoms, profile, setup
        self.analysis = profile.analysis
        self._modules = {atom.name: atom.module for atom in atoms}
        self._partitions: dict[tuple[int, int], Partition] = {}
        self._stages: dict[int, tuple[_Held, ...]] = {}  # by id of a partition that is kept above
        self._accumulations: dict[tuple[str, int], float] = {}

    @cached_property
    def num_pieces(self) -> int:
        """How many units with parameters a step calls: more chunks than these stay empty."""
        called = dict.fromkeys(self.analysis.order)
        return sum(self.analysis.costs[name].parameters > 0 for name in called) or 1

    def partition(self, pp: int, virtual: int) -> Partition:
        """Splits the model."""
        key = (pp, virtual)
        if key not in self._partitions:
            self._partitions[key] = plan_partition(
                self.root, self.analysis, self.atoms, pp,
                memory_weight=self.setup.memory_weight, virtual_stages=virtual,
            )  # fmt: skip
        return self._partitions[key]

    def approximate(self, layout: Layout) -> Estimate:
        """Predicts without a simulation: textbook bubble, textbook activations."""
        partition = self.partition(layout.pp, layout.virtual)
        graph = self._graph(layout, partition)
        work = _stage_sums(graph, [s.forward_cost + s.backward_cost for s in graph.segments])
        kept = _stage_sums(graph, [s.memory for s in graph.segments])
        slowest, count = max(work), layout.microbatches
        live = [min(count, n) for n in _textbook_live(layout)]
        activations = [n * size for n, size in zip(live, kept, strict=True)]
        transfers = sum(edge.cost for edge in graph.edges)
        fill = 2.0 * transfers + (sum(work) - slowest) / layout.virtual
        return self._estimate(layout, partition, graph, fill + count * slowest, activations, None)

    def simulated(self, layout: Layout) -> Estimate:
        """Predicts with the real schedule."""
        partition = self.partition(layout.pp, layout.virtual)
        graph = self._graph(layout, partition)
        count = min(layout.microbatches, _SIMULATED_PER_STAGE * layout.pp * layout.virtual)
        graphs = [graph] * count
        timeline = simulate(graphs, self._schedule(graphs))
        work = _stage_sums(graph, [s.forward_cost + s.backward_cost for s in graph.segments])
        pipeline_s = timeline.makespan + (layout.microbatches - count) * max(work)
        return self._estimate(layout, partition, graph, pipeline_s, timeline.peak_memory, timeline)

    def _schedule(self, graphs: Sequence[SegmentGraph]) -> Schedule:
        return make_schedule(graphs, self.setup.pipeline)

    def _estimate(
        self,
        layout: Layout,
        partition: Partition,
        graph: SegmentGraph,
        pipeline_s: float,
        activations: Sequence[float],
        timeline: Timeline | None,
    ) -> Estimate:
        memory = tuple(
            self._memory(layout, partition, graph, stage, kept)
            for stage, kept in enumerate(activations)
        )
        work = _stage_sums(graph, [s.forward_cost + s.backward_cost for s in graph.segments])
        useful = layout.microbatches * sum(work) / layout.pp
        return Estimate(
            layout=layout,
            partition=partition,
            memory=memory,
            step_s=pipeline_s + self._after_s(layout, partition, graph, memory),
            bubble=max(0.0, 1.0 - useful / pipeline_s) if pipeline_s else 0.0,
            timeline=timeline,
        )

    def _after_s(
        self,
        layout: Layout,
        partition: Partition,
        graph: SegmentGraph,
        memory: Sequence[Memory],
    ) -> float:
        """Seconds of the slowest stage after the pipeline: gradients, then the optimizer."""
        device = self.setup.device
        last_s = _stage_sums(graph, [s.backward_cost for s in graph.segments])
        in_host = self.setup.world_size <= self.setup.gpus_per_host
        found = 0.0
        for stage, part in enumerate(memory):
            gradients = self._held(partition)[stage].trained(layout.tp)
            reduce_s = device.all_reduce_s(gradients, layout.dp, in_host=in_host)
            state = 2.0 * (part.parameters + part.optimizer) + gradients
            update_s = state / (device.bandwidth * device.bandwidth_share)
            found = max(found, max(0.0, reduce_s - last_s[stage]) + update_s)
        return found

    def _memory(
        self,
        layout: Layout,
        partition: Partition,
        graph: SegmentGraph,
        stage: int,
        activations: float,
    ) -> Memory:
        held = self._held(partition)[stage]
        trained = held.trained(layout.tp)
        costs = self.profile.costs(layout.microbatch_size, layout.tp)
        called = dict.fromkeys(self.analysis.order)
        units = [costs[name] for name in called if partition.stage_of[name] == stage]
        saved = [_saved_bytes(cost, layout.tp) for cost in units]
        if layout.recompute:
            activations += max(saved, default=0.0)
            saved = [0.0] * len(saved)
        return Memory(
            parameters=held.divided / layout.tp + held.whole,
            gradients=trained,
            optimizer=self.setup.optimizer_states * trained,
            activations=activations,
            buffers=held.buffers
            + _temporary_bytes(units, saved)
            + self._messages(layout, graph, stage)
            + 2 * min(self.setup.bucket_bytes, trained) * (layout.dp > 1),
            reused=min(trained, activations) if layout.microbatches == 1 else 0.0,
        )

    def _held(self, partition: Partition) -> tuple[_Held, ...]:
        key = id(partition)
        if key not in self._stages:
            inside = {id(p) for atom in self.atoms for p in atom.module.parameters()}
            outer = [p for p in self.root.parameters() if id(p) not in inside]
            self._stages[key] = tuple(
                _Held.of([self._modules[name] for name in partition.atoms_on(stage)], outer)
                for stage in range(partition.num_stages)
            )
        return self._stages[key]

    def _messages(self, layout: Layout, graph: SegmentGraph, stage: int) -> float:
        """Buffers of messages that arrive ahead of need, in both directions."""
        found = 0.0
        for edge in graph.edges:
            ends = {graph.segments[edge.source].rank, graph.segments[edge.target].rank}
            if len(ends) > 1 and stage in ends:
                found += _RECEIVES_AHEAD * self._sent_bytes(layout, edge.cost)
        return found

    def _sent_bytes(self, layout: Layout, seconds: float) -> float:
        return seconds / self.setup.device.transfer_s(1.0, in_host=self._is_in_host(layout))

    def _is_in_host(self, layout: Layout) -> bool:
        return layout.pp * layout.tp <= self.setup.gpus_per_host

    def _graph(self, layout: Layout, partition: Partition) -> SegmentGraph:
        """One segment for each run of units on one stage, in the order of their calls."""
        costs = self.profile.costs(layout.microbatch_size, layout.tp)
        segments: list[Segment] = []
        edges: list[Edge] = []
        entering = 0.0
        for name in dict.fromkeys(self.analysis.order):
            stage = partition.stage_of[name]
            if not segments or segments[-1].rank != stage:
                if segments:
                    cost = self.setup.device.transfer_s(entering, in_host=self._is_in_host(layout))
                    edges.append(Edge(len(segments) - 1, len(segments), True, cost))
                segments.append(Segment(stage, 0.0, 0.0, True))
            segments[-1] = self._with_unit(segments[-1], name, layout, costs[name], entering)
            entering = costs[name].output_bytes or entering
        if segments:
            outer = costs[None]
            segments[0] = replace(
                segments[0],
                forward_cost=segments[0].forward_cost + outer.forward_s,
                backward_cost=segments[0].backward_cost + outer.backward_s,
            )
        return SegmentGraph(layout.pp, tuple(segments), tuple(edges))

    def _with_unit(
        self, segment: Segment, name: str, layout: Layout, cost: AtomCost, entering: float
    ) -> Segment:
        reduce_s = 0.0
        if layout.tp > 1 and self.analysis.costs[name].parameters:
            reduce_s = _REDUCES_PER_UNIT * self.setup.device.all_reduce_s(
                cost.output_bytes, layout.tp, in_host=layout.tp <= self.setup.gpus_per_host
            )
        further = 1.0 - 1.0 / layout.microbatches  # of the microbatches
        added_s = further * self._accumulation_s(name, layout.tp)
        forward = cost.forward_s + reduce_s
        backward = cost.backward_s + reduce_s + added_s
        weight = max(0.0, cost.backward_s - cost.forward_s) + added_s
        memory = _saved_bytes(cost, layout.tp)
        if layout.recompute:
            backward += forward
            memory = min(memory, entering)
        return replace(
            segment,
            forward_cost=segment.forward_cost + forward,
            backward_cost=segment.backward_cost + backward,
            weight_cost=segment.weight_cost + weight,
            memory=segment.memory + memory,
        )

    def _accumulation_s(self, name: str, tp: int) -> float:
        """Seconds of adding a unit's gradients to those of earlier microbatches."""
        key = (name, tp)
        if key not in self._accumulations:
            sums = (
                Kernel("stream", moved=3.0 * nbytes(p) / (tp if p.dim() > 1 else 1))
                for p in self._modules[name].parameters()
                if p.requires_grad
            )
            self._accumulations[key] = self.profile.device.unit_seconds(sums)
        return self._accumulations[key]


def _temporary_bytes(units: Sequence[AtomCost], saved: Sequence[float]) -> float:
    """Most that exists beside a stage's activations; those of later units are gone by then."""
    found = gone = 0.0
    for cost, kept in zip(reversed(units), reversed(saved), strict=True):
        found = max(found, cost.temporary_bytes - gone)
        gone += kept
    return found


def _saved_bytes(cost: AtomCost, tp: int) -> float:
    """Activations of a unit on a rank of its tensor group."""
    kept = min(cost.saved_bytes, _UNDIVIDED_OUTPUTS * cost.output_bytes)
    return kept + (cost.saved_bytes - kept) / tp


def _stage_sums(graph: SegmentGraph, values: Sequence[float]) -> list[float]:
    sums = [0.0] * graph.num_ranks
    for segment, value in zip(graph.segments, values, strict=True):
        sums[segment.rank] += value
    return sums


def _textbook_live(layout: Layout) -> list[float]:
    """Microbatches that (interleaved) 1F1B keeps alive on each stage, in whole-stage units."""
    pp, virtual = layout.pp, layout.virtual
    if virtual == 1:
        return [float(pp - stage) for stage in range(pp)]
    return [(2 * (pp - stage - 1) + (virtual - 1) * pp + 1) / virtual for stage in range(pp)]
