"""One step in progress: records or follows the program of each microbatch, by the schedule.

Note: deviations. A microbatch that leaves its program stops there, and its remaining part of the
schedule is played with empty messages, so that every promise between ranks is kept and nothing
hangs. At the end of the schedule the ranks compare where each of them deviated. If all agree, the
microbatches go on call by call, in their order; if not, all ranks raise the same error.

Note: memory. A recorded microbatch runs its backward right after its forward: to keep what the
forwards of all microbatches need is what a pipeline is there to avoid.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_smp.engine.backward import Backwards, empty_message
from lightning_smp.engine.fiber import Fiber, ThreadModes
from lightning_smp.engine.posting import Receive
from lightning_smp.errors import CommunicationError
from lightning_smp.placed.outer import OuterMode
from lightning_smp.placed.random import digest_draws
from lightning_smp.placed.run import MicrobatchRun
from lightning_smp.placed.runtime import StepContext
from lightning_smp.placed.state import AttributeSwap, AttributeWatch
from lightning_smp.placed.tensor import PlacedTensor, release
from lightning_smp.program import Edge, Program
from lightning_smp.schedule import Action

if TYPE_CHECKING:
    from lightning_smp.engine.engine import PipelineEngine
    from lightning_smp.engine.plan import StepPlan

__all__ = ["Step"]


class Step(Backwards):
    """Runs a plan; also the services that its microbatches call."""

    def __init__(self, engine: PipelineEngine, plan: StepPlan) -> None:
        super().__init__(engine, plan)
        self.context = StepContext(engine.runtime, engine.channels, engine.control, self, plan.seed)
        self.context.meter = engine.meter
        count = len(plan.bodies)
        self.programs: list[Program] = []
        self.finished = [False] * count
        self.modes = ThreadModes()
        self.fibers: dict[int, Fiber] = {}
        self.host: Fiber | None = None
        self.deviations: dict[int, tuple[int, str]] = {}
        self.row: Sequence[Action] = ()
        self.receives: Sequence[Sequence[Receive]] = ()
        self.cursor = 0
        self.final: dict[int, list[nn.Parameter]] = {}
        self.settled = False
        self.swap = AttributeSwap(())

    def run(self) -> list[Any]:
        """Runs the step; returns what the bodies returned."""
        plan, engine = self.plan, self.engine
        recorded = self._choose_recorded()
        inputs = plan.inputs or [()] * len(plan.bodies)
        self.runs += [MicrobatchRun(self.context, m, given) for m, given in enumerate(inputs)]
        for m in recorded:
            self._record(m)
        self._learn(recorded)
        followed = [m for m in range(len(self.runs)) if m not in recorded]
        for m in followed:
            self.runs[m].follow(engine._programs[plan.specs[m]])
        self.programs = [run.program for run in self.runs]
        self.train |= any(program.losses for program in self.programs)
        self._follow_schedule(followed)
        self._finish_deviated()
        self._release_adopted()
        self.channels.finish()
        engine._known_names.add(plan.name)
        return self.results

    def followed_all(self) -> bool:
        """Whether every microbatch followed its program to the end."""
        return not self.deviations and all(run.following for run in self.runs)

    def close(self) -> None:
        """Ends forwards that will not be resumed, and frees what the step kept."""
        for fiber in self.fibers.values():
            fiber.cancel()
        self.fibers.clear()
        self.host = None
        for run in self.runs:
            run.close()
        self.context.close()

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

    def _follow_schedule(self, followed: Sequence[int]) -> None:
        if not followed:
            self._check_schedule()
            self.settle()
            return
        programs = {m: self.programs[m] for m in followed}
        course = self.engine.course_of(programs, self.train)
        self.engine.schedule = course.schedule
        self.row, self.receives = course.row, course.receives
        if self.plan.on_final is not None:
            self.final = course.final
        self.swap = AttributeSwap(course.attributes, self.runtime.outer_modules[""])
        self.loop()

    def _check_schedule(self) -> None:
        """After a first step: what is wrong with the schedule of the next ones is said now."""
        known = [self.engine._programs.get(spec) for spec in self.plan.specs]
        programs = {m: program for m, program in enumerate(known) if program is not None}
        if self.train and len(programs) == len(known):
            self.engine.schedule = self.engine.course_of(programs, self.train).schedule

    def loop(self) -> None:
        """Runs the rest of this rank's actions, then settles with the others."""
        clock = self.engine.clock
        while self.cursor < len(self.row):
            action = self.row[self.cursor]
            if self.receives[self.cursor]:
                self._post(self.receives[self.cursor])
            self.cursor += 1
            if clock is not None:
                clock.begin()
            if action.kind == "F":
                self._forward(action)
            else:
                self._backward(action)
            if clock is not None:
                clock.end(action)
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
        point, draws, offer = "the end of the step", digest_draws(self.runtime.device), None
        if not self.deviations:
            offer = self._offer()
            told = self.control.meet_at(point, draws, offer)
            if told is not None:
                self.engine.fetching.accept(told)
                return
        mine = [sorted((m, *what) for m, what in self.deviations.items()), draws, offer]
        reports = self.control.agree_at(point, mine)
        if any(report[0] != reports[0][0] for report in reports):
            raise CommunicationError(_describe_split([report[0] for report in reports]))
        if any(report[1] != reports[0][1] for report in reports):
            raise CommunicationError(
                "the stages drew different random numbers in the step's own code (outside of "
                "submodules) or in a submodule that uses Python's or NumPy's global generator, "
                "or on a GPU the host's one of torch, only sometimes. Draw from torch on the "
                "model's device, or outside of data-dependent branches."
            )
        if not self.deviations:
            self.engine.fetching.accept([report[2] for report in reports])

    def _offer(self) -> bytes:
        """What the others will ask for, where it is known already."""
        wanted = self.plan.wanted
        return self.engine.fetching.offer([] if wanted is None else wanted(self.results))

    def _finish_deviated(self) -> None:
        """Forwards that left their programs go on call by call, then their backwards."""
        self._go_on_before(len(self.runs))
        left = sorted(self.deviations)
        self.train |= any(self.runs[m].losses for m in left)
        self._resolve(left)
        for m in left:
            self.engine.drop(self.plan.specs[m])
            if self.train:
                self._backward_in_order(self.runs[m])

    def _release_adopted(self) -> None:
        """Buffers that the step wrote on one rank get their numbers on all."""
        if not self.context.adopted:
            return
        found = [
            buffer
            for module in self.runtime.outer_modules.values()
            for buffer in (*module._buffers.values(), *module.__dict__.values())
            if isinstance(buffer, PlacedTensor) and buffer._value.is_adopted
        ]
        for tensor, numbers in zip(found, self.engine.fetch(found), strict=True):
            release(tensor, numbers)

    def _call_body(self, m: int) -> None:
        """The user's step for one microbatch, from its first call to its last."""
        run = self.runs[m]
        plan = self.plan
        former = self.runtime.activate(run)
        try:
            with OuterMode(run):
                result = self.results[m] = plan.bodies[m]()
        finally:
            self.runtime.activate(former)
        if plan.loss_of is not None:
            assert plan.loss_seed is not None
            loss = plan.loss_of(result)
            if isinstance(loss, PlacedTensor):
                run.add_loss(loss, plan.loss_seed(m, result))
            elif isinstance(loss, torch.Tensor):
                # No parameter is behind it. It needs a graph of its own, as on one device.
                loss.backward(plan.loss_seed(m, result))  # type: ignore[no-untyped-call]
        if run.following and not run.ends_as_recorded():
            run.leave_program(("the end of the step",))
        self.finished[m] = True  # not before: where it left its program it must go on first

    def _record(self, m: int) -> None:
        self.engine.position = f"forward of microbatch {m}"
        run = self.runs[m]
        run.watch = watch = AttributeWatch(self.runtime.outer_modules.items())
        self._call_body(m)
        self.train |= bool(run.losses)
        self._resolve([m])
        run.program.attributes = (*watch.written(), *run.planted())
        run.dynamic |= run.draws_late() or watch.fills_containers
        if self.train:
            self.engine.position = f"backward of microbatch {m}"
            self._backward_in_order(run)

    def _forward(self, action: Action) -> None:
        m = action.microbatch
        self.engine.position = f"forward of microbatch {m}"
        if m in self.deviations:
            self._send_empty(action)
            return
        if self.programs[m].visits[self.rank] > 1:
            self._resume(m)
            return
        self.swap.enter(m)
        try:
            self._call_body(m)
        finally:
            self.swap.leave(m)

    def _resume(self, m: int) -> None:
        fiber = self.fibers.get(m)
        if fiber is None:
            body = partial(self._call_body, m)
            fiber = self.fibers[m] = Fiber(self.engine._pool, body, self.modes)
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
            return empty_message(edge, self.runtime.device)  # no elements, so nothing is sent
        if run.following:
            return self.channels.take(source, ("f", run.index, edge.index))
        return self.channels.receive(source, edge.spec)

    def deviated(self, run: MicrobatchRun, position: int, key: tuple[Any, ...]) -> None:
        """Stops a run that left its program until all ranks have played their schedules."""
        m = run.index
        self.deviations[m] = (position, self.context.describe_call(key))
        self._send_empty(self.row[self.cursor - 1], skip=run.sent)
        fiber = self.fibers.get(m)
        if fiber is not None:
            fiber.suspend()
            return
        # This thread keeps the microbatch's frames, and the schedule goes on in another one.
        self.swap.leave(m)
        host, self.host = self.host, Fiber(self.engine._pool, self.loop, self.modes)
        self.host.resume()
        if host is None:
            self._go_on_before(m)
            self.swap.enter(m)
        else:  # microbatches that left their programs earlier go on first
            self.fibers[m] = host
            host.suspend()

    def _go_on_before(self, end: int) -> None:
        """Microbatches below ``end`` that left their programs go on call by call, in order."""
        for m in sorted(self.deviations):
            if m < end and not self.finished[m]:
                self._resume(m)

    def _send_empty(self, action: Action, skip: frozenset[int] | set[int] = frozenset()) -> None:
        """Keeps a deviated microbatch's promises of one action with messages without meaning."""
        if action.kind == "W":
            return  # sends nothing
        program = self.programs[action.microbatch]
        node = program.segments[action.segment]
        table = program.forward_messages if action.kind == "F" else program.gradient_messages
        for edge in table.get(node, ()):
            if action.kind == "F" and edge.index in skip:
                continue
            to = edge.target[0] if action.kind == "F" else edge.source[0]
            self.channels.send(empty_message(edge, self.runtime.device), to, copy=False)

    def _backward(self, action: Action) -> None:
        m = action.microbatch
        self.engine.position = f"backward of microbatch {m}"
        if m in self.deviations:
            self._send_empty(action)
            return
        _, ordinal = self.programs[m].segments[action.segment]
        if action.kind == "W":
            self._run_later_part(self.runs[m], ordinal)
        else:
            self._run_backward(self.runs[m], ordinal, split=action.kind == "I")


def _equal(one: Program, other: Program) -> bool:
    if one is other:
        return True
    if one.losses != other.losses or len(one.entries) != len(other.entries):
        return False
    return all(
        a.key == b.key and a.outcome == b.outcome
        for a, b in zip(one.entries, other.entries, strict=True)
    )


def _describe_split(reports: list[Any]) -> str:
    lines = []
    for stage, report in enumerate(reports):
        said = ", ".join(
            f"microbatch {m} at call {position}, {call}" for m, position, call in report[:2]
        )
        lines.append(f"stage {stage}: {said or 'followed the recorded step'}")
    return (
        "the stages took different paths through the step's code: " + "; ".join(lines) + ". "
        "All stages must run the same step on the same data: look for a branch on the rank, on "
        "local state, or on a value that a submodule left on one stage."
    )
