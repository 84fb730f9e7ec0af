"""What the placed runs of one rank share: the placement, the running microbatch, the services."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.autograd import storage_uses
from lightning_smp.placed.functions import function_name
from lightning_smp.placed.random import SEED_START, stir
from lightning_smp.placed.tokens import Tokens
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import Edge, fingerprint

if TYPE_CHECKING:
    from lightning_smp.engine.channels import Channels
    from lightning_smp.engine.control import Control
    from lightning_smp.engine.meter import UnitMeter

__all__ = ["Engine", "OutsideOuterMode", "PlacementTable", "Runtime", "StepContext"]


class PlacementTable:
    """Which stages hold each parameter and buffer that is not on all of them."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[torch.Tensor, str, tuple[int, ...]]] = {}

    def add(self, tensor: torch.Tensor, name: str, stages: tuple[int, ...]) -> None:
        """Notes a parameter or buffer."""
        self.held[id(tensor)] = (tensor, name, stages)

    def lookup(self, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
        """(name, stages) of a held tensor; None for every other."""
        found = self.held.get(id(tensor))
        return None if found is None else found[1:]


class _Thread(threading.local):
    """What belongs to one thread: the run that is in progress there, or None."""

    run: Any = None


class Runtime:
    """Finds the microbatch that runs in this thread.

    Args:
        rank: this rank's stage.
        num_ranks: number of stages.
        device: the run's device.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.table = PlacementTable()
        self.units: list[UnitEntry] = []
        self.tokens = Tokens(self.units)
        self.outer_modules: dict[str, nn.Module] = {}
        self.gathers_state = False
        self.hooks: list[Any] = []
        self.thread = _Thread()

    def leave_module(self) -> None:
        """Gives the module its own forwards and state dicts back."""
        for unit in self.units:
            unit.remove()
        for hook in self.hooks:
            hook.remove()

    def active_run(self) -> Any:
        """The run of this thread, or None outside of steps."""
        return self.thread.run

    def activate(self, run: Any) -> Any:
        """Makes ``run`` this thread's run; returns the former one."""
        former, self.thread.run = self.thread.run, run
        return former


class Engine(Protocol):
    """What a run needs of the engine."""

    def pause(self, run: Any) -> None:
        """Called where a run's next segment begins."""

    def receive(self, run: Any, edge: Edge) -> torch.Tensor:
        """The value of an edge that ends on this rank."""

    def deviated(self, run: Any, position: int, key: tuple[Any, ...]) -> None:
        """Called where a run leaves its program; returns when all ranks agree."""

    def backward(self, run: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """A backward that the user's step asked for."""


class OutsideOuterMode:
    """Leaves the outer mode while its body runs; every unit's call enters one of these."""

    __slots__ = ("_num_kept", "_stack")

    def __enter__(self) -> None:
        depth = _len_torch_function_stack()
        self._stack = [_pop_torch_function_stack() for _ in range(depth)]
        self._num_kept = 0
        for mode in reversed(self._stack):
            if not getattr(mode, "is_of_the_step", False):
                self._num_kept += 1
                _push_on_torch_function_stack(mode)

    def __exit__(self, *exc: object) -> None:
        for _ in range(self._num_kept):
            _pop_torch_function_stack()
        while self._stack:
            _push_on_torch_function_stack(self._stack.pop())

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside this context, and the body of this object, the modes are as before."""
        left = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
        for mode in reversed(self._stack):
            _push_on_torch_function_stack(mode)
        try:
            yield
        finally:
            for _ in self._stack:
                _pop_torch_function_stack()
            for mode in reversed(left):
                _push_on_torch_function_stack(mode)


class StepContext:
    """What the microbatches of one step share.

    Args:
        runtime: this rank's runtime.
        channels: moves tensors.
        control: small messages.
        engine: runs the schedule.
        seed: integers that the seeds of units' random streams start with.

    Attributes:
        seed_state: the state of seeds after these integers.
        adopted: whether the step has written a tensor that all ranks held.
        meter: measures units while it is set.
        tokens: units' tokens, as far as they are known.
    """

    def __init__(
        self, runtime: Runtime, channels: Channels, control: Control, engine: Engine,
        seed: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.runtime = runtime
        self.rank = runtime.rank
        self.num_ranks = runtime.num_ranks
        self.device = runtime.device
        self.table = runtime.table
        self.channels = channels
        self.control = control
        self.seed_state = stir(SEED_START, *seed)
        self.adopted = False
        self.meter: UnitMeter | None = None
        self.pause = engine.pause
        self.receive = engine.receive
        self.deviated = engine.deviated
        self.backward = engine.backward
        self.tokens = runtime.tokens.of_step()
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def close(self) -> None:
        """The step is over: lets go of the engine, which would form a cycle with what is kept."""
        del self.pause, self.receive, self.deviated, self.backward

    def key_mark(self, key: tuple[Any, ...]) -> str:
        """A hash of a call's key, equal on ranks that made equal calls."""
        return fingerprint([self.describe_call(key)])

    def describe_call(self, key: tuple[Any, ...]) -> str:
        """A call's key in words that are equal on all ranks."""
        target = key[0]
        if isinstance(target, tuple):
            unit = next((u for u in self.runtime.units if u.index == target[1]), None)
            name = f"unit {unit.name!r}" if unit is not None else f"unit {target[1]}"
            return f"{name}[{target[2]}]{key[1:]}"
        if isinstance(target, str):
            return target
        return f"{function_name(target)}{key[1:]}"

    def outside_outer_mode(self) -> OutsideOuterMode:
        """Leaves the outer mode; modes that the user has entered stay."""
        return OutsideOuterMode()

    def note_plain(self, tensor: torch.Tensor) -> None:
        """Outer code made a plain tensor with a graph (from its own inputs, not from units)."""
        self._made[id(tensor)] = weakref.ref(tensor)

    def check_plain(self, tensor: torch.Tensor, run: Any) -> None:
        """Refuses plain tensors that only one rank can have."""
        if tensor.is_meta:
            raise UnsupportedError(
                f"a meta tensor of shape {tuple(tensor.shape)} without numbers met the step's "
                "code. Build the model on a real device, or load its weights before the first step."
            )
        if tensor.requires_grad and tensor.grad_fn is not None:
            known = self._made.get(id(tensor))
            if known is None or known() is not tensor:
                raise UnsupportedError(
                    f"a tensor of shape {tuple(tensor.shape)} that a submodule made (by "
                    f"{tensor.grad_fn.name()}) reached the step's code by a hook, a list or a "
                    "closure; it exists on one stage only. Return it from the submodule's forward."
                )

    def has_aliases(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor may share the storage."""
        return tensor._is_view() or storage_uses(tensor) > storage_uses(torch.empty(1))
