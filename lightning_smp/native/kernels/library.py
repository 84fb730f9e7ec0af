"""Where the operators of the native kernels are declared: one schema each, with a plain reference.

The reference serves every device; the built extension, once it is loaded, adds a CUDA kernel to the
same operator, which then goes first. So nothing here needs the extension, and the order of loading
and importing does not matter. Public functions call `prepare` before their operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from lightning_smp.native.loading import load_kernels

__all__ = ["NAMESPACE", "declare", "differentiate", "has_cuda_kernel", "prepare"]

NAMESPACE: Final = "lightning_smp"
# Registrations live as long as this object.
_LIBRARY: Final = torch.library.Library(NAMESPACE, "FRAGMENT")


def declare(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Declares the operator ``lightning_smp::<schema>`` and returns it.

    Args:
        schema: name, arguments and results in the notation of ``torch.library.define``.
        reference: computes the results in plain torch, on any device.
        fake: makes results of the right shape and type, without data.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiate(name: str, remember: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Gives the operator `name` a gradient, as ``torch.library.register_autograd`` takes it."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=remember, lib=_LIBRARY
    )


def prepare(tensor: torch.Tensor) -> None:
    """Loads the extension, where it is built, before the first use of an operator on CUDA."""
    if tensor.is_cuda and not torch.compiler.is_compiling():
        load_kernels()


def has_cuda_kernel(name: str) -> bool:
    """Whether the loaded extension provides the operator `name` on CUDA devices."""
    found = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CUDA")
    return bool(found)
