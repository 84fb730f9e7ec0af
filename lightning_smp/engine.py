"""Runs one step: records or follows the program of each microbatch, by the schedule.

Note: deviations. A microbatch that leaves its program stops there, and its remaining part of the
schedule is played with empty messages, so that every promise between ranks is kept and nothing
hangs. At the end of the schedule the ranks compare where each of them deviated. If all agree, the
microbatches go on call by call, in descending order; if not, all ranks raise the same error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_smp.channels import Channels
from lightning_smp.control import Control
from lightning_smp.errors import CommunicationError, SMPError, UnsupportedError
from lightning_smp.fiber import Fiber, FiberPool
from lightning_smp.finality import final_parameters
from lightning_smp.messages import (
    backward_order,
    forward_messages,
    gradient_messages,
    inbound,
    segment_graph,
)
from lightning_smp.placed.autograd import reachable_edges
from lightning_smp.placed.outer import OuterMode, outer_patches
from lightning_smp.placed.random import DrawState
from lightning_smp.placed.run import MicrobatchRun
from lightning_smp.placed.runtime import Runtime, StepContext
from lightning_smp.placed.state import AttributeSwap, AttributeWatch
from lightning_smp.placed.tensor import PlacedTensor, release
from lightning_smp.program import EVERYWHERE, Edge, Program
from lightning_smp.schedule import Action, Schedule, make_schedule

__all__ = ["PipelineEngine", "StepPlan"]

_MAX_PROGRAMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What to run in one step.

    Args:
        name: the step's name; the first step of a name records every microbatch.
        bodies: the user's step for each microbatch.
        specs: for each microbatch what its shapes depend on; equal specs share a program.
        seed: integers that the seeds of units' streams start with.
        loss_of: finds the loss in what a body returned, or None for a forward-only step.
        loss_seed: gradient of each microbatch's loss, given what the body returned.
        record: record every microbatch, call by call.
        around_backward: runs a backward that the step itself asked for.
        on_final: called with parameters of units that no more gradient will come to.
    """

    name: str
    bodies: Sequence[Callable[[], Any]]
    specs: Sequence[Hashable]
    seed: tuple[int, ...]
    loss_of: Callable[[Any], Any] | None = None
    loss_seed: Callable[[int, Any], torch.Tensor] | None = None
    record: bool = False
    around_backward: Callable[[Callable[[], None]], None] | None = None
    on_final: Callable[[list[nn.Parameter]], None] | None = None


class PipelineEngine:
    """The engine of one rank.

    Args:
        runtime: this rank's runtime.
        channels: tensors between the stages.
        control: small messages between the stages.
        pipeline: "simple" or "interleaved".
        active_microbatches: most microbatches in flight on a rank, None for stages + 2.
    """

    def __init__(
        self, runtime: Runtime, channels: Channels, control: Control, *, pipeline: str,
        active_microbatches: int | None,
    ) -> None:  # fmt: skip
        self.runtime = runtime
        self.rank = runtime.rank
        self.channels = channels
        self.control = control
        self.pipeline = pipeline
        self.active_microbatches = active_microbatches
        self.schedule: Schedule | None = None
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._always_recorded: set[Hashable] = set()
        self._known_names: set[str] = set()
        self._schedules: dict[Hashable, Schedule] = {}
        self._pool = FiberPool()
        self._step: _Step | None = None
        self.position = ""

    def step(self, plan: StepPlan) -> list[Any]:
        """Runs a step; returns what the bodies returned. Collective over pp."""
        assert self._step is None
        self._step = step = _Step(self, plan)
        try:
            with outer_patches(step):
                return step.run()
        finally:
            self._step = None
            step.close()

    def forget_programs(self) -> None:
        """After the partition has changed nothing recorded is valid."""
        self._programs.clear()
        self._known_names.clear()
        self._always_recorded.clear()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The numbers of placed tensors on every rank, after their step. Collective over pp."""
        mine: dict[int, torch.Tensor] = {}
        for ordinal, tensor in enumerate(tensors):
            if isinstance(tensor, PlacedTensor) and tensor._value.home == self.rank:
                local = tensor._value.local
                assert local is not None
                mine[ordinal] = local.detach().cpu()
        found: dict[int, torch.Tensor] = {}
        if any(isinstance(t, PlacedTensor) and t._value.home != EVERYWHERE for t in tensors):
            for part in self.control.agree(mine):
                found.update(part)
        return [self._fetched(tensor, found.get(k)) for k, tensor in enumerate(tensors)]

    def _fetched(self, tensor: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(tensor, PlacedTensor):
            return tensor.detach()
        value = tensor._value
        if value.home in (self.rank, EVERYWHERE):
            assert value.local is not None
            return value.local.detach()
        assert found is not None
        with torch._C.DisableTorchFunctionSubclass():
            return found.to(tensor.device)

    def remember(self, spec: Hashable, program: Program) -> None:
        """Keeps a recorded program for later steps."""
        self._programs[spec] = program
        self._programs.move_to_end(spec)
        while len(self._programs) > _MAX_PROGRAMS:
            self._programs.popitem(last=False)

    def make_schedule(self, programs: list[Program], done: frozenset[int], train: bool) -> Schedule:
        """The order of actions, from the cache where the same programs ran before."""
        key = (tuple(id(p) for p in programs), done, train)
        found = self._schedules.get(key)
        if found is None:
            graphs = {id(p): segment_graph(p, self.runtime.num_ranks) for p in programs}
            found = make_schedule(
                [graphs[id(p)] for p in programs], self.pipeline,
                active_microbatches=self.active_microbatches, forward_done=done,
                forward_only=not train,
            )  # fmt: skip
            if len(self._schedules) > _MAX_PROGRAMS:
                self._schedules.clear()
            self._schedules[key] = found
        return found


class _Step:
    """One step in progress; the services that its runs call."""

    def __init__(self, engine: PipelineEngine, plan: StepPlan) -> None:
        self.engine = engine
        self.plan = plan
        self.rank = engine.rank
        self.runtime = engine.runtime
        self.channels = engine.channels
        self.control = engine.control
        self.train = plan.loss_of is not None
        self.context = StepContext(
            engine.runtime, engine.channels, engine.control, self, plan.seed
        )
        count = len(plan.bodies)
        self.programs: list[Program] = []
        self.runs: list[MicrobatchRun] = []
        self.results: list[Any] = [None] * count
        self.finished = [False] * count
        self.fibers: dict[int, Fiber] = {}
        self.sent: dict[int, set[int]] = {}
        self.deviations: dict[int, tuple[int, str]] = {}
        self.row: Sequence[Action] = ()
        self.cursor = 0
        self.final: dict[int, list[nn.Parameter]] = {}
        self.settled = False
        self.swap = AttributeSwap(())

    # ---- the step as a whole -------------------------------------------------------------

    def run(self) -> list[Any]:
        plan, engine = self.plan, self.engine
        recorded = self._choose_recorded()
        for m in range(len(plan.bodies)):
            program = None if m in recorded else engine._programs.get(plan.specs[m])
            self.runs.append(MicrobatchRun(self.context, m, program))
        for m in recorded:
            self._record(m)
        self._resolve(recorded)
        self._learn(recorded)
        for m, run in enumerate(self.runs):
            if m not in recorded:
                run.follow(engine._programs[plan.specs[m]])
        self.programs = [run.program for run in self.runs]
        self._follow_schedule(frozenset(recorded))
        self._finish_deviated()
        self._release_adopted()
        self.channels.finish()
        engine._known_names.add(plan.name)
        return self.results

    def close(self) -> None:
        """Ends forwards that will not be resumed."""
        for fiber in self.fibers.values():
            fiber.cancel()

    def _choose_recorded(self) -> list[int]:
        """Microbatches without a program; all of them in the first step of a name."""
        plan, engine = self.plan, self.engine
        every = plan.record or plan.name not in engine._known_names
        seen: set[Hashable] = set()
        chosen = []
        for m, spec in enumerate(plan.specs):
            new = spec not in engine._programs and spec not in seen
            if every or new or spec in engine._always_recorded:
                chosen.append(m)
            seen.add(spec)
        return chosen

    def _learn(self, recorded: list[int]) -> None:
        """Keeps the recorded programs, unless microbatches of one spec differ."""
        engine, plan = self.engine, self.plan
        by_spec: dict[Hashable, Program] = {}
        for m in recorded:
            spec, run = plan.specs[m], self.runs[m]
            known = by_spec.setdefault(spec, run.program)
            if run.dynamic or not _equal(known, run.program):
                engine._always_recorded.add(spec)
        for spec, program in by_spec.items():
            if not plan.record:
                engine.remember(spec, program)

    def _follow_schedule(self, done: frozenset[int]) -> None:
        if not self.train and len(done) == len(self.runs):
            self.settle()
            return
        schedule = self.engine.make_schedule(self.programs, done, self.train)
        self.engine.schedule = schedule
        for sender, row in enumerate(schedule.ranks):
            if sender != self.rank:
                messages = inbound(row, self.programs, sender, self.rank)
                self.channels.expect(sender, ((key, edge.spec) for key, edge in messages))
        self.row = schedule.ranks[self.rank]
        if self.plan.on_final is not None:
            units = {unit.index: unit for unit in self.runtime.units}
            self.final = final_parameters(self.row, self.programs, self.rank, units)
        names = {name for program in self.programs for name in program.attributes}
        self.swap = AttributeSwap(sorted(names), self.runtime.outer_modules[""])
        self.loop()

    def loop(self) -> None:
        """Runs the rest of this rank's actions, then settles with the others."""
        while self.cursor < len(self.row):
            action = self.row[self.cursor]
            self.cursor += 1
            if action.kind == "F":
                self._forward(action)
                continue
            self._backward(action)
            final = self.final.get(self.cursor - 1)
            if final and not self.deviations:
                assert self.plan.on_final is not None
                self.plan.on_final(final)
        if not self.settled:
            self.settle()

    def settle(self) -> None:
        """All schedules are done: compares deviations and the replicated random stream."""
        self.settled = True
        self.channels.drain()
        mine = [sorted((m, *what) for m, what in self.deviations.items()), DrawState(self.runtime.device).digest()]
        reports = self.control.agree(mine)
        if any(report[0] != reports[0][0] for report in reports):
            raise CommunicationError(_describe_split([report[0] for report in reports]))
        if any(report[1] != reports[0][1] for report in reports):
            raise CommunicationError(
                "the stages drew different random numbers in the step's own code (outside of "
                "submodules) or in a submodule that uses Python's or NumPy's global generator "
                "only sometimes. Draw from torch, or outside of data-dependent branches."
            )

    def _finish_deviated(self) -> None:
        """Forwards that left their programs go on call by call, then their backwards."""
        for m in sorted(self.deviations, reverse=True):
            if not self.finished[m]:
                self._resume(m)
        left = sorted(self.deviations)
        self._resolve(left)
        for m in left:
            self.engine._programs.pop(self.plan.specs[m], None)
            if self.train:
                self._backward_in_order(self.runs[m], self._loss_seed(m))

    def _release_adopted(self) -> None:
        """Buffers that the step wrote on one rank get their numbers on all."""
        found = [
            buffer
            for module in self.runtime.outer_modules.values()
            for buffer in (*module._buffers.values(), *module.__dict__.values())
            if isinstance(buffer, PlacedTensor) and buffer._value.is_adopted
        ]
        if found:
            for tensor, numbers in zip(found, self.engine.fetch(found), strict=True):
                release(tensor, numbers)

    # ---- forward -------------------------------------------------------------------------

    def _call_body(self, m: int) -> None:
        """The user's step for one microbatch, from its first call to its last."""
        run = self.runs[m]
        restore = self.runtime.activate(run)
        try:
            with OuterMode(run):
                self.results[m] = self.plan.bodies[m]()
        finally:
            restore()
        self.finished[m] = True
        if run.following and run.position != len(run.entries):
            run.leave_program(("end of the step",))
        if self.plan.loss_of is not None:
            run.note_loss(self.plan.loss_of(self.results[m]))

    def _record(self, m: int) -> None:
        watch = AttributeWatch(self.runtime.outer_modules.items())
        run = self.runs[m]
        self._call_body(m)
        run.program.attributes = (*watch.written(), *run.planted())
        run.dynamic |= run.draws_late()

    def _forward(self, action: Action) -> None:
        m = action.microbatch
        self.engine.position = f"forward of microbatch {m}"
        if m in self.deviations:
            self._send_empty(action)
            return
        own = [node for node in self.programs[m].segments if node[0] == self.rank]
        if len(own) == 1:
            self._call_body(m)
        else:
            self._resume(m)

    def _resume(self, m: int) -> None:
        fiber = self.fibers.get(m)
        if fiber is None:
            fiber = self.fibers[m] = Fiber(self.engine._pool, lambda: self._call_body(m))
        self.swap.enter(m)
        try:
            fiber.resume()
        finally:
            self.swap.leave(m)

    def pause(self, run: MicrobatchRun) -> None:
        """Called where the run's next segment begins on this rank."""
        fiber = self.fibers.get(run.index)
        if fiber is not None and run.index not in self.deviations:
            fiber.suspend()

    def receive(self, run: MicrobatchRun, edge: Edge) -> torch.Tensor:
        """The value of an edge that ends here."""
        source = edge.source[0]
        if not edge.is_message:
            device = self.runtime.device if edge.spec.on_run_device else torch.device("cpu")
            return torch.empty(edge.spec.shape, dtype=edge.spec.dtype, device=device)
        if run.following:
            return self.channels.take(source, ("f", run.index, edge.index))
        return self.channels.receive(source, edge.spec)

    # ---- deviations ----------------------------------------------------------------------

    def deviated(self, run: MicrobatchRun, position: int, key: tuple[Any, ...]) -> None:
        """Stops a run that left its program until all ranks have played their schedules."""
        m = run.index
        self.deviations[m] = (position, self.context.describe_call(key))
        self._send_empty(self.row[self.cursor - 1], skip=run.sent)
        fiber = self.fibers.get(m)
        if fiber is not None:
            fiber.suspend()
            return
        rest = Fiber(self.engine._pool, self.loop)  # this thread keeps the microbatch's frames
        rest.resume()
        assert rest.done

    def _send_empty(self, action: Action, skip: frozenset[int] | set[int] = frozenset()) -> None:
        """Keeps a deviated microbatch's promises of one action with messages without meaning."""
        program = self.programs[action.microbatch]
        node = program.segments[action.segment]
        table = program.forward_messages if action.kind == "F" else program.gradient_messages
        for edge in table.get(node, ()):
            if action.kind == "F" and edge.index in skip:
                continue
            to = edge.target[0] if action.kind == "F" else edge.source[0]
            self.channels.send(_empty(edge, self.runtime.device), to, copy=False)

    # ---- backward ------------------------------------------------------------------------

    def _loss_seed(self, m: int) -> torch.Tensor | None:
        assert self.plan.loss_seed is not None
        return self.plan.loss_seed(m, self.results[m])

    def _backward(self, action: Action) -> None:
        m = action.microbatch
        self.engine.position = f"backward of microbatch {m}"
        if m in self.deviations:
            self._send_empty(action)
            return
        node = self.programs[m].segments[action.segment]
        self._run_backward(self.runs[m], node[1], self._loss_seed(m), retain_graph=False)

    def _run_backward(
        self, run: MicrobatchRun, ordinal: int, loss_seed: torch.Tensor | None, *,
        retain_graph: bool,
    ) -> None:  # fmt: skip
        """One segment's backward: gradients in, autograd, gradients out."""
        program, segment = run.program, run.segments[ordinal]
        seeds: dict[int, torch.Tensor] = {}
        for index in segment.left:
            if index not in program.gradient_edges:
                continue
            gradient = self._incoming_gradient(run, program.edges[index])
            if gradient is not None:
                seeds[index] = gradient
        segment.backward(seeds, loss_seed, retain_graph=retain_graph)
        for edge in program.gradient_messages.get((self.rank, ordinal), ()):
            gradient = segment.gradients.pop(edge.index, None)
            if gradient is None:
                gradient = _empty(edge, self.runtime.device)
            self.channels.send(gradient, edge.source[0], copy=retain_graph)
        segment.loss = None
        if not retain_graph:
            for index in program.gradient_edges.intersection(segment.left):
                del segment.left[index]

    def _incoming_gradient(self, run: MicrobatchRun, edge: Edge) -> torch.Tensor | None:
        if edge.is_message:
            return self.channels.take(edge.target[0], ("g", run.index, edge.index))
        if edge.source[0] != edge.target[0]:
            return None  # no elements
        return run.segments[edge.target[1]].gradients.pop(edge.index, None)

    def _backward_in_order(
        self, run: MicrobatchRun, loss_seed: torch.Tensor | None, *, retain_graph: bool = False
    ) -> None:
        """The backward of one microbatch alone, all ranks in one order."""
        program = run.program
        order = backward_order(program)
        for sender in range(self.runtime.num_ranks):
            if sender != self.rank:
                edges = [
                    edge
                    for node in order if node[0] == sender
                    for edge in program.gradient_messages.get(node, ())
                    if edge.source[0] == self.rank
                ]  # fmt: skip
                self.channels.expect(
                    sender, ((("g", run.index, e.index), e.spec) for e in edges)
                )
        for node in order:
            if node[0] == self.rank:
                self._run_backward(run, node[1], loss_seed, retain_graph=retain_graph)

    def _resolve(self, recorded: Sequence[int]) -> None:
        """Completes recorded programs: which edges carry gradients, which messages there are."""
        if not recorded:
            return
        reports = [self._reach(self.runs[m]) if self.train else None for m in recorded]
        gathered = self.control.agree(reports) if self.train else None
        for position, m in enumerate(recorded):
            run = self.runs[m]
            run.complete()
            if gathered is not None:
                run.program.resolve_gradients([reports[position] for reports in gathered])
            run.program.forward_messages = forward_messages(run.program)
            run.program.gradient_messages = gradient_messages(run.program)

    def _reach(self, run: MicrobatchRun) -> dict[str, Any]:
        """On which edges that entered a segment its outputs here depend."""
        edges: dict[int, list[int]] = {}
        loss = None
        for segment in run.segments.values():
            for index, root in segment.left.items():
                edges[index] = reachable_edges([root], segment)
            if segment.loss is not None:
                loss = reachable_edges([segment.loss], segment)
        return {"edges": edges, "loss": loss}

    def backward(
        self, run: MicrobatchRun, tensor: torch.Tensor, gradient: Any = None,
        retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None,
    ) -> None:  # fmt: skip
        """A backward that the user's step asked for. Collective over pp."""
        if create_graph or inputs is not None:
            raise UnsupportedError(
                "backward(create_graph=True) and backward(inputs=...) on a tensor of the model: "
                "gradients of gradients would cross the stages. Use torch.autograd.grad inside one "
                "submodule."
            )
        if not self.plan.record:
            raise UnsupportedError(
                "backward() was called inside the step under automatic optimization. Return the "
                "loss instead, or set self.automatic_optimization = False with microbatches=1."
            )
        assert self.plan.around_backward is not None
        with self.context.outside_outer_mode():
            self.plan.around_backward(
                lambda: self._backward_now(run, tensor, gradient, bool(retain_graph))
            )

    def _backward_now(
        self, run: MicrobatchRun, tensor: Any, gradient: Any, retain_graph: bool
    ) -> None:
        run.begin_backward(tensor)
        reports = self.control.agree(self._reach(run))
        run.complete()
        program = run.program
        program.resolve_gradients(reports)
        program.gradient_messages = gradient_messages(program)
        seed = run.seed_of(tensor, gradient)
        self._backward_in_order(run, seed, retain_graph=retain_graph)
        run.end_backward()
        self.channels.finish()


def _empty(edge: Edge, device: torch.device) -> torch.Tensor:
    place = device if edge.spec.on_run_device else torch.device("cpu")
    return torch.zeros(edge.spec.shape, dtype=edge.spec.dtype, device=place)


def _equal(one: Program, other: Program) -> bool:
    if one is other:
        return True
    return len(one.entries) == len(other.entries) and all(
        a.key == b.key and a.outcome == b.outcome
        for a, b in zip(one.entries, other.entries, strict=True)
    )


def _describe_split(reports: list[Any]) -> str:
    lines = []
    for stage, report in enumerate(reports):
        said = ", ".join(f"microbatch {m} at call {position}" for m, position, _ in report)
        lines.append(f"stage {stage}: {said or 'followed the recorded step'}")
    return (
        "the stages took different paths through the step's code: " + "; ".join(lines) + ". "
        "All stages must run the same step on the same data: look for a branch on the rank, on "
        "local state, or on a value that a submodule left on one stage."
    )


def failure_note(error: BaseException, rank: int, stage: int, position: str) -> None:
    """Adds where it happened to an error, keeping its type and message."""
    note = f"on rank {rank} (stage {stage}), in the {position or 'step'}"
    if isinstance(error, SMPError) and note in str(error):
        return
    notes = [*getattr(error, "__notes__", []), note]
    error.__notes__ = notes  # type: ignore[attr-defined]
