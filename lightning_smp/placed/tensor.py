"""Placed tensors: real on their home rank, a shape, dtype and device on the others."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_smp.errors import UnsupportedError
from lightning_smp.program import EVERYWHERE, SegmentNode, TensorSpec

__all__ = [
    "AS_NEW",
    "SPOILT",
    "USED",
    "AliasGroup",
    "PlacedTensor",
    "Value",
    "adopt",
    "release",
    "spec_of",
]


AS_NEW, USED, SPOILT = 0, 1, 2
"""How a value may be used again (`Value.wear`)."""


class AliasGroup:
    """The values that share one storage.

    Attributes:
        version: counts in-place changes to any of them.
        changed: ordinal of the call that made the last change, -1 if there was none.
        members: ordinal of a value -> the value, while the step holds it; None for one value.
        size: how many values have ever shared it.
        of_plain: whether the storage is that of a tensor which all ranks hold.
    """

    __slots__ = ("changed", "members", "of_plain", "size", "version")

    def __init__(self) -> None:
        self.version = 0
        self.changed = -1
        self.members: dict[int, weakref.ref[Value]] | None = None
        self.size = 1
        self.of_plain = False


class Value:
    """What this rank knows of one placed value.

    Attributes:
        mark: of the microbatch that it belongs to (`RunState.mark`).
        index: ordinal in the microbatch, equal on all ranks.
        key: what stands for it in the keys of calls.
        home: rank that holds it for real, or ``EVERYWHERE``.
        group: the values it shares storage with.
        holders: rank -> version of the copy that this rank has got.
        node: segment in which the home made the present version.
        produced: ordinal of the call that made the present version, -1 for a parameter.
        segments: rank -> the segment that its tensor belongs to.
        stages: for a parameter or buffer, the stages where it is real.
        is_adopted: whether it belongs to a tensor object that was plain before.
        local: this rank's tensor, if it has one.
        wear: whether another microbatch may have this value: ``AS_NEW``; ``USED``, after
            `renew`; never (``SPOILT``), since the tensor object itself has changed.
    """

    __slots__ = (
        "__weakref__", "group", "holders", "home", "index", "is_adopted", "key", "local", "mark",
        "name", "node", "produced", "segments", "stages", "wear",
    )  # fmt: skip

    def __init__(self, mark: object, index: int, home: int, node: SegmentNode) -> None:
        self.mark = mark
        self.index = index
        self.key = ("v", index)
        self.home = home
        self.node = node
        self.produced = -1
        self.group = AliasGroup()
        self.holders: dict[int, int] = {}
        self.stages: tuple[int, ...] = ()
        self.name = ""
        self.is_adopted = False
        self.segments: dict[int, int] = {node[0]: node[1]}
        self.local: torch.Tensor | None = None
        self.wear = AS_NEW

    def renew(self, home: int, node: SegmentNode, produced: int) -> None:
        """Forgets what a microbatch has done with the value."""
        self.home, self.node, self.produced = home, node, produced
        if self.wear:  # else there is nothing to forget
            self.group = AliasGroup()
            self.holders.clear()
        self.segments = {node[0]: node[1]}
        self.local = None
        self.wear = AS_NEW

    def note_copy(self, rank: int, segment: int) -> None:
        """The rank gets the present version, into this segment."""
        self.holders[rank] = self.group.version
        self.segments[rank] = segment
        self.wear |= USED

    def join(self, other: Value | None) -> None:
        """This value shares storage with another; None if that is a tensor that all ranks hold."""
        self.wear |= USED
        if other is None:
            self.group.size = 2
            self.group.of_plain = True
            return
        other.wear |= USED
        group = other.group
        if group.members is None:
            group.members = {other.index: weakref.ref(other)}
        group.members[self.index] = weakref.ref(self)
        group.size += 1
        self.group = group

    @property
    def ready(self) -> int:
        """Ordinal of the call after which the present version can be sent, -1 from the start."""
        return max(self.produced, self.group.changed)

    def is_current_on(self, rank: int) -> bool:
        """Whether the rank holds the present version."""
        if self.home in (rank, EVERYWHERE) or rank in self.stages:
            return True
        return self.holders.get(rank) == self.group.version


class _Lasting:
    """An attribute that never changes: torch is asked once, then it is one of the object's own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ask = getattr(torch.Tensor, name).__get__

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Any:
        if tensor is None:
            return getattr(torch.Tensor, self._name)
        with torch._C.DisableTorchFunction():
            answer = tensor.__dict__[self._name] = self._ask(tensor)
        return answer


class PlacedTensor(torch.Tensor):
    """A tensor of the step that depends on the model's units.

    It has the shape, dtype, device and requires_grad of the real tensor on every rank, and no
    storage; the real one is ``_value.local`` on the ranks that have it. Operations on it are
    handled by the outer mode of the running microbatch.
    """

    _value: Value

    shape = _Lasting("shape")
    dtype = _Lasting("dtype")
    device = _Lasting("device")

    @staticmethod
    def __new__(cls, spec: TensorSpec, device: torch.device, value: Value) -> PlacedTensor:
        """A tensor without storage that answers as the real one would."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, spec.stride, dtype=spec.dtype, device=device,
            requires_grad=spec.requires_grad,
        )  # fmt: skip
        tensor.__dict__["_value"] = value
        return tensor

    def __init__(self, spec: TensorSpec, device: torch.device, value: Value) -> None:
        pass

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """As torch's, without asking torch."""
        return self.shape if dim is None else self.shape[dim]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from lightning_smp.placed.outer import answer_outside

        return answer_outside(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UnsupportedError(
            f"{func} was called on a placed tensor below Python's torch functions, where the "
            "strategy cannot move it to the rank that holds it. Call it through torch's Python "
            "functions, or move this code into a submodule, which runs on one rank."
        )

    def __setattr__(self, name: str, held: Any) -> None:
        if "_value" in self.__dict__:
            self._value.wear = SPOILT
        super().__setattr__(name, held)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        value = self._value
        home = "every rank" if value.home == EVERYWHERE else f"stage {value.home}"
        with torch._C.DisableTorchFunctionSubclass():
            return f"PlacedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, on {home})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            "copy.deepcopy of a tensor that lives on one pipeline stage: use .clone() instead."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{self!r} cannot be pickled: it is real on one rank only. "
            "Save it after the step, or call .tolist() or .item() on it first."
        )


def spec_of(tensor: torch.Tensor, run_device: torch.device) -> TensorSpec:
    """The spec of a real tensor."""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} crosses the code between "
            "units. Only strided tensors can; call .to_dense(), or keep it inside one submodule."
        )
    return TensorSpec(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device.type == run_device.type,
        tensor.requires_grad,
    )


def adopt(tensor: torch.Tensor, value: Value) -> None:
    """Turns a plain tensor object into a placed one, keeping its identity."""
    tensor.__class__ = PlacedTensor  # type: ignore[assignment]
    tensor.__dict__["_value"] = value


def release(tensor: torch.Tensor, numbers: torch.Tensor) -> None:
    """Turns an adopted tensor object back into a plain one with these numbers."""
    for name in ("_value", "shape", "dtype", "device"):
        tensor.__dict__.pop(name, None)
    tensor.__class__ = torch.Tensor
    tensor.data = numbers.to(tensor.device)
