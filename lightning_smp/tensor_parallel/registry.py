"""Which distributed module stands in for a module of which class, and how calls are translated."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import nn

from lightning_smp.errors import ConfigError
from lightning_smp.process_state import state
from lightning_smp.tensor_parallel.module import DistributedModule

__all__ = [
    "HookedForward",
    "Registration",
    "construct",
    "registered",
    "tp_register",
    "tp_register_with_module",
]

_Hook = Callable[..., tuple[Iterable[Any], Mapping[str, Any]]]
_Class = TypeVar("_Class", bound=type[nn.Module])
_CALL: Final = "_smp_constructed_with"


@dataclass(frozen=True)
class Registration:
    """How modules of one class are replaced.

    Attributes:
        module: the class.
        distributed: what takes its place.
        init_hook: from the arguments of the original's constructor to those of the distributed
            one; None: the same.
        forward_hook: the same for the arguments of ``forward``.
        return_hook: from the distributed module's result to what the original would return.
    """

    module: type[nn.Module]
    distributed: type[DistributedModule]
    init_hook: _Hook | None = None
    forward_hook: _Hook | None = None
    return_hook: Callable[[Any], Any] | None = None


class HookedForward:
    """Stands in for the ``forward`` of a distributed module, and translates its calls."""

    def __init__(self, module: nn.Module, registration: Registration) -> None:
        self.module = module
        self._before = registration.forward_hook
        self._after = registration.return_hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The distributed module's forward, called like the original's."""
        if self._before is not None:
            positional, named = self._before(*args, **kwargs)
            args, kwargs = tuple(positional), dict(named)
        result = type(self.module).forward(self.module, *args, **kwargs)
        return result if self._after is None else self._after(result)

    def install(self) -> None:
        """Take the place of the module's forward."""
        if self._before is not None or self._after is not None:
            self.module.__dict__["forward"] = self


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[_Class], _Class]:
    """Return a class decorator that names the distributed module of a class.

    Args:
        dist_module: a subclass of `smp.nn.DistributedModule`.
        init_hook: takes what the class's constructor takes, without self; returns
            ``(args, kwargs)`` for the distributed module's.
        forward_hook: the same for ``forward``.
        return_hook: takes what the distributed module returns; returns what the class would.

    Raises:
        ConfigError: as `tp_register_with_module`.
    """

    def register(module_cls: _Class) -> _Class:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """Name the distributed module of a class; see `tp_register`.

    From here on the class's instances remember the arguments they are constructed with; those made
    before cannot be replaced.

    Raises:
        ConfigError: `module_cls` is no module class, or `dist_module` no distributed one.
    """
    if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
        raise ConfigError(f"tp_register of {module_cls!r}: it must be a subclass of nn.Module.")
    if not (isinstance(dist_module, type) and issubclass(dist_module, DistributedModule)):
        raise ConfigError(
            f"tp_register of {module_cls.__name__} with {dist_module!r}: it must be a subclass of "
            "smp.nn.DistributedModule."
        )
    _remember_calls(module_cls)
    state.registrations[module_cls] = Registration(
        module_cls, dist_module, init_hook, forward_hook, return_hook
    )


def registered(module: nn.Module) -> Registration | None:
    """Return the registration of a module's own class; subclasses are not covered."""
    return state.registrations.get(type(module))


def construct(
    registration: Registration, original: nn.Module, overrides: Mapping[str, Any]
) -> DistributedModule:
    """Return the distributed module for an original, with weights of its own.

    Args:
        registration: of the original's class.
        original: constructed after the registration.
        overrides: replace arguments of the distributed constructor that have these names; others
            are left aside.

    Raises:
        ConfigError: the original was constructed before the registration, or the distributed
            module refuses the sizes.
    """
    call = original.__dict__.get(_CALL)
    if call is None:
        raise ConfigError(
            "it was constructed before its class was registered; call smp.tp_register first"
        )
    args, kwargs = call
    if registration.init_hook is not None:
        positional, named = registration.init_hook(*args, **kwargs)
        args, kwargs = tuple(positional), dict(named)
    signature = inspect.signature(registration.distributed)
    bound = signature.bind(*args, **kwargs)
    for name in _named_parameters(signature):
        if name in overrides:
            bound.arguments[name] = overrides[name]
    return registration.distributed(*bound.args, **bound.kwargs)


def _named_parameters(signature: inspect.Signature) -> Iterator[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return (name for name, p in signature.parameters.items() if p.kind not in variable)


def _remember_calls(module_cls: type[nn.Module]) -> None:
    """Let instances of a class keep the arguments of their construction."""
    before = module_cls.__init__
    if module_cls in state.registrations:
        return

    @functools.wraps(before)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        if type(self) is module_cls:  # a subclass passes other arguments on
            self.__dict__[_CALL] = (args, kwargs)

    module_cls.__init__ = init  # type: ignore[method-assign]
