"""The numbers of placed tensors on every rank, after their step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from lightning_smp.engine.channels import Channels
from lightning_smp.engine.control import Control
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.program import EVERYWHERE
from lightning_smp.wire.encode import tensor_bytes

__all__ = ["Fetching"]

_CPU = torch.device("cpu")

_MOST_BYTES = 2048
"""What a rank adds at most to the message that ends a step."""


class Fetching:
    """Gives every rank what is real on one.

    What a step is known to be asked for, losses and logs, is so small that it travels with the
    message in which the ranks agree that the step is over. What is on the device travels there, if
    it can, so that no host waits for its device.

    Args:
        rank: this rank's stage.
        control: small messages between the stages.
        channels: tensors between the stages.
    """

    def __init__(self, rank: int, control: Control, channels: Channels) -> None:
        self._rank = rank
        self._control = control
        self._channels = channels
        self._asked: list[torch.Tensor] = []
        self._told: list[bytes] = []

    def offer(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """The numbers of those tensors that live on this host, if they are few; else nothing.

        Args:
            tensors: what `fetch` will be called with, on all ranks.
        """
        self._asked = list(tensors)
        mine = [t for t in tensors if _home(t) == self._rank and not self._is_direct(t)]
        if not mine or sum(map(_num_bytes, mine)) > _MOST_BYTES:
            return b""
        with torch._C.DisableTorchFunctionSubclass():
            return tensor_bytes(_joined(mine).cpu())

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
        parts: dict[tuple[int, bool], list[int]] = {}
        for ordinal, tensor in enumerate(tensors):
            parts.setdefault((_home(tensor), self._is_direct(tensor)), []).append(ordinal)
        found = list(tensors)
        with torch._C.DisableTorchFunctionSubclass():
            for (home, is_direct), ordinals in sorted(parts.items()):
                part = [tensors[ordinal] for ordinal in ordinals]
                numbers = self._numbers(part, home, [] if is_direct else told, is_direct)
                for ordinal, tensor in zip(ordinals, numbers, strict=True):
                    found[ordinal] = tensor
        return found

    def _numbers(
        self, tensors: list[torch.Tensor], home: int, told: list[bytes], is_direct: bool
    ) -> list[torch.Tensor]:
        """The numbers of tensors of one home; every rank knows their types and shapes."""
        known = told[home] if told and home != EVERYWHERE else b""
        if home not in (self._rank, EVERYWHERE):
            return _divided(self._take(tensors, home, known, is_direct), tensors)
        if home == self._rank:
            self._give(tensors, known, is_direct)
        return [_local(tensor).detach() for tensor in tensors]

    def _is_direct(self, tensor: torch.Tensor) -> bool:
        """Whether its numbers travel from device to device."""
        channels = self._channels
        return channels.is_direct and tensor.device.type == channels.device.type

    def _give(self, tensors: list[torch.Tensor], known: bytes, is_direct: bool) -> None:
        """Shares tensors that live here in one message, unless the others know it."""
        if len(known) == sum(map(_num_bytes, tensors)):
            return
        message = _joined(tensors).view(-1).view(torch.uint8)
        if is_direct:
            self._channels.share(message, self._rank)
        else:
            self._control.share(message.cpu(), self._rank)

    def _take(
        self, tensors: list[torch.Tensor], home: int, known: bytes, is_direct: bool
    ) -> torch.Tensor:
        """The bytes of tensors that live elsewhere."""
        total = sum(map(_num_bytes, tensors))
        if total and len(known) == total:
            return torch.frombuffer(bytearray(known), dtype=torch.uint8)
        device = self._channels.device if is_direct else _CPU
        message = torch.empty(total, dtype=torch.uint8, device=device)
        if total:
            share = self._channels.share if is_direct else self._control.share
            share(message, home)
        return message


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


def _divided(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a message, with the types, shapes and devices of these tensors."""
    if len(message) and _are_alike(tensors):
        return _divided_equally(message, tensors[0], len(tensors))
    found, at = [], 0
    for tensor in tensors:
        part = message[at : at + _num_bytes(tensor)].clone()  # since a type must be aligned
        at += len(part)
        found += _divided_equally(part, tensor, 1)
    return found


def _divided_equally(message: torch.Tensor, like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The parts of a message of tensors that are all like one."""
    numbers = message.view(like.dtype).view(count, *like.shape)
    return list(numbers.to(like.device).unbind())


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Placed tensors that live here as one: stacked, or else their bytes."""
    parts = list(map(_local, tensors))
    if _are_alike(parts):
        return torch.stack(parts).detach()
    return torch.cat([part.detach().contiguous().view(-1).view(torch.uint8) for part in parts])
