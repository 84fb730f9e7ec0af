"""torchmetrics objects in the step: their arguments go to every rank, and every rank updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.partitioning.atoms import is_boundary
from lightning_smp.placed.structure import map_tensors
from lightning_smp.placed.tensor import PlacedTensor

if TYPE_CHECKING:
    from lightning_smp.placed.runtime import Runtime

__all__ = ["find_metrics", "install_metrics", "set_metric_group"]

_CALLS = ("forward", "update")
_STEP_VALUE = "_forward_cache"


def find_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """Every metric of a module, those of collections too."""
    for inner in module.modules():
        if is_boundary(inner) and isinstance(getattr(inner, "_defaults", None), dict):
            yield inner


def install_metrics(runtime: Runtime, module: nn.Module) -> None:
    """Puts boundaries around what torchmetrics defines in a module, collections included."""
    for name, inner in module.named_modules():
        if is_boundary(inner):
            for call in _CALLS:
                if callable(getattr(inner, call, None)):
                    inner.__dict__[call] = _MetricBoundary(runtime, inner, name, call)


def set_metric_group(metric: nn.Module, group: Any) -> None:
    """Says over which ranks a metric is reduced, and its copies (those of trackers, say) too.

    A group itself cannot be copied.
    """

    def copied(memo: dict[int, Any]) -> nn.Module:
        memo[id(group)] = group
        del metric.__dict__["__deepcopy__"]
        try:
            twin = copy.deepcopy(metric, memo)
        finally:
            metric.__dict__["__deepcopy__"] = copied
        set_metric_group(twin, group)
        return twin

    metric.process_group = group
    metric.__dict__["__deepcopy__"] = copied


class _MetricBoundary:
    """Stands in for the ``forward`` or ``update`` of a metric or a collection.

    Waiting for its arguments lets other microbatches run, so all of them are there before a call
    begins: in the middle of one (a ``forward`` puts the state aside and starts from none) the state
    is nobody else's to change.

    Args:
        runtime: of the model.
        metric: the metric or collection.
        name: its name in the model.
        call: the method.
    """

    def __init__(self, runtime: Runtime, metric: nn.Module, name: str, call: str) -> None:
        self._runtime = runtime
        self._metric = metric
        self._name = name
        self._call = call
        self._original: Callable[..., Any] = getattr(metric, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The metric's method, on real tensors. Collective over pp inside a step."""
        run = self._runtime.active_run()
        if run is None or run.in_unit is not None:
            return self._original(*args, **kwargs)

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, PlacedTensor):
                return tensor
            numbers, needs_graph = run.read(tensor), tensor.requires_grad
            return numbers.detach().requires_grad_() if needs_graph and gives_value else numbers

        gives_value = self._call == "forward"
        args, kwargs = map_tensors(args, real), map_tensors(kwargs, real)
        former = self._runtime.activate(None)
        try:
            with run.context.outside_outer_mode():
                return map_tensors(self._original(*args, **kwargs), self._without_graph)
        finally:
            self._runtime.activate(former)
            if run.watch is not None:
                run.watch.note(self._step_values())

    def __reduce__(self) -> Any:
        """Copies, which no longer belong to the model, are as torchmetrics made them."""
        return getattr, (self._metric, self._call)

    def _without_graph(self, value: torch.Tensor) -> torch.Tensor:
        """A value to log or to look at; a gradient that comes to it is refused by name."""
        if not value.requires_grad:
            return value

        def refuse(_: torch.Tensor) -> None:
            raise UnsupportedError(
                f"the loss depends on what the metric {self._name!r} returned, but the gradient of "
                "a metric's value does not reach the stages that its arguments come from. Compute "
                "this part of the loss with the function in torchmetrics.functional."
            )

        value = value.detach().requires_grad_()
        value.register_hook(refuse)
        return value

    def _step_values(self) -> Iterator[tuple[str, str]]:
        """(module, attribute) of what a call leaves for one microbatch alone."""
        for name, inner in self._metric.named_modules(prefix=self._name):
            if _STEP_VALUE in inner.__dict__:
                yield name, _STEP_VALUE
