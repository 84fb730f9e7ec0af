"""The operands of a call: its tensors in order, and a key that says what kind of call it is.

Two calls with equal keys give results of equal specs. Floats are left out of the key, since a
scale or a learning rate changes every step and never changes a shape.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.tensor import PlacedTensor, Value

if TYPE_CHECKING:
    from lightning_smp.placed.run import MicrobatchRun

__all__ = ["Operands", "scan"]

_PLAIN = (int, str, bytes, type(None), torch.dtype, torch.Size, torch.layout,
          torch.memory_format, complex, type(Ellipsis))  # fmt: skip


class Operands:
    """The tensors among a call's arguments, as the user's code sees them.

    Attributes:
        tensors: the tensor objects in order of appearance.
        values: for each its value, or None if every rank has the plain tensor.
        objects: arguments that are neither data nor tensors (a cache, a config).
        versions: in-place counters of this rank's tensors before the call.
    """

    __slots__ = ("_locals", "objects", "run", "tensors", "values", "versions")

    def __init__(self, run: MicrobatchRun) -> None:
        self.run = run
        self.tensors: list[torch.Tensor] = []
        self.values: list[Value | None] = []
        self.objects: list[Any] = []
        self.versions: list[int] = []
        self._locals: list[torch.Tensor] | None = None

    def value(self, ordinal: int) -> Value:
        """The value of an operand that is placed."""
        value = self.values[ordinal]
        assert value is not None
        return value

    def localize(self) -> list[torch.Tensor]:
        """This rank's real tensors, in operand order; all transfers must have happened."""
        found: list[torch.Tensor] = []
        for tensor, value in zip(self.tensors, self.values, strict=True):
            if value is None:
                found.append(tensor)
                continue
            local = value.local
            assert local is not None, f"value {value.index} is not on rank {self.run.rank}"
            found.append(local)
        self._locals = found
        return found

    def local_of(self, ordinal: int) -> torch.Tensor | None:
        """This rank's real tensor of one operand, if the call ran here."""
        return None if self._locals is None else self._locals[ordinal]

    def changed(self) -> list[int]:
        """Operands whose tensors this rank's call has changed in place."""
        assert self._locals is not None
        return [
            ordinal
            for ordinal, (tensor, version) in enumerate(
                zip(self._locals, self.versions, strict=True)
            )
            if tensor._version != version
        ]

    def join(self, value: Value, ordinal: int) -> None:
        """``value`` shares storage with an operand."""
        other = self.values[ordinal]
        if other is None:
            value.group.size = 2
            value.group.of_plain = True
        else:
            self.share(value, other)

    def share(self, value: Value, other: Value) -> None:
        """``value`` shares storage with another value."""
        group = other.group
        if not group.members:
            group.members[other.index] = other
        group.members[value.index] = value
        group.size += 1
        value.group = group


def scan(operands: Operands, obj: Any, count_masks: bool) -> Any:
    """Collects the tensors of an argument and returns its key."""
    kind = type(obj)
    if kind is PlacedTensor:
        value = obj._value
        if value.run is not operands.run and value.is_adopted:
            value = operands.run.inherit(obj)
        if value.run is not operands.run:
            raise UnsupportedError(
                f"{obj!r} was kept from another microbatch or step and used in microbatch "
                f"{operands.run.index}. Values of the model end with their step: keep "
                "`x.detach().tolist()` or a metric instead, or use microbatches=1 within one step."
            )
        operands.tensors.append(obj)
        operands.values.append(value)
        return ("v", value.index)
    if kind is bool:
        return ("b", obj)
    if kind is float:
        return "f"
    if isinstance(obj, torch.Tensor):
        return _scan_plain(operands, obj, count_masks)
    if kind is tuple or kind is list:
        return (kind.__name__, *[scan(operands, item, count_masks) for item in obj])
    if isinstance(obj, torch.device) or (kind is str and obj.startswith("cuda")):
        obj = torch.device(obj)
        return ("device", obj.type)  # every rank has a device of its own
    if isinstance(obj, _PLAIN):
        return obj
    if kind is slice:
        parts = (obj.start, obj.stop, obj.step)
        return ("slice", *[scan(operands, item, count_masks) for item in parts])
    if isinstance(obj, dict):
        return _scan_dict(operands, obj, count_masks)
    return _scan_other(operands, obj, count_masks)


def _scan_plain(operands: Operands, tensor: torch.Tensor, count_masks: bool) -> Any:
    run = operands.run
    held = run.context.table.lookup(tensor)
    operands.tensors.append(tensor)
    if held is not None:
        name, stages = held
        value = run.held_value(tensor, name, stages)
        operands.values.append(value)
        return ("p", name, tensor.requires_grad)
    operands.values.append(None)
    run.context.check_plain(tensor, run)
    key: tuple[Any, ...] = ("t", tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    if count_masks and not tensor.is_floating_point():
        key += (int(tensor.sum()),)  # the number of chosen elements decides the result's shape
    return key


def _scan_dict(operands: Operands, obj: MutableMapping[Any, Any], count_masks: bool) -> Any:
    if not obj:
        return ()
    return (
        type(obj).__qualname__,
        *[(str(key), scan(operands, item, count_masks)) for key, item in obj.items()],
    )


def _scan_other(operands: Operands, obj: Any, count_masks: bool) -> Any:
    import dataclasses

    kind = type(obj)
    if isinstance(obj, MutableMapping):
        return _scan_dict(operands, obj, count_masks)
    if isinstance(obj, tuple):
        return (kind.__qualname__, *[scan(operands, item, count_masks) for item in obj])
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        names = [field.name for field in dataclasses.fields(obj)]
        parts = [getattr(obj, name, None) for name in names]
        return (kind.__qualname__, *[scan(operands, part, count_masks) for part in parts])
    run = operands.run
    operands.objects.append(obj)
    if callable(obj) and hasattr(obj, "__qualname__"):
        return ("call", obj.__qualname__)
    ordinal = run.opaque.get(id(obj))
    if ordinal is None:
        ordinal = run.opaque[id(obj)] = len(run.opaque_objects)
        run.opaque_objects.append(obj)  # keeps the id from being used again
    return ("o", kind.__qualname__, ordinal)
