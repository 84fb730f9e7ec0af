"""Analysis: what a step calls and what that costs, found by one fake run on a copy of the model.

A hint for the partition, never the truth of a training step: it may fail for any model that asks a
tensor for its value, and then says so and falls back to parameter counts.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from lightning_smp.partitioning.atoms import Atom, parameter_names
from lightning_smp.partitioning.costs import AtomCost, Work
from lightning_smp.partitioning.device import DeviceModel, Kernel
from lightning_smp.partitioning.fakes import fake_copy, new_fake_mode, preserved_random_state
from lightning_smp.partitioning.operations import nbytes, tensors_in
from lightning_smp.partitioning.watch import CostWatch

__all__ = ["Analysis", "analyze", "count_parameters"]

_OPTIMIZER_STATES = 2  # Adam's two moments, in the parameter's own type
_REASON_LENGTH = 300


@dataclass(frozen=True)
class Analysis:
    """Costs of all atoms, and the order in which a step calls them.

    Attributes:
        order: Names of the atoms called by outer code, in order, with repetitions.
        costs: By atom name, for every atom.
        outer: Cost of outer code before the first atom; later outer code is part of the preceding
            atom.
        work: What the atoms do, by name, whatever the device; that of outer code under None. Empty
            if the step could not be run.
        mutable_buffers: First names of the buffers that the step writes (batch norm's and the
            like).
        reason: Why the step told nothing, or None. If set, ``order`` is module order and all
            times come from parameter counts.
    """

    order: tuple[str, ...]
    costs: Mapping[str, AtomCost]
    outer: AtomCost = field(default_factory=AtomCost)
    work: Mapping[str | None, Work] = field(default_factory=dict)
    mutable_buffers: frozenset[str] = frozenset()
    reason: str | None = None


def analyze(
    root: nn.Module,
    run_step: Callable[[nn.Module], object],
    atoms: tuple[Atom, ...],
    *,
    mode: FakeTensorMode | None = None,
    device: DeviceModel | None = None,
) -> Analysis:
    """Runs a step on a fake copy of the model and returns what it calls and costs.

    Parameters, buffers, trainer, random state and metrics of ``root`` are left alone. Gradients are
    recorded even if the caller runs without, so that a validation step tells about training too.
    The result depends on module tree and shapes only: it is the same on all ranks.

    Args:
        root: The model; may be on any device, and may be on meta.
        run_step: Called as ``run_step(copy)``: runs the user's step for one microbatch, made fake
            by :func:`fake_batch` with the same mode, on the copy. Unless it runs a backward itself,
            that of what it returns is run (of the entry "loss" of a mapping that has one).
        atoms: From :func:`find_atoms` on the same root.
        mode: From :func:`new_fake_mode`; needed if the batch is made fake before the call.
        device: The roofline that turns operations into time.

    Returns:
        The analysis; with ``reason`` set if the copy or the step raised an Exception, or if the
        step called nothing (the first batch was skipped, say).
    """
    device = device or DeviceModel()
    try:
        found = _run(root, run_step, atoms, mode or new_fake_mode(), device)
    except Exception as error:  # user code under fake tensors may raise anything
        return count_parameters(root, atoms, reason=_describe(error), device=device)
    if atoms and not found.order:
        return count_parameters(root, atoms, reason="the step called no submodule", device=device)
    return found


def count_parameters(
    root: nn.Module,
    atoms: tuple[Atom, ...],
    *,
    reason: str,
    device: DeviceModel | None = None,
) -> Analysis:
    """Returns the analysis without a step: module order, two operations a parameter."""
    device = device or DeviceModel()
    costs: dict[str, AtomCost] = {}
    for atom in atoms:
        cost = _state_cost(atom)
        product = Kernel("product", flops=2 * cost.parameters, moved=cost.parameter_bytes)
        forward_s = device.busy_seconds(product)
        costs[atom.name] = cost + AtomCost(
            calls=1,
            flops=product.flops,
            moved_bytes=product.moved,
            forward_s=forward_s,
            backward_s=2 * forward_s,
        )
    return Analysis(
        order=tuple(atom.name for atom in atoms),
        costs=costs,
        mutable_buffers=_running_statistics(root),
        reason=reason,
    )


def _run(
    root: nn.Module,
    run_step: Callable[[nn.Module], object],
    atoms: tuple[Atom, ...],
    mode: FakeTensorMode,
    device: DeviceModel,
) -> Analysis:
    with preserved_random_state(), _quiet(), torch.inference_mode(mode=False):
        copied = fake_copy(root, mode)
        modules = {atom.name: copied.get_submodule(atom.name) for atom in atoms}
        watch = CostWatch(copied, modules)
        versions = {name: (id(b), b._version) for name, b in copied.named_buffers()}
        with (
            torch.enable_grad(),
            _without_compiling(),
            mode,
            watch.watching(),
        ):
            _run_backward(run_step(copied), watch)
    written = {
        name for name, b in copied.named_buffers() if versions.get(name) != (id(b), b._version)
    }
    work = {name: watch.work(name) for name in (None, *modules)}
    return Analysis(
        order=watch.order,
        costs={atom.name: work[atom.name].cost(device) + _state_cost(atom) for atom in atoms},
        outer=work[None].cost(device),
        work=work,
        mutable_buffers=_running_statistics(root) | written,
    )


def _run_backward(result: object, watch: CostWatch) -> None:
    """Runs the backward of what a step gave, unless it ran one; without, one is presumed."""
    given = result.get("loss", result) if isinstance(result, Mapping) else result
    roots = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
    if not watch.awaits_backward or not roots:
        return
    try:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except Exception:  # hooks and functions of the user's may ask for values
        watch.forget_backward()


def _without_compiling() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled modules eagerly; spares the compiler's slow import if nothing was compiled."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps prints and warnings of the fake step from the user, who sees those of the real one."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _state_cost(atom: Atom) -> AtomCost:
    parameters = [p for p in atom.module.parameters() if not is_lazy(p)]
    held = sum(nbytes(p) for p in parameters)
    trained = sum(nbytes(p) for p in parameters if p.requires_grad)
    buffers = sum(nbytes(b) for b in atom.module.buffers() if not is_lazy(b))
    return AtomCost(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=held,
        state_bytes=held + buffers + (1 + _OPTIMIZER_STATES) * trained,
    )


def _running_statistics(root: nn.Module) -> frozenset[str]:
    """Batch norm writes its statistics inside the kernel, where versions do not show it."""
    names = parameter_names(root)
    return frozenset(
        names[id(buffer)][0]
        for module in root.modules()
        if isinstance(module, _NormBase)
        for buffer in module.buffers(recurse=False)
    )


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_REASON_LENGTH]
