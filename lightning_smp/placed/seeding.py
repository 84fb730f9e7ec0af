"""A single stage draws random numbers as several stages do: each unit from a stream of its own."""

from __future__ import annotations

from torch import nn

__all__ = ["SeededUnits"]


class SeededUnits:
    """Placeholder until wired."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def install(self) -> None:
        return
