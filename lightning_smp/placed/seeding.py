"""A single stage draws random numbers as several stages do: each unit from a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import nn

from lightning_smp.partitioning.atoms import find_atoms
from lightning_smp.placed.compiling import UnitCompiler
from lightning_smp.placed.random import SEED_START, Guard, isolated_draws, stir, unit_seed

__all__ = ["SeededUnits"]


class SeededUnits:
    """Wraps the ``forward`` of each unit of a whole model.

    Args:
        module: the LightningModule.
        device: the run's device.
        seeds: whether to seed at all.
        compiler: compiles each unit; None runs it as it is.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, *, seeds: bool = True,
        compiler: UnitCompiler | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.state: int | None = None  # of seeds, after the microbatch's part; None draws as usual
        self.calls: dict[int, int] = {}
        self._seeds = seeds
        self._entries = [
            _SeededForward(self, atom.index, atom.name, atom.module, compiler)
            for atom in find_atoms(module)
        ]

    def install(self) -> None:
        """Puts the wrappers in the place of the units' forwards."""
        for entry in self._entries:
            entry.module.__dict__["forward"] = entry

    def remove(self) -> None:
        """Gives the units their forwards back."""
        for entry in self._entries:
            entry.remove()

    def begin(self, seed: tuple[int, ...]) -> None:
        """A microbatch begins."""
        self.state = stir(SEED_START, *seed) if self._seeds else None
        self.calls = {}

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Lets units draw the same when activation checkpointing runs them again.

        The draws of a unit depend on how often it was called in its microbatch; a region that is
        computed again must count from where it counted at first.
        """
        module = torch.utils.checkpoint
        generator = module._checkpoint_without_reentrant_generator
        apply = module.CheckpointFunction.apply

        def without_reentry(function: Any, *args: Any, **kwargs: Any) -> Any:
            return generator(_Region(self, function, ran=True), *args, **kwargs)

        def with_reentry(function: Any, *args: Any) -> Any:
            return apply(_Region(self, function, ran=False), *args)

        with (
            patch.object(module, "_checkpoint_without_reentrant_generator", without_reentry),
            patch.object(module.CheckpointFunction, "apply", with_reentry),
        ):
            yield


class _Region:
    """The function of a checkpointed region; every call but the first counts as the first did."""

    def __init__(self, owner: SeededUnits, function: Callable[..., Any], *, ran: bool) -> None:
        self._owner = owner
        self._function = function
        self._ran = ran
        self._state, self._calls = owner.state, dict(owner.calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._function(*args, **kwargs)
        owner = self._owner
        before = owner.state, owner.calls
        owner.state, owner.calls = self._state, dict(self._calls)
        try:
            return self._function(*args, **kwargs)
        finally:
            owner.state, owner.calls = before


class _SeededForward:
    def __init__(
        self, owner: SeededUnits, index: int, name: str, module: nn.Module,
        compiler: UnitCompiler | None,
    ) -> None:  # fmt: skip
        self.module = module
        self._owner = owner
        self._index = index
        self._original: Callable[..., Any] = module.forward
        self._forward: Callable[..., Any] = self._original
        if compiler is not None:
            self._forward = compiler.compile(name, module, self._original)
        self._guards: dict[bool, Guard] = {}  # by the training flag, from the first such call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner
        if owner.state is None:
            return self._forward(*args, **kwargs)
        ordinal = owner.calls.get(self._index, 0)
        owner.calls[self._index] = ordinal + 1
        seed = unit_seed(owner.state, self._index, ordinal)
        is_training = self.module.training
        guard = self._guards.get(is_training)
        with isolated_draws(seed, owner.device, Guard.ALL if guard is None else guard) as draws:
            result = self._forward(*args, **kwargs)
            if guard is None:
                self._guards[is_training] = draws.needed()
        return result

    def remove(self) -> None:
        if getattr(self._original, "__self__", None) is self.module:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module draws as usual; its forward is its own, not the original's.
        copied = memo.get(id(self.module))
        return self._original if copied is None else _own_forward(copied)

    def __reduce__(self) -> Any:
        return (_own_forward, (self.module,))


def _own_forward(module: nn.Module) -> Any:
    return type(module).forward.__get__(module)
