"""Probes in the units of a module: what each call gave, in a few numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_smp.partitioning import find_atoms
from lightning_smp.placed.structure import iter_tensors
from lightning_smp.placed.tensor import PlacedTensor

__all__ = ["Probes", "summary"]


@dataclass
class Probes:
    """Notes what the units of a module give, call by call.

    Attributes:
        replica: whose samples are running.
        active: whether calls are noted.
        seen: [replica, unit, ordinal of the call, a summary of each tensor], in call order.
    """

    replica: int = 0
    active: bool = True
    seen: list[list[Any]] = field(default_factory=list)
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)

    def install(self, module: nn.Module) -> None:
        """Puts a probe around the forward of each unit."""
        for atom in find_atoms(module):
            atom.module.__dict__["forward"] = _Probe(self, atom.name, atom.module)

    def note(self, unit: str, result: Any) -> None:
        """Notes one call."""
        tensors = list(iter_tensors(result))
        recomputes = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        if not self.active or recomputes or not all(map(_is_real, tensors)):
            return
        ordinal = self.calls[self.replica, unit]
        self.calls[self.replica, unit] += 1
        self.seen.append([self.replica, unit, ordinal, [summary(tensor) for tensor in tensors]])


class _Probe:
    """Stands in for the forward of a unit."""

    def __init__(self, probes: Probes, unit: str, module: nn.Module) -> None:
        self._probes = probes
        self._unit = unit
        self._module = module
        self._forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._forward(*args, **kwargs)
        self._probes.note(self._unit, result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        return self._forward if copied is None else type(copied).forward.__get__(copied)


def _is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor | PlacedTensor) and not tensor.is_meta


def summary(tensor: torch.Tensor) -> list[Any]:
    """[shape, dtype, sum, sum of squares, product with a fixed vector], in float64."""
    flat = tensor.detach().cpu().reshape(-1).double()
    fixed = torch.arange(flat.numel(), dtype=torch.float64).cos()
    numbers = [float(flat.sum()), float(flat.square().sum()), float(flat @ fixed)]
    return [list(tensor.shape), str(tensor.dtype), *numbers]
