"""Compiles the forward of each unit, whole, with `torch.compile`.

Note [What is compiled how]
A unit is compiled at its first call on the stage that owns it, and without breaks in its graph: so
either all of it is compiled, or, before anything of it has run, it is known that it cannot be, and
it runs as it is from then on. Units of one class share their compiled code where what they read of
themselves is equal. Torch gives up on a function that was compiled for too many different modules;
such a unit gets code of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_smp.errors import ConfigError

__all__ = ["CompiledForward", "UnitCompiler"]

_log = logging.getLogger(__name__)

_SHOWN = 300
"""Length to which a reason is cut."""


class UnitCompiler:
    """Compiles units.

    Args:
        backend: name of a backend of `torch.compile`.

    Raises:
        ConfigError: there is no such backend.
    """

    def __init__(self, backend: str) -> None:
        from torch._dynamo import exc, list_backends, lookup_backend  # a slow import

        try:
            lookup_backend(backend)
        except exc.InvalidBackend:
            known = ", ".join(map(repr, list_backends()))
            raise ConfigError(
                f"compile_backend = {backend!r}: torch.compile knows no such backend here, only "
                f'{known} and others for debugging ("eager", "aot_eager"). Use one of them.'
            ) from None
        self._backend = backend
        self._errors = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)
        self._limit: type[Exception] = exc.FailOnRecompileLimitHit
        self._shared_too_often: set[CodeType] = set()

    def compile(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Any:
        """What to call in the place of ``forward``; one that the user has compiled stays.

        Args:
            name: of the unit.
            module: the unit.
            forward: its forward, or its whole call.
        """
        from torch._dynamo import OptimizedModule

        if isinstance(module, OptimizedModule):
            return forward
        return CompiledForward(self, name, forward)

    def start(self, forward: Callable[..., Any], *, own: bool) -> Callable[..., Any]:
        """A compiled form of a function, or of a copy of its code."""
        code = _code_of(forward)
        if own and code is not None:
            self._shared_too_often.add(code)
        if code in self._shared_too_often:
            forward = _with_own_code(forward)
        compiled: Callable[..., Any] = torch.compile(forward, backend=self._backend, fullgraph=True)
        return compiled

    def may_share(self, error: Exception, forward: Callable[..., Any]) -> bool:
        """Whether a failure is only that others have used up what their common code may take."""
        code = _code_of(forward)
        is_limit = isinstance(error, self._limit)
        return is_limit and code is not None and code not in self._shared_too_often

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What compiling raises."""
        return self._errors


class CompiledForward:
    """The forward of one unit, compiled at its first call.

    Args:
        compiler: the compiler.
        name: of the unit.
        original: the forward as it is.

    Attributes:
        is_compiled: whether compiled code is used; False before the first call and where the unit
            cannot be compiled.
    """

    def __init__(self, compiler: UnitCompiler, name: str, original: Callable[..., Any]) -> None:
        self.is_compiled = False
        self._compiler = compiler
        self._name = name
        self._original = original
        self._forward: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward."""
        if self._forward is None:
            self._forward = self._compiler.start(self._original, own=False)
        if self._forward is self._original:
            return self._original(*args, **kwargs)
        try:
            result = self._forward(*args, **kwargs)
        except self._compiler.errors as error:
            return self._after(error)(*args, **kwargs)
        self.is_compiled = True
        return result

    def _after(self, error: Exception) -> Callable[..., Any]:
        """What to call after a failure to compile, before which nothing has run."""
        if self._compiler.may_share(error, self._original):
            self._forward = self._compiler.start(self._original, own=True)
            return self
        self.is_compiled = False
        self._forward = self._original
        reason = " ".join(str(error).split())[:_SHOWN]
        _log.warning(
            "unit %r is not compiled and runs as it is: %s: %s",
            self._name, type(error).__name__, reason,
        )  # fmt: skip
        return self._original


def _code_of(forward: Callable[..., Any]) -> CodeType | None:
    """The code of a method, None for other callables."""
    is_method = isinstance(forward, MethodType) and isinstance(forward.__func__, FunctionType)
    return forward.__func__.__code__ if is_method else None  # type: ignore[attr-defined]


def _with_own_code(method: Any) -> Callable[..., Any]:
    """The same method with a copy of its code, for which torch counts anew."""
    function = method.__func__
    copied = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__ = function.__qualname__
    return MethodType(copied, method.__self__)
