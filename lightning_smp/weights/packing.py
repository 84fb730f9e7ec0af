"""Plain data with tensors in it, as a template that can be sent and the tensors beside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smp.errors import UnsupportedError

__all__ = ["Shape", "is_plain", "pack", "shapes", "unpack"]

_INLINE = 16
"""Elements up to which a tensor on the host travels in the template, as Adam's step counts do."""

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)
_DICTS = (dict, OrderedDict)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a tensor is like.

    Attributes:
        shape: its sizes.
        stride: how it lies in memory.
        dtype: its type.
        on_host: whether it is in host memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool

    def to_plain(self) -> list[Any]:
        """As plain data, for another rank."""
        return [self.shape, self.stride, self.dtype, self.on_host]


def is_plain(value: Any) -> bool:
    """Whether `pack` takes a value."""
    if isinstance(value, Tensor):
        return _is_plain_tensor(value)
    kind = type(value)
    if kind in (list, tuple):
        return all(is_plain(item) for item in value)
    if kind in _DICTS:
        return all(is_plain(part) for item in value.items() for part in item)
    return kind in _CONSTANTS


def pack(value: Any, tensors: list[Tensor], what: str) -> list[Any]:
    """Returns the template of a value.

    Args:
        value: constants and dense tensors in lists, tuples and dicts.
        tensors: gets the tensors that travel beside the template.
        what: names the value in an error.

    Raises:
        UnsupportedError: something else is in it.
    """
    if isinstance(value, Tensor):
        if not _is_plain_tensor(value):
            raise UnsupportedError(
                f"{what} holds a {type(value).__name__} with layout {value.layout}, which cannot "
                "move to another stage. Use rebalance_after_steps=0."
            )
        value = value.detach()
        if value.device.type == "cpu" and value.numel() <= _INLINE:
            return ["c", value.contiguous()]
        tensors.append(value)
        shape = Shape(
            tuple(value.shape), value.stride(), value.dtype, value.device.type == "cpu"
        )  # fmt: skip
        return ["t", len(tensors) - 1, *shape.to_plain()]
    kind = type(value)
    if kind in (list, tuple):
        return ["l" if kind is list else "u", [pack(item, tensors, what) for item in value]]
    if kind in _DICTS:
        items = [[key, pack(item, tensors, f"{what}[{key!r}]")] for key, item in value.items()]
        return ["d", items, kind is OrderedDict]
    if kind in _CONSTANTS:
        return ["c", value]
    raise UnsupportedError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, which cannot move to another stage: "
        "only tensors, numbers, texts, lists, tuples and dicts can. Use rebalance_after_steps=0."
    )


def shapes(template: Sequence[Any]) -> list[Shape]:
    """What the tensors beside a template are like, in their order."""
    tag = template[0]
    if tag == "t":
        return [Shape(*template[2:])]
    if tag in ("l", "u"):
        return [shape for item in template[1] for shape in shapes(item)]
    if tag == "d":
        return [shape for _, item in template[1] for shape in shapes(item)]
    return []


def unpack(template: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """The value that a template describes.

    Args:
        template: from `pack`.
        tensors: the tensors beside it.
    """
    tag = template[0]
    if tag == "t":
        return tensors[template[1]]
    if tag == "c":
        return template[1]
    if tag == "d":
        kind = OrderedDict if template[2] else dict
        return kind((key, unpack(item, tensors)) for key, item in template[1])
    items = [unpack(item, tensors) for item in template[1]]
    return items if tag == "l" else tuple(items)


def _is_plain_tensor(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )
