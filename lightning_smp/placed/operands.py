"""The operands of a call: its tensors in order, and a key that says what kind of call it is.

Two calls with equal keys give results of equal specs. Floats are left out of the key, since a
scale or a learning rate changes every step and never changes a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableMapping, Sequence
from numbers import Integral
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.tensor import PlacedTensor, Value

if TYPE_CHECKING:
    from lightning_smp.placed.run import MicrobatchRun

__all__ = ["Operands", "fits", "scan"]

_PLAIN = (int, str, bytes, type(None), torch.dtype, torch.Size, torch.layout,
          torch.memory_format, complex, type(Ellipsis))  # fmt: skip
_AS_THEY_ARE = frozenset(_PLAIN) - {str}


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

    def are(self, args: tuple[Any, ...]) -> bool:
        """Whether the arguments are exactly the tensors: none is nested or named."""
        return len(args) == len(self.tensors) and all(map(is_, args, self.tensors))

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


def scan(operands: Operands, obj: Any, count_masks: bool) -> Any:
    """Collects the tensors of an argument and returns its key."""
    kind = type(obj)
    if kind is tuple or kind is list:
        return (kind.__name__, *_scan_items(operands, obj, count_masks))
    if kind is dict:
        if not obj:
            return ()
        keys = _scan_items(operands, obj.values(), count_masks)
        return ("dict", *zip(map(str, obj), keys, strict=True))
    return _scan_items(operands, (obj,), count_masks)[0]


def _scan_items(operands: Operands, items: Iterable[Any], count_masks: bool) -> list[Any]:
    """The keys of several arguments; one loop, since every call of the step passes here."""
    run, tensors, values = operands.run, operands.tensors, operands.values
    mark = run.mark
    keys: list[Any] = []
    for obj in items:
        kind = type(obj)
        if kind is PlacedTensor:
            value = obj._value
            if value.mark is not mark:
                value = _inherited(operands, obj)
            tensors.append(obj)
            values.append(value)
            keys.append(value.key)
        elif kind in _AS_THEY_ARE:
            keys.append(obj)
        elif kind is bool:
            keys.append(("b", obj))
        elif kind is float:
            keys.append("f")
        elif (known := run.opaque.get(id(obj))) is not None:  # kept alive: no id is used twice
            operands.objects.append(obj)
            keys.append(known)
        elif isinstance(obj, torch.Tensor):
            keys.append(_scan_plain(operands, obj, count_masks))
        else:
            keys.append(_scan_nested(operands, obj, count_masks))
    return keys


def fits(run: MicrobatchRun, args: Iterable[Any], keys: Sequence[Any]) -> bool:
    """Whether arguments surely have these keys, found without collecting anything.

    False also where only `scan` can say: parameters, masks, objects that were not seen before.
    """
    mark = run.mark
    for obj, key in zip(args, keys, strict=True):
        kind = type(obj)
        if kind is PlacedTensor:
            value = obj._value
            if value.mark is not mark or value.key != key:
                return False
        elif obj is None or kind in _AS_THEY_ARE or kind is str:
            if obj is not key and obj != key:
                return False
        elif kind is torch.Tensor:
            if not _fits_plain(run, obj, key):
                return False
        elif not _fits_other(run, kind, obj, key):
            return False
    return True


def _fits_other(run: MicrobatchRun, kind: type, obj: Any, key: Any) -> bool:
    known = run.opaque.get(id(obj))
    if known is not None:
        return bool(known == key)
    if kind is bool:
        return bool(key == ("b", obj))
    if kind is float:
        return bool(key == "f")
    if isinstance(obj, torch.Tensor):
        return _fits_plain(run, obj, key)
    if type(key) is int:
        return isinstance(obj, Integral) and int(obj) == key
    if type(key) is not tuple or not key:
        return False
    if kind is tuple or kind is list:
        is_like = len(key) == len(obj) + 1 and key[0] == kind.__name__
        return is_like and fits(run, obj, key[1:])
    if kind is slice:
        return key[0] == "slice" and fits(run, (obj.start, obj.stop, obj.step), key[1:])
    if kind is torch.device:
        return bool(key == ("device", obj.type))
    return key[0] == "o" and not _has_parts(obj) and bool(_note_opaque(run, obj) == key)


def _fits_plain(run: MicrobatchRun, tensor: torch.Tensor, key: Any) -> bool:
    if type(key) is not tuple or len(key) != 4 or id(tensor) in run.context.table.held:
        return False
    with torch._C.DisableTorchFunction():
        if key[0] != "t" or tensor.shape != key[1] or tensor.dtype is not key[2]:
            return False
        if tensor.is_meta or tensor.requires_grad:
            return False  # rare: `scan` looks closer
        return key[3] is False


def _inherited(operands: Operands, tensor: PlacedTensor) -> Value:
    if tensor._value.is_adopted:
        return operands.run.inherit(tensor)
    raise UnsupportedError(
        f"{tensor!r} was kept from another microbatch or step and used in microbatch "
        f"{operands.run.index}. Values of the model end with their step: keep "
        "`x.detach().tolist()` or a metric instead, or use microbatches=1 within one step."
    )


def _scan_nested(operands: Operands, obj: Any, count_masks: bool) -> Any:
    kind = type(obj)
    if kind is tuple or kind is list or kind is dict:
        return scan(operands, obj, count_masks)
    if isinstance(obj, torch.device) or (kind is str and obj.startswith("cuda")):
        obj = torch.device(obj)
        return ("device", obj.type)  # every rank has a device of its own
    if isinstance(obj, _PLAIN):
        return obj
    if isinstance(obj, Integral):
        return int(obj)  # NumPy's: a size as good as Python's own
    if kind is slice:
        return ("slice", *_scan_items(operands, (obj.start, obj.stop, obj.step), count_masks))
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
    kind = type(obj)
    if isinstance(obj, MutableMapping):
        return _scan_dict(operands, obj, count_masks)
    if isinstance(obj, tuple):
        return (kind.__qualname__, *[scan(operands, item, count_masks) for item in obj])
    if _is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj)]
        parts = [getattr(obj, name, None) for name in names]
        return (kind.__qualname__, *[scan(operands, part, count_masks) for part in parts])
    operands.objects.append(obj)
    if _is_function(obj):
        return ("call", obj.__qualname__)
    return _note_opaque(operands.run, obj)


def _has_parts(obj: Any) -> bool:
    """Whether an object of none of Python's own types is known by more than its identity."""
    if isinstance(obj, (MutableMapping, dict, tuple, Integral, *_PLAIN)):
        return True
    return _is_dataclass(obj) or _is_function(obj)


def _is_dataclass(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) and not isinstance(obj, type)


def _is_function(obj: Any) -> bool:
    return callable(obj) and hasattr(obj, "__qualname__")


def _note_opaque(run: MicrobatchRun, obj: Any) -> tuple[Any, ...]:
    """The key of an object that was not met before: its ordinal among such."""
    key = run.opaque[id(obj)] = ("o", type(obj).__qualname__, len(run.opaque_objects))
    run.opaque_objects.append(obj)  # keeps the id from being used again
    return key
