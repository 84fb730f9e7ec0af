"""Backwards of a step: which edges carry gradients, and each segment's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.engine.messages import backward_order, forward_messages, gradient_messages
from lightning_smp.engine.posting import Receive, receives_before
from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.autograd import reachable_edges
from lightning_smp.placed.run import MicrobatchRun
from lightning_smp.placed.runtime import StepContext
from lightning_smp.placed.splitting import LaterPart
from lightning_smp.program import Edge, SegmentNode
from lightning_smp.schedule import Action

if TYPE_CHECKING:
    from lightning_smp.engine.engine import PipelineEngine
    from lightning_smp.engine.plan import StepPlan

__all__ = ["Backwards", "empty_message"]


class Backwards:
    """The backward half of a step in progress.

    Args:
        engine: the engine that runs the step.
        plan: the step.
    """

    context: StepContext

    def __init__(self, engine: PipelineEngine, plan: StepPlan) -> None:
        self.engine = engine
        self.plan = plan
        self.rank = engine.rank
        self.runtime = engine.runtime
        self.channels = engine.channels
        self.control = engine.control
        self.train = plan.loss_of is not None
        self.runs: list[MicrobatchRun] = []
        self.results: list[Any] = [None] * len(plan.bodies)
        self.later: dict[tuple[int, int], LaterPart] = {}

    def _run_backward(
        self, run: MicrobatchRun, ordinal: int, *, retain_graph: bool = False, split: bool = False
    ) -> None:
        """One segment's backward, or its first part: gradients in, autograd, gradients out."""
        program, segment = run.program, run.segments[ordinal]
        seeds: dict[int, torch.Tensor] = {}
        leaving = [index for index in segment.left if index in program.gradient_edges]
        for index in leaving:
            gradient = self._incoming_gradient(run, program.edges[index])
            if gradient is not None:
                seeds[index] = gradient
        meter = self.context.meter
        if meter is not None:  # a split backward is measured whole
            meter.begin_backward()
            segment.backward(seeds, retain_graph=retain_graph)
            meter.end_backward()
        elif split:
            self.later[run.index, ordinal] = segment.backward_of_inputs(seeds)
        else:
            segment.backward(seeds, retain_graph=retain_graph)
        for edge in program.gradient_messages.get((self.rank, ordinal), ()):
            gradient = segment.gradients.pop(edge.index, None)
            if gradient is None:
                gradient = empty_message(edge, self.runtime.device)
            self.channels.send(gradient, edge.source[0], copy=retain_graph)
        segment.roots.clear()
        if not retain_graph:
            for index in leaving:
                del segment.left[index]

    def _run_later_part(self, run: MicrobatchRun, ordinal: int) -> None:
        """What the first part of a segment's backward put off, if it did."""
        later = self.later.pop((run.index, ordinal), None)
        if later is not None:
            later.run()

    def _incoming_gradient(self, run: MicrobatchRun, edge: Edge) -> torch.Tensor | None:
        if edge.is_message:
            return self.channels.take(edge.target[0], ("g", run.index, edge.index))
        if edge.crosses:
            return empty_message(edge, self.runtime.device)  # no elements, so nothing is sent
        return run.segments[edge.target[1]].gradients.pop(edge.index, None)

    def _backward_in_order(self, run: MicrobatchRun, *, retain_graph: bool = False) -> None:
        """The backward of one microbatch alone, all ranks in one order."""
        program = run.program
        order = backward_order(program)
        mine = [node[1] for node in order if node[0] == self.rank]
        for ordinal, receives in zip(mine, self._receives_of(run, order), strict=True):
            self._post(receives)
            self._run_backward(run, ordinal, retain_graph=retain_graph)

    def _receives_of(self, run: MicrobatchRun, order: Sequence[SegmentNode]) -> list[list[Receive]]:
        numbers = {node: number for number, node in enumerate(run.program.segments)}
        actions = [(node[0], Action("B", run.index, numbers[node])) for node in order]
        return receives_before(actions, {run.index: run.program}, self.rank)

    def _post(self, receives: Sequence[Receive]) -> None:
        for sender, key, spec in receives:
            self.channels.post(sender, key, spec)

    def _resolve(self, recorded: Sequence[int]) -> None:
        """Completes recorded programs: which edges carry gradients, which messages there are."""
        if not recorded:
            return
        reports = [self._reach(self.runs[m]) if self.train else None for m in recorded]
        point = f"the end of the forward of microbatches {list(recorded)}, the loss made in "
        point += f"{[[n for _, n in self.runs[m].losses] for m in recorded]} (stage, segment)"
        gathered = self.control.agree_at(point, reports) if self.train else None
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
        loss: list[int] | None = None
        for segment in run.segments.values():
            for index, root in segment.left.items():
                edges[index] = reachable_edges([root], segment)
            if segment.roots:
                found = reachable_edges([root for root, _ in segment.roots], segment)
                loss = [*(loss or ()), *found]
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
                "backward() was called on a tensor of the model inside the step, whose backward "
                "the engine runs. In a LightningModule return the loss, or set "
                "self.automatic_optimization = False with microbatches=1; in a function decorated "
                "with smp.step call model.backward(loss)."
            )
        assert self.plan.around_backward is not None
        with self.context.outside_outer_mode():
            self.plan.around_backward(
                lambda: self._backward_now(run, tensor, gradient, bool(retain_graph))
            )

    def _backward_now(
        self, run: MicrobatchRun, tensor: Any, gradient: Any, retain_graph: bool
    ) -> None:
        run.begin_backward(tensor, gradient)
        point = f"backward() after call {len(run.entries) - 1} of microbatch {run.index}"
        reports = self.control.agree_at(point, self._reach(run))
        run.complete()
        program = run.program
        program.resolve_gradients(reports)
        program.gradient_messages = gradient_messages(program)
        self._backward_in_order(run, retain_graph=retain_graph)
        run.end_backward()
        self.channels.finish()


def empty_message(edge: Edge, device: torch.device) -> torch.Tensor:
    """A message without meaning of an edge's shape."""
    place = device if edge.spec.on_run_device else torch.device("cpu")
    return torch.zeros(edge.spec.shape, dtype=edge.spec.dtype, device=place)
