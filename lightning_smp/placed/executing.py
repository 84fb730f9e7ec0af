"""Running a call for real on its home, on the right random stream."""

from __future__ import annotations

from typing import Any

import torch

from lightning_smp.placed.moving import Moving
from lightning_smp.placed.operands import Operands
from lightning_smp.placed.random import (
    Guard,
    digest_draws,
    isolated_draws,
    lend,
    take_back,
    unit_seed,
)
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.placed.units import UnitEntry

__all__ = ["Executing"]


class Executing(Moving):
    """Runs calls on this rank's tensors."""

    def _seed(self, target: Any, ordinal: int) -> int | None:
        """The seed of a unit's own random stream; outer code draws from the replicated one.

        Args:
            target: the unit or function.
            ordinal: of this call among those of the unit.
        """
        if type(target) is not UnitEntry:
            return None
        return unit_seed(self.seed_state, target.index, ordinal)

    def _execute(
        self, target: Any, args: Any, kwargs: Any, operands: Operands, seed: int | None
    ) -> Any:
        """Runs the call for real on this rank's tensors."""
        locals_ = operands.localize()
        if not self.following:
            operands.versions = [t._version for t in locals_]
        if operands.are(args):
            args = locals_
        else:
            supply = iter(locals_)
            args = map_tensors(args, lambda _: next(supply))
            kwargs = map_tensors(kwargs, lambda _: next(supply))
        return self.execute(target, args, kwargs, seed)

    def execute(self, target: Any, args: Any, kwargs: Any, seed: int | None) -> Any:
        """Runs a call on real tensors.

        Args:
            target: the unit or function.
            args: its arguments.
            kwargs: its named arguments.
            seed: of the unit's random stream, None for a function.
        """
        meter = self.context.meter
        if meter is not None:
            meter.enter(self, target, [*iter_tensors((args, kwargs))])
        run = self._run_followed if self.following else self._run_recorded
        result = run(target, args, kwargs, seed)
        if meter is not None:
            meter.leave(self, target, result)
        return result

    def _run_followed(self, target: Any, args: Any, kwargs: Any, seed: int | None) -> Any:
        if seed is None:
            return target(*args, **kwargs)
        generators = target.generators
        if generators is None:
            with isolated_draws(seed, self.context.device, Guard.ALL):
                return _run_unit(self, target, args, kwargs)
        lent = lend(generators, seed)
        try:
            return _run_unit(self, target, args, kwargs)
        finally:
            take_back(generators, lent)

    def _run_recorded(self, target: Any, args: Any, kwargs: Any, seed: int | None) -> Any:
        """Runs a call and notes whether it draws random numbers and writes buffers."""
        self.wrote = False
        if seed is None:
            before = digest_draws(self.context.device)
            result = target(*args, **kwargs)
            self.drew = before != digest_draws(self.context.device)
            return result
        buffers = target.buffer_state()
        with isolated_draws(seed, self.context.device, Guard.ALL) as draws:
            result = _run_unit(self, target, args, kwargs, observe=True)
            self.wrote = buffers != target.buffer_state()
            self.drew = draws.used()
            target.note_draws(draws.needed())
        return result

    def _draw_alike(self, target: Any, args: Any, kwargs: Any) -> None:
        """Advances the replicated stream as the home's call did, on tensors without meaning."""

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, PlacedTensor):
                return tensor
            with torch._C.DisableTorchFunctionSubclass():
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        with torch.no_grad():
            target(*map_tensors(args, stand_in), **map_tensors(kwargs, stand_in))

    def replay(
        self, replay: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        seed: int | None,
    ) -> Any:  # fmt: skip
        """Runs a call again on real operands, for activation checkpointing."""
        if seed is None:
            return target(*args, **kwargs)
        with isolated_draws(seed, self.context.device, Guard.ALL):
            return _run_unit(replay, target, args, kwargs)


def _run_unit(
    caller: Any, unit: UnitEntry, args: Any, kwargs: Any, *, observe: bool = False
) -> Any:
    """Runs a unit's own code, whose calls the caller, a run or a replay, leaves alone."""
    caller.in_unit = unit
    try:
        return unit.run(args, kwargs, observe=observe)
    finally:
        caller.in_unit = None
