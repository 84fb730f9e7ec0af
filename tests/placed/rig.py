"""A pipeline around the engine alone, without Lightning, compared with autograd on one process."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.deploy.partitioning import install_units, place_weights
from lightning_smp.engine import PipelineEngine, StepPlan
from lightning_smp.engine.channels import Channels
from lightning_smp.engine.control import Control
from lightning_smp.partitioning import Partition, find_atoms
from lightning_smp.partitioning.manual import manual_stages
from lightning_smp.placed.random import seed_everywhere
from lightning_smp.placed.runtime import Runtime
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.placed.tensor import PlacedTensor
from tests.support.launch import gloo_group

__all__ = ["Case", "Rig", "caught", "check_case", "run_cases", "samples"]

_WHEN_FOLLOWED = 2  # at the end of the schedule, and to fetch the results

Step = Callable[[nn.Module, Tensor, int], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and step, and what to feed it.

    Attributes:
        make: builds the model; called with a fixed seed.
        stages: stage by module name.
        step: the user's step of one microbatch: (model, microbatch, number of the step) -> loss.
        steps: the microbatches of each step.
        recorded: the steps that may ask for what a call does; None: any.
        pipelines: the pipelines to try.
        prepare: called with the whole model before it is split.
    """

    make: Callable[[], nn.Module]
    stages: Mapping[str, int]
    step: Step
    steps: Sequence[Sequence[Tensor]] = field(default_factory=lambda: samples(3, 3))
    recorded: tuple[int, ...] | None = (0,)
    pipelines: tuple[str, ...] = ("interleaved", "simple")
    prepare: Callable[[nn.Module], None] | None = None


class Rig:
    """A model split over all ranks, and its engine. Collective over the world.

    Attributes:
        engine: runs the steps.
        exchanges: how many messages between the hosts there were so far.
    """

    def __init__(
        self, module: nn.Module, stages: Mapping[str, int], *, pipeline: str = "interleaved",
        active_microbatches: int | None = None, timeout_s: float = 20,
    ) -> None:  # fmt: skip
        ranks = tuple(range(dist.get_world_size()))
        device = torch.device("cpu")
        timeout = timedelta(seconds=timeout_s)
        dist.barrier()  # a rank that waited for another one in vain may be late
        self.module = module
        self.rank = dist.get_rank()
        self.runtime = Runtime(self.rank, len(ranks), device)
        self.ownership = install_units(
            module, make_partition(module, stages, len(ranks)), self.runtime
        )
        place_weights(module, self.ownership, self.runtime, [])
        self.control = _CountingControl(ranks, dist.new_group(list(ranks), timeout, "gloo"))
        self.channels = Channels(ranks, dist.new_group(list(ranks), timeout, "gloo"), device)
        self.engine = PipelineEngine(
            self.runtime, self.channels, self.control, pipeline=pipeline,
            active_microbatches=active_microbatches,
        )  # fmt: skip
        self.step_number = 0

    @property
    def exchanges(self) -> int:
        return self.control.exchanges

    def train(self, step: Step, microbatches: Sequence[Tensor], **plan: Any) -> list[Any]:
        """Runs a step forward and backward; returns what it returned, real on every rank."""
        share = 1 / len(microbatches)
        return self._run(
            step, microbatches, loss_of=loss_of, loss_seed=lambda m, r: _seed(r, share), **plan
        )

    def evaluate(self, step: Step, microbatches: Sequence[Tensor]) -> list[Any]:
        """Runs a step forward only."""
        with torch.no_grad():
            return self._run(step, microbatches, name="validation_step")

    def raw(self, step: Step, microbatches: Sequence[Tensor]) -> list[Any]:
        """As `train`, but returns what the step returned as it is."""
        share = 1 / len(microbatches)
        plan = self._plan(
            step, microbatches, loss_of=loss_of, loss_seed=lambda m, r: _seed(r, share)
        )
        return self.engine.step(plan)

    def _run(self, step: Step, microbatches: Sequence[Tensor], **plan: Any) -> list[Any]:
        results = self.engine.step(self._plan(step, microbatches, **plan))
        tensors = list(iter_tensors(results))
        supply = iter(self.engine.fetch(tensors))
        return [map_tensors(result, lambda _: next(supply)) for result in results]

    def _plan(
        self, step: Step, microbatches: Sequence[Tensor], name: str = "training_step", **plan: Any
    ) -> StepPlan:
        number = self.step_number
        self.step_number += 1
        bodies = [lambda x=x: step(self.module, x, number) for x in microbatches]
        mode = (torch.is_grad_enabled(), self.module.training)
        specs = [(name, tuple(x.shape), x.dtype, x.requires_grad, *mode) for x in microbatches]
        return StepPlan(
            name=name, bodies=bodies, specs=specs, seed=(7, number),
            inputs=[(x,) for x in microbatches], **plan,
        )  # fmt: skip

    def local(self) -> dict[str, nn.Parameter]:
        """The parameters that are real here."""
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if self.ownership.is_local(parameter)
        }


class _CountingControl(Control):
    exchanges = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("publish", "agree", "agree_at", "meet_at"):
            self.exchanges += 1
        return super().__getattribute__(name)


def make_partition(module: nn.Module, stages: Mapping[str, int], num_stages: int) -> Partition:
    """A partition by hand; atoms without state that get no stage float."""
    atoms = find_atoms(module)
    given = manual_stages(module, atoms, stages, num_stages)
    floating = tuple(a.name for a in atoms if a.is_stateless and a.name not in stages)
    return Partition(
        stage_of={atom.name: given.get(atom.name, 0) for atom in atoms},
        num_stages=num_stages, order=tuple(atom.name for atom in atoms), sharing=(),
        shared_buffers=(), mode="none", floating=floating, costs={},
    )  # fmt: skip


def samples(num_steps: int, num_microbatches: int, size: int = 2, width: int = 4) -> Any:
    """Random microbatches, the same on every rank: [size, width] each."""
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randn(size, width, generator=generator) for _ in range(num_microbatches)]
        for _ in range(num_steps)
    ]


def loss_of(result: Any) -> Any:
    return result["loss"] if isinstance(result, dict) else result


def _seed(result: Any, share: float) -> Tensor | None:
    loss = loss_of(result)
    local = loss._value.local if isinstance(loss, PlacedTensor) else loss
    return None if local is None else torch.full_like(local, share)


def check_case(case: Case, pipeline: str, **rig_options: Any) -> Rig:
    """Trains a split and a whole model side by side; every number must be equal.

    Collective over the world.
    """
    torch.manual_seed(3)
    whole = case.make()
    split = copy.deepcopy(whole)
    for module in (whole, split):
        if case.prepare is not None:
            case.prepare(module)
    rig = Rig(split, case.stages, pipeline=pipeline, **rig_options)
    for number, microbatches in enumerate(case.steps):
        before = rig.exchanges
        expected = _reference(whole, case.step, microbatches, number)
        results = rig.train(case.step, [x.clone() for x in microbatches])
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
        _compare_gradients(rig, whole, number)
        if case.recorded is not None:
            count = rig.exchanges - before
            recorded = count > _WHEN_FOLLOWED
            assert recorded == (number in case.recorded), f"step {number}: {count} exchanges"
    return rig


def _reference(module: nn.Module, step: Step, microbatches: Sequence[Tensor], number: int) -> Any:
    results = []
    for x in microbatches:
        result = step(module, x.clone(), number)
        loss = loss_of(result)
        if loss.requires_grad:
            torch.autograd.backward(loss, torch.full_like(loss, 1 / len(microbatches)))
        results.append(map_tensors(result, torch.Tensor.detach))
    return results


def _compare_gradients(rig: Rig, whole: nn.Module, number: int) -> None:
    """Gradients and buffers are those of the whole model; then both are updated."""
    expected = dict(whole.named_parameters())
    for name, parameter in rig.local().items():
        mine, other = parameter.grad, expected[name].grad
        stages = rig.ownership.stages_of(parameter)
        if len(stages) > 1:  # the copies' gradients are summed before the update
            mine = torch.zeros_like(parameter) if mine is None else mine
            dist.all_reduce(mine)
            parameter.grad = mine
        if other is None:
            assert mine is None or not mine.any(), f"step {number}: {name} has a gradient"
            continue
        assert mine is not None, f"step {number}: {name} has no gradient"
        torch.testing.assert_close(
            mine, other, rtol=1e-5, atol=1e-6,
            msg=lambda m, name=name: f"step {number}, {name}.grad: {m}",
        )  # fmt: skip
    with torch.no_grad():
        for parameter in (*rig.local().values(), *expected.values()):
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def caught(call: Callable[[], Any]) -> str:
    """The error of a call, whose text the test is about; empty if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_cases(rank: int, world_size: int, cases: Mapping[str, Case]) -> dict[str, str]:
    """Checks each case with each pipeline; returns the traceback of each that failed."""
    failures: dict[str, str] = {}
    with gloo_group(60):
        seed_everywhere(11, torch.device("cpu"))
        for name, case in cases.items():
            for pipeline in case.pipelines:
                try:
                    check_case(case, pipeline)
                except Exception:  # reported by the parent's test of that case
                    failures[name] = f"{pipeline}, rank {rank}:\n{traceback.format_exc()}"
                    break
    return failures
