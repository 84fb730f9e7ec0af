"""Activation checkpointing around code between units (``torch.utils.checkpoint`` in outer code).

The region's calls are noted while it runs forward. When a stage's backward recomputes the region,
the calls that this rank ran are run again with the same random seeds; the results of the others
are the ones that arrived before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.functions import METADATA
from lightning_smp.placed.ready import NOTHING
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import EVERYWHERE, Entry

if TYPE_CHECKING:
    from lightning_smp.placed.run import MicrobatchRun

__all__ = ["Replay", "ReplayMode", "checkpoint_generator"]


def checkpoint_generator(
    run: MicrobatchRun, original: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Wraps torch's generator: notes the region's calls, and replays them on recomputation."""
    region: list[tuple[Entry, int | None, Any]] = []
    locals_: dict[int, torch.Tensor] = {}

    def recompute(*inner_args: Any, **inner_kwargs: Any) -> Any:
        replay = Replay(run, region, locals_)
        with replay.running():
            return function(*inner_args, **inner_kwargs)

    generator = original(recompute, *args, **kwargs)
    next(generator)
    outer, run.region = run.region, region
    try:
        yield
    finally:
        run.region = outer
        if outer is not None:
            outer += region
        for tensor in iter_tensors((args, kwargs, [result for _, _, result in region])):
            if type(tensor) is PlacedTensor and tensor._value.local is not None:
                locals_[id(tensor)] = tensor._value.local
        with contextlib.suppress(StopIteration):
            next(generator)


class Replay:
    """Runs a region of outer code again on one rank, without talking to the others."""

    following = False
    """It has its own list of calls, not a program."""

    upcoming = NOTHING
    """Units ask what comes next in the program."""

    def __init__(
        self,
        run: MicrobatchRun,
        region: list[tuple[Entry, int | None, Any]],
        locals_: dict[int, torch.Tensor],
    ) -> None:
        self.run = run
        self.context = run.context
        self.in_unit: UnitEntry | None = None
        self._calls = iter(region)
        self._locals = locals_

    def running(self) -> Any:
        """The context in which the region's function is called."""
        return ReplayMode(self)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The next call of the region: run again if it is this rank's, else its old result."""
        entry, seed, result = next(self._calls)
        run = self.run
        if entry.home not in (run.rank, EVERYWHERE):
            return result
        args = map_tensors(args, self._real)
        kwargs = map_tensors(kwargs, self._real)
        real = run.replay(self, target, args, kwargs, seed)
        return _Repeated.wrap(real)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is _Repeated:
            return tensor._held
        if type(tensor) is not PlacedTensor:
            return tensor
        local = self._locals.get(id(tensor), tensor._value.local)
        if local is None:
            raise UnsupportedError(
                f"activation checkpointing recomputes code that uses {tensor!r}, which this stage "
                "does not hold. Put the checkpoint around one submodule."
            )
        return local


class _Repeated(PlacedTensor):
    """A result of a replayed call: real, but still seen by the replay's mode."""

    _held: torch.Tensor  # `real` is the real part of a complex tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> _Repeated:  # type: ignore[override]
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, real.stride(), dtype=real.dtype, device=real.device,
            requires_grad=real.requires_grad,
        )  # fmt: skip
        tensor._held = real
        return tensor

    def __init__(self, real: torch.Tensor) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"_Repeated({self._held!r})"

    @classmethod
    def wrap(cls, result: Any) -> Any:
        return map_tensors(result, cls)


class ReplayMode(TorchFunctionMode):
    """Routes a replayed region's calls to its replay."""

    is_of_the_step = True

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay
        self._former: Any = None

    def __enter__(self) -> ReplayMode:
        self._former = self._replay.run.context.runtime.activate(self._replay)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._replay.run.context.runtime.activate(self._former)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from lightning_smp.placed.outer import _touches, answer_metadata

        kwargs = kwargs or {}
        if func in METADATA:
            return answer_metadata(func, args, kwargs)
        replay = self._replay
        held = replay.run.context.table.held
        if replay.in_unit is not None or not (
            _touches(args, held) or _touches(kwargs.values(), held)
        ):
            return func(*args, **kwargs)
        return replay.call(func, args, kwargs)
