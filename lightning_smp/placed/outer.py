"""The outer mode: sees every torch function that the step calls outside of units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.checkpointing import checkpoint_generator
from lightning_smp.placed.functions import (
    BACKWARD,
    CHANGES_STATE,
    METADATA,
    ON_PARAMETERS,
    function_name,
    mutates_first,
)
from lightning_smp.placed.run import MicrobatchRun
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.program import EVERYWHERE, SegmentNode

__all__ = ["OuterMode", "answer_outside", "outer_patches"]

T = torch.Tensor
_GRAD = T.grad.__get__  # type: ignore[attr-defined]


class PlacedGradFn:
    """What ``grad_fn`` of a placed tensor answers: there is a graph, on the home rank."""

    def __repr__(self) -> str:
        return "<grad_fn of a placed tensor>"


class OuterMode(TorchFunctionMode):
    """Routes calls that touch placed tensors, parameters or units' buffers to the run."""

    is_of_the_step = True

    def __init__(self, run: MicrobatchRun) -> None:
        self.run = run
        self.held = run.context.table.held

    def __enter__(self) -> OuterMode:
        self.run.begin()
        _push_on_torch_function_stack(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _pop_torch_function_stack()
        self.run.end()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        run = self.run
        if run.upcoming.target is func and run.in_unit is None:
            stand_in = run.upcoming.take(run, args, kwargs or {})
            if stand_in is not None:
                return stand_in
        if func in METADATA:
            return answer_metadata(func, args, kwargs)
        kwargs = kwargs or {}
        if run.in_unit is not None:
            return func(*args, **kwargs)
        if not (_touches(args, self.held) or (kwargs and _touches(kwargs.values(), self.held))):
            return self._call_plain(func, args, kwargs)
        return self._call_placed(func, args, kwargs)

    def _call_placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on what is not the same on all ranks: placed tensors, parameters, buffers."""
        run = self.run
        if func in ON_PARAMETERS and not isinstance(args[0], PlacedTensor):
            if func in CHANGES_STATE:
                run.context.runtime.tokens.forget()
            return func(*args, **kwargs)
        if func is T.register_hook:
            return run.register_hook(args[0], args[1])
        if func in BACKWARD:
            return run.context.backward(run, *args, **kwargs)
        if func is T.__iter__:
            return iter(run.call(torch.unbind, args, {}))
        if func is T.__format__ and args[0].dim() > 0:
            return object.__format__(args[0], args[1])
        if func == _GRAD:
            return None
        if func in _IDENTITY and type(args[0]) is PlacedTensor and len(args) == 1 and not kwargs:
            return args[0]
        if func is torch.autograd.grad:
            _check_one_segment(run, args, kwargs)
        return run.call(func, args, kwargs)

    def _call_plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on tensors that all ranks have."""
        result = func(*args, **kwargs)
        if isinstance(result, T) and result.requires_grad:
            self.run.context.note_plain(result)
        is_changed = result is None or (args and result is args[0]) or "out" in kwargs
        if is_changed and (mutates_first(func, kwargs) or "out" in kwargs):
            self.run.forget_plain()
        return result


_IDENTITY = {torch.as_tensor, torch.asarray}


def answer_metadata(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Answers a question about a tensor from its spec."""
    tensor = args[0]
    if type(tensor) is T:
        return func(*args, **(kwargs or {}))
    with torch._C.DisableTorchFunctionSubclass():
        answer = _FROM_STEP.get(func) if type(tensor) is PlacedTensor else None
        return func(*args, **(kwargs or {})) if answer is None else answer(tensor)


_FROM_STEP: dict[Any, Any] = {
    T.is_leaf.__get__: lambda tensor: not tensor.requires_grad,  # type: ignore[attr-defined]
    T.grad_fn.__get__: lambda tensor: PlacedGradFn() if tensor.requires_grad else None,  # type: ignore[attr-defined]
    T._version.__get__: lambda tensor: tensor._value.group.version,  # type: ignore[attr-defined]
    T.__repr__: PlacedTensor.__repr__,
}
"""Questions that the placeholder alone would answer wrongly."""


def answer_outside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function met a placed tensor where no outer mode is active."""
    if func in METADATA:
        return answer_metadata(func, args, kwargs)
    if getattr(func, "__name__", "") == "__set__":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    raise UnsupportedError(
        f"{function_name(func)} was called on a tensor of the model outside of its step, or inside "
        "a submodule that got it past its arguments. Such tensors live on one stage and end with "
        "the step: pass them as arguments, return them from the step, or log them."
    )


def _touches(items: Any, held: dict[int, Any]) -> bool:
    for item in items:
        kind = type(item)
        if kind is PlacedTensor:
            return True
        if kind is tuple or kind is list:
            if _touches(item, held):
                return True
        elif isinstance(item, T):
            if id(item) in held or kind is torch.nn.Parameter or issubclass(kind, PlacedTensor):
                return True
        elif kind is dict and _touches(item.values(), held):
            return True
    return False


def _check_one_segment(run: MicrobatchRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A rank's graph ends where a segment does: beyond it, gradients would be parts or missing."""
    from lightning_smp.placed.structure import iter_tensors

    tensors = list(iter_tensors((args, kwargs)))
    nodes = {t._value.node for t in tensors if type(t) is PlacedTensor}
    if any(type(t) is T and t.requires_grad for t in tensors):
        nodes.update(_users_of_plain(run))  # with respect to what all ranks have
    nodes = {node for node in nodes if node[0] != EVERYWHERE}
    if len(nodes) > 1:
        stages = sorted({stage for stage, _ in nodes})
        where = f"of stages {stages}: it works within one stage only"
        if len(stages) == 1:
            where = f"of stage {stages[0]} that others depend on in between: it works only where "
            where += "nothing leaves the stage"
        raise UnsupportedError(
            f"torch.autograd.grad between tensors {where}. Move both ends into one submodule."
        )


def _users_of_plain(run: MicrobatchRun) -> Iterator[SegmentNode]:
    """The segments of the calls so far that took a tensor with a graph that all ranks have."""
    segments = list(run.tracker.current)  # those now; backwards from here
    for entry in reversed(run.entries[: run.position]):
        if entry.home != EVERYWHERE and _has_plain_graph(entry.key):
            yield entry.home, segments[entry.home]
        for rank in entry.new_segments:
            segments[rank] -= 1


def _has_plain_graph(key: Any) -> bool:
    if type(key) is not tuple:
        return False
    if len(key) == 4 and key[0] == "t":
        return key[3] is True
    return any(_has_plain_graph(item) for item in key)


@contextmanager
def outer_patches(run: MicrobatchRun) -> Iterator[None]:
    """Reroutes the ways into autograd that no function mode sees, while a step runs."""
    # Not by `Function.apply`: Python notes what it looks up in a class, and to change the class
    # afterwards takes a look at each of its hundreds of subclasses.
    found = [vars(owner)[name] for owner, name in _REROUTED]
    apply, backward, generator = found[0].__func__, *found[1:]
    runtime = run.context.runtime

    def routed_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        active = runtime.active_run()
        if active is None or active.in_unit is not None:
            return apply(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return _without_reentry(*args)
        if cls.__module__ == "torch.utils.checkpoint" or not _touches(args, {}):
            return apply(cls, *args, **kwargs)  # checkpoint's own keeps the arguments, as they are
        return active.call(_FunctionCall.of(cls, apply), args, kwargs)

    def routed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        active = runtime.active_run()
        one = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
        if active is None or active.in_unit is not None or type(one) is not PlacedTensor:
            return backward(tensors, *args, **kwargs)
        return run.context.backward(active, one, *args, **kwargs)

    def routed_generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        active = runtime.active_run()
        if active is None or active.in_unit is not None:
            return generator(function, *args, **kwargs)
        return checkpoint_generator(active, generator, function, args, kwargs)

    routes = (classmethod(routed_apply), routed_backward, routed_generator)
    for (owner, name), route in zip(_REROUTED, routes, strict=True):
        setattr(owner, name, route)
    try:
        yield
    finally:
        for (owner, name), before in zip(_REROUTED, found, strict=True):
            setattr(owner, name, before)


_REROUTED: tuple[tuple[Any, str], ...] = (
    (torch.autograd.Function, "apply"),
    (torch.autograd, "backward"),
    (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"),
)


def _without_reentry(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Checkpoints anew: a reentrant region runs without gradients, also where it calls units."""
    if not any(isinstance(arg, T) and arg.requires_grad for arg in args):
        with torch.no_grad():  # such a region gives no gradients on one device either
            return function(*args)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):  # a reentrant region never does
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


class _FunctionCall:
    """The ``apply`` of a custom autograd Function, as a call that compares equal by class."""

    def __init__(self, cls: Any, apply: Any) -> None:
        self.cls, self._apply = cls, apply
        self.__qualname__ = f"{cls.__qualname__}.apply"
        self.__module__ = cls.__module__
        self.__name__ = "apply"

    @classmethod
    def of(cls, function: Any, apply: Any) -> _FunctionCall:
        return cls(function, apply)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(self.cls, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FunctionCall) and other.cls is self.cls

    def __hash__(self) -> int:
        return hash(self.cls)
