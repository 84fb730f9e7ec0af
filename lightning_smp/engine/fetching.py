"""The numbers of placed tensors on every rank, after their step."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._told: list[bytes | None] = []

    def offer(self, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """The numbers of those tensors that live here, if they are few; else None.

        Args:
            tensors: what `fetch` will be called with, on all ranks.
        """
        self._asked = list(tensors)
        mine = [tensor for tensor in tensors if _home(tensor) == self._rank]
        with torch._C.DisableTorchFunctionSubclass():
            if sum(tensor.numel() * tensor.element_size() for tensor in mine) > _MOST_BYTES:
                return None
            return tensor_bytes(_joined(mine)) if mine else b""

    def accept(self, offers: Sequence[bytes | None]) -> None:
        """Takes what all ranks have offered, by stage."""
        self._told = list(offers)

    def forget(self) -> None:
        """A step begins: nothing is offered."""
        self._asked, self._told = [], []

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The numbers of placed tensors on every rank. Collective over pp."""
        by_home: dict[int, list[int]] = {}
        for ordinal, tensor in enumerate(tensors):
            home = _home(tensor)
            if home != EVERYWHERE:
                by_home.setdefault(home, []).append(ordinal)
        is_offered = len(tensors) == len(self._asked) and all(
            one is other for one, other in zip(tensors, self._asked, strict=True)
        )
        told = self._told if is_offered else []
        found: dict[int, torch.Tensor] = {}
        for home, ordinals in sorted(by_home.items()):
            known = told[home] if told else None
            numbers = self._shared([tensors[k] for k in ordinals], home, known)
            found.update(zip(ordinals, numbers, strict=True))
        self.forget()
        return [self._fetched(tensor, found.get(k)) for k, tensor in enumerate(tensors)]

    def _shared(
        self, tensors: list[torch.Tensor], home: int, known: bytes | None
    ) -> list[torch.Tensor]:
        """Tensors of one home in one message; every rank knows their types and shapes."""
        with torch._C.DisableTorchFunctionSubclass():
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            if home == self._rank:
                if known is None and sum(sizes):
                    self._control.share(_joined(tensors), home)
                return tensors  # `_fetched` takes what is here
            if known is not None:
                message = torch.frombuffer(bytearray(known) or bytearray(1), dtype=torch.uint8)
                message = message[: len(known)]
            else:
                message = torch.empty(sum(sizes), dtype=torch.uint8)
                if sum(sizes):
                    self._control.share(message, home)
            return _divided(message, tensors, sizes)

    def _fetched(self, tensor: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(tensor, PlacedTensor):
            return tensor.detach()
        value = tensor._value
        if value.home in (self._rank, EVERYWHERE):
            assert value.local is not None
            return value.local.detach()
        assert found is not None
        with torch._C.DisableTorchFunctionSubclass():
            return found.to(tensor.device)


def _home(tensor: torch.Tensor) -> int:
    return tensor._value.home if isinstance(tensor, PlacedTensor) else EVERYWHERE


def _divided(
    message: torch.Tensor, tensors: Sequence[torch.Tensor], sizes: list[int]
) -> list[torch.Tensor]:
    """The parts of a message, with the types and shapes of these tensors."""
    first = tensors[0]
    if all(t.dtype is first.dtype and t.shape == first.shape for t in tensors):  # losses are alike
        return list(message.view(first.dtype).view(len(tensors), *first.shape).unbind())
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)  # copied, since a type must be aligned
        for part, tensor in zip(message.split(sizes), tensors, strict=True)
    ]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of placed tensors that live here, on the host."""
    parts = []
    for tensor in tensors:
        local = tensor._value.local  # type: ignore[attr-defined]
        parts.append(local.detach().contiguous().view(-1).view(torch.uint8))
    return torch.cat(parts).cpu()
