"""Units: module subtrees that live on one stage, entered through their ``forward``.

A unit's own hooks, and wrappers that others put around its ``forward`` later, run in outer code on
every rank; only the original forward runs on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.random import Guard, generators_of
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.placed.tokens import flags_of

if TYPE_CHECKING:
    from lightning_smp.placed.compiling import UnitCompiler
    from lightning_smp.placed.runtime import Runtime

__all__ = ["UnitEntry", "entry_of"]


class UnitEntry:
    """Stands in for the ``forward`` of a unit.

    Args:
        runtime: finds the microbatch that is running.
        index: ordinal of the unit's atom, equal for every layout.
        name: dotted name of the module.
        module: the module.
        stage: pipeline rank that holds it, or -1 for a unit without state, which runs wherever
            its input lives.
        cost: forward cost, in the partition's units.
        compiler: compiles the forward; None runs it as it is.
    """

    def __init__(
        self, runtime: Runtime, index: int, name: str, module: nn.Module, stage: int, cost: float,
        compiler: UnitCompiler | None = None,
    ) -> None:  # fmt: skip
        self.runtime = runtime
        self.index = index
        self.name = name
        self.module = module
        self.stage = stage
        self.cost = cost
        self._guard = Guard.DEVICE
        self.generators = generators_of(runtime.device, Guard.DEVICE)  # None: all, also Python's
        self._whole_call = _needs_whole_call(module)
        self._original: Callable[..., Any] = (
            module._call_impl if self._whole_call else module.forward
        )
        self._forward: Callable[..., Any] = self._original
        if compiler is not None:
            self._forward = compiler.compile(name, module, self._original)
        self._inner = [(path, inner) for path, inner in module.named_modules()]
        self.modules = [inner for _, inner in self._inner]
        self._thread = runtime.thread
        self.parameters = list(module.parameters())
        self._tokens: dict[bytes, tuple[Any, ...]] = {}
        self._observed: list[tuple[str, str, Any]] = []
        self._planted: list[tuple[str, str]] = []

    def install(self) -> None:
        """Puts this entry in the place of the module's forward."""
        if self._whole_call:
            self.module._compiled_call_impl = self.enter  # type: ignore[assignment]
        else:
            self.module.__dict__["forward"] = self.enter

    def remove(self) -> None:
        """Gives the module its forward back."""
        if self._whole_call:
            self.module._compiled_call_impl = None
        elif getattr(self._original, "__self__", None) is self.module:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._original

    @property
    def token(self) -> tuple[Any, ...]:
        """Identifies the unit and everything in its state that can change a result's spec."""
        flags = flags_of(self.parameters, self.modules)
        token = self._tokens.get(flags)
        if token is None:  # equal states have the same object, so that `is` compares them
            token = self._tokens[flags] = ("unit", self.index, int.from_bytes(flags, "big"))
        return token

    def token_in(self, known: dict[int, tuple[bool, tuple[Any, ...]]]) -> tuple[Any, ...]:
        """The token, found anew when the unit's training flag changes.

        Args:
            known: training flags and tokens found earlier (`Tokens`); the outer mode empties it
                when ``requires_grad_`` is called. A flag that the step writes to an inner module
                only counts from the next step: until then the home refuses a result of another
                spec.
        """
        found = known.get(self.index)
        if found is None or found[0] is not self.module.training:
            found = known[self.index] = (self.module.training, self.token)
        return found[1]

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward, as the step calls it."""
        run = self._thread.run
        if run is None or run.in_unit is not None:
            return self._call_directly(args, kwargs, run)
        upcoming = run.upcoming
        is_next = upcoming.target is self and upcoming.token is self.token_in(run.tokens)
        if is_next and not upcoming.is_here:
            stand_in = upcoming.take(run, args, kwargs)
            if stand_in is not None:
                return stand_in
        with run.context.outside_outer_mode():
            if is_next and upcoming.is_here:
                result = upcoming.take(run, args, kwargs)
                if result is not None:
                    return result
            return run.call(self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            f"copy.deepcopy of {self.name!r}: the model is split over the pipeline stages, so a "
            "copy would be without the other stages' weights. Copy the model before training "
            "starts, or copy `trainer.strategy.lightning_module_state_dict()`."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{self.name!r} cannot be pickled while the model is split over the pipeline stages. "
            "Save `trainer.strategy.lightning_module_state_dict()` instead."
        )

    def note_draws(self, needed: Guard) -> None:
        """A recorded call of the unit has drawn from generators that this guards."""
        self._guard = max(self._guard, needed)
        self.generators = generators_of(self.runtime.device, self._guard)

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that get gradients."""
        return [p for p in self.parameters if p.requires_grad]

    def buffer_state(self) -> list[tuple[int, int]]:
        """Is another one after a buffer was written or replaced."""
        buffers = [buffer for inner in self.modules for buffer in inner._buffers.values()]
        return [
            (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for buffer in buffers
            if buffer is not None
        ]

    def run(self, args: Any, kwargs: Any, *, observe: bool) -> Any:
        """Runs the unit for real; ``observe`` notes tensors that it leaves in its attributes."""
        if self._planted:
            self._uproot()
        if not observe:
            return self._forward(*args, **kwargs)
        before = [dict(inner.__dict__) for _, inner in self._inner]
        result = self._forward(*args, **kwargs)
        self._observed = [
            (path, name, held)
            for (path, inner), old in zip(self._inner, before, strict=True)
            for name, held in inner.__dict__.items()
            if not name.startswith("_") and held is not old.get(name) and _holds_tensors(held)
        ]
        return result

    def observed(self) -> list[tuple[str, str, Any]]:
        """(module path, attribute, held) of tensors that the last observed run left behind."""
        return self._observed

    def collect(self, escapes: tuple[tuple[str, str, Any], ...]) -> list[Any]:
        """What the unit's attributes hold now, in the order of ``escapes``."""
        inner = dict(self._inner)
        return [getattr(inner[path], name, None) for path, name, _ in escapes]

    def plant(self, escapes: tuple[tuple[str, str, Any], ...], leaves: Any, objects: Any) -> None:
        """Puts placed tensors where the unit left real ones, on every rank."""
        from lightning_smp.placed.structure import build

        inner = dict(self._inner)
        for path, name, template in escapes:
            setattr(inner[path], name, build(template, leaves, objects))
        self._planted = [(path, name) for path, name, _ in escapes]

    def _uproot(self) -> None:
        inner = dict(self._inner)
        for path, name in self._planted:
            held = getattr(inner[path], name, None)
            setattr(inner[path], name, map_tensors(held, _real))
        self._planted = []

    def _call_directly(self, args: Any, kwargs: Any, run: Any) -> Any:
        if self.stage in (self.runtime.rank, -1) and not any(
            type(t) is PlacedTensor for t in iter_tensors((args, kwargs))
        ):
            return self._original(*args, **kwargs)
        where = "outside of a step" if run is None else f"inside unit {run.in_unit.name!r}"
        raise UnsupportedError(
            f"{self.name!r}, which lives on stage {self.stage}, was called {where} on stage "
            f"{self.runtime.rank}. Call it from training_step, validation_step, test_step or "
            "predict_step, in the code between submodules."
        )


def entry_of(module: nn.Module) -> UnitEntry | None:
    """The entry that stands in for this module's forward, if it is a unit."""
    for forward in (module.__dict__.get("forward"), module._compiled_call_impl):
        entry = getattr(forward, "__self__", None)
        if isinstance(entry, UnitEntry):
            return entry
    return None


def _needs_whole_call(module: nn.Module) -> bool:
    """Whether more than the forward belongs inside the unit.

    Backward hooks and compiled calls work on real tensors. Hooks of torch.nn.utils (weight_norm,
    spectral_norm, pruning) give the module tensors that they make of its weights.
    """
    makes_weights = (
        type(hook).__module__.startswith("torch.nn.utils.")
        for hook in module._forward_pre_hooks.values()
    )
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or any(makes_weights)
    )


def _holds_tensors(held: Any) -> bool:
    if isinstance(held, nn.Parameter):
        return False
    return any(True for _ in iter_tensors(held))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not PlacedTensor:
        return tensor
    local = tensor._value.local
    return tensor if local is None else local
