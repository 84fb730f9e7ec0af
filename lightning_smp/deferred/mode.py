"""The context in which new tensors are deferred."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_smp.deferred.record import call, held_of, make
from lightning_smp.deferred.tape import Recording
from lightning_smp.deferred.tensor import wrap

__all__ = ["deferring"]

_ATEN = torch.ops.aten
_FACTORIES: Final = frozenset(
    {
        *(_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default),
        *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
        *(_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default),
        *(_ATEN.ones.default, _ATEN.ones_like.default, _ATEN.new_ones.default),
        *(_ATEN.full.default, _ATEN.full_like.default, _ATEN.new_full.default),
        *(_ATEN.rand.default, _ATEN.rand.generator, _ATEN.rand_like.default),
        *(_ATEN.randn.default, _ATEN.randn.generator, _ATEN.randn_like.default),
        *(_ATEN.eye.default, _ATEN.eye.m),
    }
)  # ranges, permutations and what is made of Python numbers are real


@contextmanager
def deferring() -> Iterator[None]:
    """Lets the body build modules whose tensors get their memory and values later."""
    recording = Recording()
    naming = (
        register_module_parameter_registration_hook(_name_tensor),
        register_module_buffer_registration_hook(_name_tensor),
    )
    cudnn = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False  # else RNNs on a GPU ask where their weights are
    try:
        with _DeferringMode(recording):
            yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        recording.is_active = False
        for handle in naming:
            handle.remove()


class _DeferringMode(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(held_of(leaf) is not None for leaf in tree_leaves((args, kwargs))):
            return call(func, args, kwargs, wrap)
        if func in _FACTORIES:
            return make(func, args, kwargs, self._recording, wrap)
        return func(*args, **kwargs)


def _name_tensor(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    held = held_of(tensor)
    if held is not None and held.buffer.name is None:
        held.buffer.name = f"{name} of {type(module).__name__}"
