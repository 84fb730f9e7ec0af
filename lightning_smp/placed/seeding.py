"""A single stage draws random numbers as several stages do: each unit from a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import nn

from lightning_smp.partitioning.atoms import find_atoms
from lightning_smp.placed.compiling import UnitCompiler
from lightning_smp.placed.random import (
    SEED_START,
    Generators,
    Guard,
    generators_of,
    isolated_draws,
    lend,
    stir,
    take_back,
    unit_seed,
)

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
        self.streams: _Streams | None = None  # of the microbatch; None draws as usual
        self._called: set[int] = set()
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
        if self._seeds:
            self.streams = _Streams(stir(SEED_START, *seed), self._called)

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


class _Streams:
    """The seeds of units' calls in one microbatch.

    Args:
        state: of seeds, after the microbatch's part.
        called: units that earlier microbatches have called, to which others are added. Their first
            seeds are made at once: between the units' own work it takes several times as long.
    """

    __slots__ = ("_called", "_calls", "_first", "_state")

    def __init__(self, state: int, called: set[int]) -> None:
        self._state = state
        self._called = called
        self._first = {unit: unit_seed(state, unit, 0) for unit in called}
        self._calls: dict[int, int] = {}

    def next_of(self, unit: int) -> int:
        """The seed of a unit's next call."""
        ordinal = self._calls.get(unit, 0)
        self._calls[unit] = ordinal + 1
        if ordinal == 0:
            seed = self._first.get(unit)
            if seed is not None:
                return seed
            self._called.add(unit)
        return unit_seed(self._state, unit, ordinal)

    def fork(self) -> _Streams:
        """Streams that go on from here by themselves."""
        fork = copy(self)
        fork._calls = dict(self._calls)
        return fork


class _Region:
    """The function of a checkpointed region; every call but the first counts as the first did."""

    def __init__(self, owner: SeededUnits, function: Callable[..., Any], *, ran: bool) -> None:
        self._owner = owner
        self._function = function
        self._ran = ran
        self._streams = None if owner.streams is None else owner.streams.fork()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._function(*args, **kwargs)
        owner, mine = self._owner, self._streams
        before, owner.streams = owner.streams, None if mine is None else mine.fork()
        try:
            return self._function(*args, **kwargs)
        finally:
            owner.streams = before


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
        # By the training flag, from the first such call; None where Python's are among them.
        self._generators: dict[bool, Generators | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        streams = self._owner.streams
        if streams is None:
            return self._forward(*args, **kwargs)
        seed = streams.next_of(self._index)
        is_training = self.module.training
        generators = self._generators.get(is_training)
        if generators is not None:
            lent = lend(generators, seed)
            try:
                return self._forward(*args, **kwargs)
            finally:
                take_back(generators, lent)
        device = self._owner.device
        with isolated_draws(seed, device, Guard.ALL) as draws:
            result = self._forward(*args, **kwargs)
            if is_training not in self._generators:
                self._generators[is_training] = generators_of(device, draws.needed())
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
