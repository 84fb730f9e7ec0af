"""The numbers of placed tensors on every rank, after their step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from lightning_smp.engine.control import Control
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.program import EVERYWHERE
from lightning_smp.wire.encode import tensor_bytes

__all__ = ["Fetching"]

_MOST_BYTES = 2048
"""What a rank adds at most to the message that ends a step."""


class Fetching:
    """Gives every rank what is real on one.

    What a step is known to be asked for, losses and logs, is so small that it travels with the
    message in which the ranks agree that the step is over.

    Args:
        rank: this rank's stage.
        control: small messages between the stages.
    """

    def __init__(self, rank: int, control: Control) -> None:
        self._rank = rank
        self._control = control
        self._asked: list[torch.Tensor] = []
        self._told: list[bytes] = []

    def offer(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """The numbers of those tensors that live here, if they are few; else nothing.

        Args:
            tensors: what `fetch` will be called with, on all ranks.
        """
        self._asked = list(tensors)
        mine = [tensor for tensor in tensors if _home(tensor) == self._rank]
        if not mine or sum(map(_num_bytes, mine)) > _MOST_BYTES:
            return b""
        with torch._C.DisableTorchFunctionSubclass():
            return tensor_bytes(_joined(mine))

    def accept(self, offers: Sequence[bytes]) -> None:
        """Takes what all ranks have offered, by stage."""
        self._told = list(offers)

    def forget(self) -> None:
        """A step begins: nothing is offered."""
        self._asked, self._told = [], []

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The numbers of placed tensors on every rank. Collective over pp."""
        told, asked = self._told, self._asked
        self.forget()
        if len(tensors) != len(asked) or not all(map(is_, tensors, asked)):
            told = []
        by_home: dict[int, list[int]] = {}
        for ordinal, tensor in enumerate(tensors):
            by_home.setdefault(_home(tensor), []).append(ordinal)
        found = list(tensors)
        with torch._C.DisableTorchFunctionSubclass():
            for home, ordinals in sorted(by_home.items()):
                asked = [tensors[ordinal] for ordinal in ordinals]
                if home == EVERYWHERE:
                    numbers = [_local(tensor).detach() for tensor in asked]
                else:
                    numbers = self._shared(asked, home, told[home] if told else b"")
                for ordinal, tensor in zip(ordinals, numbers, strict=True):
                    found[ordinal] = tensor
        return found

    def _shared(self, tensors: list[torch.Tensor], home: int, known: bytes) -> list[torch.Tensor]:
        """Tensors of one home in one message; every rank knows their types and shapes."""
        total = sum(map(_num_bytes, tensors))
        is_known = len(known) == total
        if home == self._rank:
            if not is_known:
                message = _joined(tensors).view(-1).view(torch.uint8)
                self._control.share(message, home)
            return [_local(tensor).detach() for tensor in tensors]
        received = bytearray(known) if is_known else bytearray(total)
        if not is_known:
            self._control.share(torch.frombuffer(received, dtype=torch.uint8), home)
        return _divided(received, tensors)


def _home(tensor: torch.Tensor) -> int:
    return tensor._value.home if isinstance(tensor, PlacedTensor) else EVERYWHERE


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that lives here, or everywhere."""
    if not isinstance(tensor, PlacedTensor):
        return tensor
    local = tensor._value.local
    assert local is not None
    return local


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape.numel() * tensor.dtype.itemsize


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors have one type, shape and device, as losses have."""
    first = tensors[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    return all([t.shape == shape and t.dtype is dtype and t.device == device for t in tensors[1:]])


def _divided(message: bytearray, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a message, with the types, shapes and devices of these tensors."""
    if message and _are_alike(tensors):
        return _divided_equally(message, tensors[0], len(tensors))
    found, at = [], 0
    for tensor in tensors:
        # copied, since a type must be aligned
        part = message[at : at + _num_bytes(tensor)]
        at += len(part)
        if part:
            found += _divided_equally(part, tensor, 1)
        else:
            found.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
    return found


def _divided_equally(message: bytearray, like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The parts of a message of tensors that are all like one."""
    numbers = torch.frombuffer(message, dtype=like.dtype)
    if like.shape:
        numbers = numbers.view(count, *like.shape)
    if like.device.type != "cpu":
        numbers = numbers.to(like.device)
    return list(numbers.unbind())


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Placed tensors that live here as one on the host: stacked, or else their bytes."""
    parts = list(map(_local, tensors))
    if _are_alike(parts):
        joined = torch.stack(parts).detach()
    else:
        flat = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
        joined = torch.cat(flat)
    return joined if joined.is_cpu else joined.cpu()
