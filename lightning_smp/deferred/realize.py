"""Giving deferred tensors their memory and values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_smp.deferred.parts import Part, part_value, realized
from lightning_smp.deferred.record import held_of
from lightning_smp.deferred.tape import Buffer, replay
from lightning_smp.deferred.tensor import become

__all__ = ["attribute_tensors", "is_deferred", "realize", "realize_module", "value_of"]

_MAX_DEPTH: Final = 3


def is_deferred(tensor: object) -> bool:
    """Whether a tensor has no memory yet because it was made under `deferring`."""
    return held_of(tensor) is not None


def value_of(
    tensor: Tensor, device: torch.device | None = None, part: Part | None = None
) -> Tensor:
    """Returns the values of a deferred tensor, which stays deferred.

    Args:
        tensor: any tensor; a real one gives its own values.
        device: where the result goes; by default where the tensor would have been made.
        part: what is wanted of it; a copy. Nothing else is made at the same time but a piece of
            bounded size, where that can be done; see the note in `lightning_smp.deferred.parts`.

    Returns:
        A tensor that requires no grad.
    """
    if part is not None:
        value = part_value(tensor, part) if is_deferred(tensor) else part.of(tensor.detach())
    else:
        value = realized(tensor) if is_deferred(tensor) else tensor.detach()
    return value if device is None else value.to(device)


def realize(
    tensors: Iterable[Tensor], device: torch.device | None = None, part: Part | None = None
) -> None:
    """Gives deferred tensors their values, one after the other; real ones are left as they are.

    Objects keep their identity, so ties between modules and references of optimizers hold. Tensors
    that are views of one memory when they are given together stay so.

    Args:
        tensors: parameters, buffers or others.
        device: where they go; by default where each would have been made.
        part: as in `value_of`, for each; the parameter then holds this part.

    Raises:
        UnsupportedError: a tensor that was used to initialise one has changed since.
    """
    pending = list({id(t): t for t in tensors if is_deferred(t)}.values())
    pending.sort(key=lambda tensor: tensor.is_leaf)  # results first: they keep a graph alive
    users: dict[Buffer, int] = {}
    for tensor in pending:
        buffer = _buffer_of(tensor)
        users[buffer] = users.get(buffer, 0) + 1
    shared: dict[Buffer, torch.UntypedStorage] = {}
    for tensor in pending:
        buffer = _buffer_of(tensor)
        if part is not None or users[buffer] == 1:
            data = value_of(tensor, device, part)
        else:
            data = _from_shared(tensor, device, shared)
        become(tensor, data)
    for buffer in users:
        buffer.is_settled = True
        if not buffer.is_read:
            buffer.operations.clear()


def realize_module(module: nn.Module, device: torch.device | None = None) -> None:
    """Gives all deferred parameters, buffers and tensor attributes of a module their values."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    for inner in module.modules():
        tensors += attribute_tensors(inner)
    realize(tensors, device)
    for inner in module.modules():
        if isinstance(inner, nn.RNNBase):
            inner.flatten_parameters()  # one memory for all of them, as cuDNN wants it


def attribute_tensors(module: nn.Module) -> list[Tensor]:
    """Returns the deferred tensors in a module's own attributes that are not registered."""
    found: list[Tensor] = []
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            _collect(value, found, _MAX_DEPTH)
    return found


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    if is_deferred(value):
        found.append(value)
    elif depth and isinstance(value, dict):
        for item in value.values():
            _collect(item, found, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found, depth - 1)


def _buffer_of(tensor: Tensor) -> Buffer:
    held = held_of(tensor)
    assert held is not None
    return held.buffer


def _from_shared(
    tensor: Tensor, device: torch.device | None, shared: dict[Buffer, torch.UntypedStorage]
) -> Tensor:
    held = held_of(tensor)
    assert held is not None
    ref = held.ref()
    if ref.buffer not in shared:
        storage = replay([ref])[ref.buffer]
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        shared[ref.buffer] = (flat if device is None else flat.to(device)).untyped_storage()
    return ref.in_storage(shared[ref.buffer])
