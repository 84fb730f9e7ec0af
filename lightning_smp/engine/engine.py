"""The engine of one rank: runs steps, and keeps what they learn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_smp.engine.channels import Channels
from lightning_smp.engine.control import Control
from lightning_smp.engine.course import Course, plan_course
from lightning_smp.engine.fetching import Fetching
from lightning_smp.engine.fiber import FiberPool
from lightning_smp.engine.messages import segment_graph
from lightning_smp.engine.meter import UnitMeter
from lightning_smp.engine.plan import StepPlan
from lightning_smp.engine.step import Step
from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.placed.outer import outer_patches
from lightning_smp.placed.runtime import Runtime
from lightning_smp.program import Program
from lightning_smp.schedule import Schedule, SegmentGraph, fit_schedule, make_schedule
from lightning_smp.timeline import StepClock, StepRecord

__all__ = ["PipelineEngine", "StepPlan"]

_MAX_PROGRAMS = 64


class PipelineEngine:
    """The engine of one rank.

    Args:
        runtime: this rank's runtime.
        channels: tensors between the stages.
        control: small messages between the stages.
        pipeline: the kind of schedule.
        active_microbatches: most microbatches in flight on a rank, None for the default.
        table: the order of training steps, for pipeline "file".
        activation_limit: most MiB of activations on a rank, None for any.
        costs: by index of the unit, what its backward costs and keeps.

    Attributes:
        schedule: of the last step that had one.
        meter: measures units while it is set.
        programs: of the microbatches of the last measured step.
    """

    def __init__(
        self, runtime: Runtime, channels: Channels, control: Control, *, pipeline: str,
        active_microbatches: int | None, table: Schedule | None = None,
        activation_limit: float | None = None, costs: Mapping[int, AtomCost] | None = None,
    ) -> None:  # fmt: skip
        self.runtime = runtime
        self.rank = runtime.rank
        self.channels = channels
        self.control = control
        self.pipeline = pipeline
        self.active_microbatches = active_microbatches
        self.table = table
        self.activation_limit = activation_limit
        self.costs = costs
        self.schedule: Schedule | None = None
        self.clock: StepClock | None = None
        self.meter: UnitMeter | None = None
        self.programs: list[Program] = []
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._always_recorded: set[Hashable] = set()
        self._known_names: set[str] = set()
        self._courses: OrderedDict[Hashable, Course] = OrderedDict()
        self.fetching = Fetching(self.rank, control, channels)
        self._pool = FiberPool()
        self._step: Step | None = None
        self._measured: list[Any] | None = None
        self.position = ""

    def step(self, plan: StepPlan) -> list[Any]:
        """Runs a step; returns what the bodies returned. Collective over pp."""
        assert self._step is None
        self._step = step = Step(self, plan)
        self.fetching.forget()
        if self.meter is not None:
            self.meter.begin_step()
        try:
            with outer_patches(step):
                results = step.run()
            if self.meter is not None:
                self.meter.end_step(counts=step.followed_all())
                self.programs = step.programs
            self.position = ""  # kept after an error, whose report asks for it
            if self.clock is not None and step.followed_all():
                self._measured = self.clock.finish(step.programs).to_plain()
            return results
        finally:
            self._step = None
            step.close()

    @contextmanager
    def measured(self) -> Iterator[list[StepRecord]]:
        """Measures the step inside; afterwards the list has what each stage measured.

        It stays empty if the step recorded microbatches, which says nothing about the next ones.
        Collective over pp.
        """
        found: list[StepRecord] = []
        self.control.agree_at("the start of a measured step")  # a common start of all clocks
        self.clock = self.channels.clock = StepClock(self.runtime.device)
        self._measured = None
        try:
            yield found
            records = self.control.agree_at("the end of a measured step", self._measured)
            if all(record is not None for record in records):
                found.extend(StepRecord.from_plain(record) for record in records)
        finally:
            self.clock = self.channels.clock = None

    def use(self, channels: Channels) -> None:
        """From now on tensors travel there."""
        self.channels = channels
        self.fetching = Fetching(self.rank, self.control, channels)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The numbers of placed tensors on every rank, after their step. Collective over pp."""
        return self.fetching.fetch(tensors)

    def forget(self, costs: Mapping[int, AtomCost]) -> None:
        """Units have moved: all programs are recorded anew.

        Args:
            costs: by index of the unit, as measured.
        """
        self.costs = costs
        self.programs = []
        for kept in (self._programs, self._always_recorded, self._known_names, self._courses):
            kept.clear()

    def remember(self, spec: Hashable, program: Program) -> None:
        """Keeps a recorded program for later steps."""
        self.drop(spec)
        self._programs[spec] = program
        while len(self._programs) > _MAX_PROGRAMS:
            self.drop(next(iter(self._programs)))

    def drop(self, spec: Hashable) -> None:
        """Forgets a program, and the courses that it is part of."""
        program = self._programs.pop(spec, None)
        for key, course in list(self._courses.items()):
            if any(part is program for part in course.programs.values()):
                del self._courses[key]

    def course_of(self, programs: Mapping[int, Program], train: bool) -> Course:
        """What this rank does in a step, from the cache where the same programs ran before.

        Args:
            programs: by microbatch.
            train: whether there are backwards.
        """
        key = (tuple([(m, id(program)) for m, program in programs.items()]), train)
        found = self._courses.get(key)
        if found is None:
            graphs = {
                id(p): segment_graph(p, self.runtime.num_ranks, self.costs)
                for p in programs.values()
            }
            schedule = self._new_schedule([graphs[id(p)] for p in programs.values()], train)
            schedule = schedule.of_microbatches(list(programs))
            found = plan_course(self.runtime, schedule, programs, ahead=self.channels.ahead)
            self._courses[key] = found
            if len(self._courses) > _MAX_PROGRAMS:
                self._courses.popitem(last=False)
        return found

    def _new_schedule(self, graphs: list[SegmentGraph], train: bool) -> Schedule:
        active, memory = self.active_microbatches, self.activation_limit
        if self.table is not None and train:
            return fit_schedule(self.table, graphs, active_microbatches=active, memory_limit=memory)
        pipeline: Any = self.pipeline if self.table is None else "interleaved"
        return make_schedule(
            graphs, pipeline, active_microbatches=active, memory_limit=memory,
            forward_only=not train,
        )  # fmt: skip
