"""Lets scripts that name CUDA devices run where there is none: they get the CPU.

Patches torch for the whole process: `torch.device("cuda", n)`, `.cuda()`, `.to("cuda")`, and the
functions of `torch.cuda` that choose or wait for a device. `torch.cuda.is_available()` keeps saying
the truth, and `device="cuda"` in a factory function stays an error of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final, TypeVar

import torch
from torch import nn

__all__ = ["install", "remove"]

_MARK: Final = "_smp_original"
_Holder = TypeVar("_Holder")


def install() -> None:
    """Patches torch; does nothing where that is done."""
    # It collects torch's functions by identity, so it must have seen the original ones.
    import lightning_smp.placed.functions  # noqa: F401

    for holder, name, make in _patches():
        original = getattr(holder, name)
        if not hasattr(original, _MARK):
            replacement = make(original)
            setattr(replacement, _MARK, original)
            setattr(holder, name, replacement)


def remove() -> None:
    """Gives torch its own functions back."""
    for holder, name, _ in _patches():
        held = getattr(holder, name)
        if hasattr(held, _MARK):
            setattr(holder, name, getattr(held, _MARK))


def _patches() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    yield torch, "device", _device_class
    for holder in (torch.Tensor, nn.Module):
        yield holder, "to", _without_cuda
        yield holder, "cuda", _staying
    for name in ("set_device", "synchronize"):
        yield torch.cuda, name, _nothing
    yield torch.cuda, "current_device", _zero


def _device_class(original: Any) -> Any:
    """A class that makes torch's devices, of the CPU instead of CUDA, and that they belong to."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            return original("cpu") if made.type == "cuda" else made

    # Under torch's own name, which pickled devices refer to.
    return Kind("device", (), {"__module__": "torch", "__doc__": original.__doc__})


def _without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: _host(value) for name, value in kwargs.items()}
        return original(self, *map(_host, args), **kwargs)

    return to


def _staying(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def cuda(self: _Holder, *args: Any, **kwargs: Any) -> _Holder:
        return self

    return cuda


def _nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def _zero(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def zero() -> int:
        return 0

    return zero


def _host(value: Any) -> Any:
    """The CPU in the place of a CUDA device, however it is spelled."""
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return value
