"""A step on a single stage: plain accumulation over its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_smp.engine import StepPlan
from lightning_smp.placed.seeding import SeededUnits
from lightning_smp.placed.structure import map_tensors

__all__ = ["no_inference_mode", "run_whole", "watch_gradients"]


def run_whole(plan: StepPlan, module: nn.Module, seeding: SeededUnits | None) -> list[Any]:
    """Runs a step on this rank alone; returns what its bodies returned.

    Args:
        plan: the step. ``on_final`` is called in the last microbatch's backward.
        module: the model.
        seeding: seeds its units as several stages would; None draws as usual.
    """
    with nullcontext() if seeding is None else seeding.repeating():
        return _run_microbatches(plan, module, seeding)


def _run_microbatches(plan: StepPlan, module: nn.Module, seeding: SeededUnits | None) -> list[Any]:
    detaches = (plan.loss_of is not None or plan.roots is not None) and not plan.keeps_graphs
    results = []
    for m, body in enumerate(plan.bodies):
        if seeding is not None:
            seeding.begin((*plan.seed, m))
        with _rerouted_backward(plan.around_backward):
            result = body()
        roots = _roots(plan, m, result)
        if roots:
            is_last = m == len(plan.bodies) - 1
            with watch_gradients(module, plan.on_final if is_last else None):
                losses, gradients = zip(*roots, strict=True)
                torch.autograd.backward(losses, gradients)
        results.append(map_tensors(result, torch.Tensor.detach) if detaches else result)
    return results


def _roots(plan: StepPlan, m: int, result: Any) -> list[tuple[Any, Any]]:
    """What the backward of a microbatch starts from, with its gradients."""
    if plan.roots is not None:
        roots = list(plan.roots)
        plan.roots.clear()
        return roots
    loss = None if plan.loss_of is None else plan.loss_of(result)
    if loss is None:
        return []
    assert plan.loss_seed is not None
    return [(loss, plan.loss_seed(m, result))]


@contextmanager
def watch_gradients(
    module: nn.Module, on_final: Callable[[list[nn.Parameter]], None] | None
) -> Iterator[None]:
    """Calls ``on_final`` with each parameter whose gradient the backward inside completes."""
    if on_final is None:
        yield
        return

    def note(parameter: nn.Parameter) -> None:
        on_final([parameter])

    handles = [
        parameter.register_post_accumulate_grad_hook(note)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _rerouted_backward(around: Callable[[Callable[[], None]], None] | None) -> Iterator[None]:
    """Every backward that the step asks for goes through ``around``, if there is one."""
    if around is None:
        yield
        return
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        torch.autograd.backward = original
        try:
            around(lambda: original(*args, **kwargs))
        finally:
            torch.autograd.backward = backward

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def no_inference_mode() -> Iterator[None]:
    """Leaves it: inference tensors have no version counters, which in-place changes are seen by."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
