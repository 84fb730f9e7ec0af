"""A bucket of gradients as torch's communication hooks see one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

__all__ = ["CommHook", "HookBucket"]


class HookBucket:
    """Has the methods of `torch.distributed.GradBucket`, which Python cannot make.

    Args:
        number: its place among this rank's buckets.
        flat: all gradients of the bucket, one after the other.
        parameters: whose gradients they are.
        is_last: whether no further bucket follows in this reduction.
    """

    def __init__(
        self, number: int, flat: Tensor, parameters: list[nn.Parameter], *, is_last: bool
    ) -> None:
        self._number = number
        self._flat = flat
        self._parameters = parameters
        self._is_last = is_last

    def index(self) -> int:
        """Place among this rank's buckets."""
        return self._number

    def buffer(self) -> Tensor:
        """All gradients in one flat tensor, [elements]."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Views of the flat tensor, in the shapes of the parameters."""
        parts = self._flat.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no further bucket follows."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces the flat tensor for what runs after this call, such as a wrapped hook."""
        self._flat = buffer


CommHook: TypeAlias = Callable[[HookBucket], Any]
"""Returns a future of the reduced flat tensor."""
