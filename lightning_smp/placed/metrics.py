"""torchmetrics objects in the step: their arguments go to every rank, and every rank updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_smp.partitioning.atoms import is_boundary
from lightning_smp.placed.structure import map_tensors
from lightning_smp.placed.tensor import PlacedTensor

if TYPE_CHECKING:
    from lightning_smp.placed.runtime import Runtime

__all__ = ["MetricBoundary", "find_metrics"]


def find_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """Every metric of a module, those of collections too."""
    for inner in module.modules():
        if is_boundary(inner) and isinstance(getattr(inner, "_defaults", None), dict):
            yield inner


class MetricBoundary:
    """Stands in for the ``update`` of one metric, through which ``forward`` passes too."""

    def __init__(self, runtime: Runtime, metric: nn.Module) -> None:
        self._runtime = runtime
        self._metric = metric
        self._original: Callable[..., Any] = metric.update  # type: ignore[assignment]

    def install(self) -> None:
        """Puts this boundary in the place of the metric's update."""
        self._metric.__dict__["update"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The metric's update, on real tensors. Collective over pp inside a step."""
        run = self._runtime.active_run()
        if run is None or run.in_unit is not None:
            return self._original(*args, **kwargs)

        def real(tensor: torch.Tensor) -> torch.Tensor:
            return run.read(tensor) if isinstance(tensor, PlacedTensor) else tensor

        args, kwargs = map_tensors(args, real), map_tensors(kwargs, real)
        former = self._runtime.activate(None)
        try:
            with run.context.outside_outer_mode():
                return self._original(*args, **kwargs)
        finally:
            self._runtime.activate(former)
