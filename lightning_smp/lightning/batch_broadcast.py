"""Send a nested batch from one rank to others: its structure as plain data, its tensors natively.

No class travels, only names: a follower rebuilds a container with the class found in its own
batch, or with the one of that name among the modules it has imported already; failing both, it
gets a plain list, tuple or dict.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smp.batch_tree import Child, children_of, is_array, is_named_tuple, rebuild
from lightning_smp.errors import CommunicationError, UnsupportedError
from lightning_smp.wire import broadcast_object
from lightning_smp.wire.encode import dumps

__all__ = ["broadcast_batch"]

# A node is one of these and its fields:
_LEAF: Final = "leaf"  # value
_TENSOR: Final = "tensor"  # dtype, shape, on_cpu, requires_grad, memory format
_NODE: Final = "node"  # kind, class name, [(label, key, is_attribute, node), ...]
_REFUSED: Final = "refused"  # message: the leader cannot send this batch

_FORMATS: Final = {
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def broadcast_batch(
    batch: Any,
    src: int,
    control_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
    device: torch.device,
) -> Any:
    """Returns the batch of global rank `src` on every rank of a replica.

    Collective over `control_group` (gloo: structure) and `tensor_group` (the same ranks; one
    broadcast per tensor, in the order of the batch): all their ranks call. Blocks until all is
    there.

    `src` gets its own object back. On the others a tensor is on the CPU where it is so on `src`,
    else on `device`; values, dtypes, shapes, `requires_grad` and channels-last formats are those
    of `src`. Plain values are sent as they are.

    Args:
        batch: on `src` what is sent; elsewhere the rank's own batch or None, used only to find
            the classes of containers.
        src: global rank of the leader.
        control_group: gloo group.
        tensor_group: group that carries tensors on `device`.
        device: this rank's device.

    Raises:
        UnsupportedError: on all ranks, for a batch with something that cannot be sent (a sparse
            tensor, an unknown object), named with its place.
        CommunicationError: a message is malformed.
    """
    if dist.get_rank() == src:
        return _lead(batch, src, control_group, tensor_group, device)
    node = broadcast_object(None, src, control_group)
    _raise_refused(node)
    tensors = [_receive_tensor(spec, src, tensor_group, device) for spec in _tensor_specs(node)]
    return _Builder(tensors).build(node, batch)


def _lead(
    batch: Any,
    src: int,
    control_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
    device: torch.device,
) -> Any:
    encoder = _Encoder()
    try:
        node = encoder.encode(batch, "batch")
    except UnsupportedError as error:
        node = (_REFUSED, str(error))  # the others wait: they must hear of it
    broadcast_object(node, src, control_group)
    _raise_refused(node)
    for tensor in encoder.tensors:
        if tensor.numel():
            dist.broadcast(_flat_bytes(tensor.to(device)), src, tensor_group)
    return batch


def _raise_refused(node: Any) -> None:
    if not isinstance(node, tuple) or not node:
        raise CommunicationError(f"Expected the structure of a batch, met {type(node).__name__}.")
    if node[0] == _REFUSED:
        raise UnsupportedError(str(node[1]))


@dataclass(slots=True)
class _Encoder:
    """Turns a batch into nodes, and collects its tensors in order."""

    tensors: list[Tensor] = field(default_factory=list)

    def encode(self, value: Any, path: str) -> tuple[Any, ...]:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        children = None if is_array(value) else children_of(value)
        if children is None:
            return _leaf(value, path)
        items = [
            (c.label, _sendable_key(c, path), c.is_attribute, self.encode(c.value, path + c.label))
            for c in children
        ]
        return (_NODE, _kind(value), _class_name(type(value)), items)

    def _tensor(self, value: Tensor, path: str) -> tuple[Any, ...]:
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            raise UnsupportedError(
                f"{path} is a tensor that cannot be broadcast ({value.layout}, nested: "
                f"{value.is_nested}, quantized: {value.is_quantized}). Return a dense tensor, or "
                "let every rank load its own batch."
            )
        self.tensors.append(value.detach())
        on_cpu = value.device.type == "cpu"
        shape = tuple(value.shape)
        return (_TENSOR, value.dtype, shape, on_cpu, value.requires_grad, _memory_format(value))


@dataclass(slots=True)
class _Builder:
    """Turns nodes back into a batch."""

    tensors: list[Tensor]
    position: int = 0

    def build(self, node: Any, template: Any) -> Any:
        if node[0] == _LEAF:
            return node[1]
        if node[0] == _TENSOR:
            self.position += 1
            return self.tensors[self.position - 1]
        _, kind, name, items = node
        known = children_of(template) if _class_name(type(template)) == name else None
        template_of = {child.label: child.value for child in known or ()}
        children = [Child(label, key, attribute, None) for label, key, attribute, _ in items]
        values = [self.build(item[3], template_of.get(item[0])) for item in items]
        if known is not None and [c.label for c in known] == [c.label for c in children]:
            return rebuild(template, children, values)
        return _construct(kind, _find_class(name), children, values)


def _leaf(value: Any, path: str) -> tuple[Any, ...]:
    try:
        dumps(value)
    except TypeError as error:
        raise UnsupportedError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            f"sent to another rank ({error}). Return tensors, numbers, strings and containers of "
            "them, or let every rank load its own batch."
        ) from error
    return (_LEAF, value)


def _sendable_key(child: Child, path: str) -> Any:
    return _leaf(child.key, f"{path}{child.label} (the key)")[1]


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "dict"
    if dataclasses.is_dataclass(value):
        return "dataclass"
    if is_named_tuple(value):
        return "namedtuple"
    return next(kind.__name__ for kind in (list, tuple, set, frozenset) if isinstance(value, kind))


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find_class(name: str) -> type | None:
    """Returns the class of that name if its module is imported; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    return found if isinstance(found, type) else None


def _construct(kind: str, cls: type | None, children: list[Child], values: list[Any]) -> Any:
    """Makes a container without an example of it, of class `cls` where that can be done."""
    pairs = list(zip(children, values, strict=True))
    if kind == "dict":
        return _construct_mapping(cls, pairs)
    if kind == "dataclass":
        return _construct_dataclass(cls, pairs)
    if kind == "namedtuple":
        return cls(*values) if cls is not None and issubclass(cls, tuple) else tuple(values)
    items = [value for child, value in pairs if not child.is_attribute]
    plain = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    new: Any = cls(items) if cls is not None and issubclass(cls, plain) else plain(items)
    return _with_attributes(new, pairs)


def _construct_mapping(cls: type | None, pairs: Sequence[tuple[Child, Any]]) -> Any:
    data = {child.key: value for child, value in pairs if not child.is_attribute}
    if cls is None or cls is dict or not issubclass(cls, Mapping):
        return data
    if issubclass(cls, defaultdict):
        return cls(None, data)
    make: Any = cls
    # The items of a mapping that is a dataclass too, such as ModelOutput, are its fields.
    new = make(**data) if dataclasses.is_dataclass(cls) else make(data)
    return _with_attributes(new, pairs)


def _construct_dataclass(cls: type | None, pairs: Sequence[tuple[Child, Any]]) -> Any:
    if cls is None or not hasattr(cls, "__dataclass_fields__"):
        return {child.key: value for child, value in pairs}
    return _with_attributes(object.__new__(cls), pairs)


def _with_attributes(new: Any, pairs: Sequence[tuple[Child, Any]]) -> Any:
    if hasattr(new, "__dict__") or dataclasses.is_dataclass(new):
        for child, value in pairs:
            if child.is_attribute:
                object.__setattr__(new, child.key, value)
    return new


def _tensor_specs(node: Any) -> list[tuple[Any, ...]]:
    if node[0] == _TENSOR:
        return [node]
    if node[0] == _NODE:
        return [spec for item in node[3] for spec in _tensor_specs(item[3])]
    return []


def _receive_tensor(
    spec: tuple[Any, ...], src: int, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    _, dtype, shape, on_cpu, requires_grad, memory_format = spec
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.numel():
        dist.broadcast(_flat_bytes(tensor), src, group)
    if on_cpu:
        tensor = tensor.cpu()
    if memory_format is not None:
        tensor = tensor.contiguous(memory_format=_FORMATS[memory_format])
    return tensor.requires_grad_(requires_grad)


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's content as bytes: not every backend knows every dtype.

    A view where the tensor is contiguous, as a receiver's is.
    """
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(-1).view(torch.uint8)


def _memory_format(tensor: Tensor) -> str | None:
    if tensor.is_contiguous():
        return None
    return next(
        (
            name
            for name, memory_format in _FORMATS.items()
            if tensor.ndim == (4 if name == "channels_last" else 5)
            and tensor.is_contiguous(memory_format=memory_format)
        ),
        None,
    )
