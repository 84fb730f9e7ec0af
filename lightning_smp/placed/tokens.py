"""Units' tokens from step to step: found anew where a flag of a parameter or module has changed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from lightning_smp.placed.units import UnitEntry

__all__ = ["Tokens", "flags_of"]

_requires_grad = attrgetter("requires_grad")
_training = attrgetter("training")


class Tokens:
    """The tokens of one rank's units.

    Args:
        units: the list of them, which may grow until the first step.
    """

    def __init__(self, units: Sequence[UnitEntry]) -> None:
        self._units = units
        self._parameters: list[nn.Parameter] = []
        self._modules: list[nn.Module] = []
        self._num_units = 0
        self._flags: bytes | None = None
        self._known: dict[int, tuple[bool, tuple[Any, ...]]] = {}

    def of_step(self) -> dict[int, tuple[bool, tuple[Any, ...]]]:
        """By unit, its training flag and token where they are known; for a step that begins."""
        if self._num_units != len(self._units):
            self._num_units = len(self._units)
            self._parameters = [p for unit in self._units for p in unit.parameters]
            self._modules = [module for unit in self._units for module in unit.modules]
        flags = flags_of(self._parameters, self._modules)
        if flags != self._flags:
            self._known.clear()
        self._flags = flags
        return self._known

    def forget(self) -> None:
        """The step itself has changed a flag."""
        self._known.clear()
        self._flags = None


def flags_of(parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> bytes:
    """Which parameters require gradients and which modules are training."""
    with torch._C.DisableTorchFunction():  # an outer mode would see each question
        return bytes(map(_requires_grad, parameters)) + bytes(map(_training, modules))
