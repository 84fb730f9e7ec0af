"""Walk and rebuild the nested containers that make up a batch; no arithmetic, no communication.

A node is either a leaf (a tensor, a string, any object that is no container) or a container whose
children are known by label. Containers are lists, tuples, named tuples, sets, mappings (also
subclasses such as `BatchEncoding` and `ModelOutput`) and dataclasses. What a subclass keeps in
attributes of its own is a child too: otherwise a mask stored as `batch.mask` would not be split.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_smp.errors import ConfigError

__all__ = [
    "Child",
    "children_of",
    "holds_arrays",
    "is_array",
    "is_named_tuple",
    "is_plain_sequence",
    "object_attributes",
    "rebuild",
]

_OBJECT_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Child:
    """One member of a container: where it is, and what it is.

    Attributes:
        label: how Python reaches it from its container: `[0]`, `['x']` or `.x`.
        key: the index, mapping key or attribute name.
        is_attribute: it is an attribute of the container, not an item.
        value: the member.
    """

    label: str
    key: Any
    is_attribute: bool
    value: Any


def is_array(value: object) -> bool:
    """Whether `value` is a tensor or a NumPy array."""
    if isinstance(value, Tensor):
        return True
    numpy = sys.modules.get("numpy")  # an array exists only where numpy was imported
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_named_tuple(value: object) -> bool:
    """Whether `value` is an instance of a `collections.namedtuple` or `typing.NamedTuple`."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def is_plain_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a list or tuple whose members are of one kind, so that it may be sliced.

    The fields of a named tuple (`torch.return_types` included) and of a `torch.Size` are not.
    """
    return (
        isinstance(value, (list, tuple))
        and not isinstance(value, torch.Size)
        and not is_named_tuple(value)
        and not hasattr(type(value), "n_sequence_fields")
    )


def children_of(value: Any) -> list[Child] | None:
    """Returns the members of a container in its own order, or None for a leaf."""
    if is_array(value) or isinstance(value, (str, bytes, torch.Size, type, nn.Module)):
        return None
    if isinstance(value, Mapping):
        return _items_of_mapping(value)
    if dataclasses.is_dataclass(value):
        return _attributes(value, _field_names(value))
    if is_named_tuple(value):
        return [Child(f".{name}", name, True, getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        items = [Child(f"[{i}]", i, False, item) for i, item in enumerate(value)]
        return items + (_extra_attributes(value, ()) if isinstance(value, list) else [])
    if isinstance(value, (set, frozenset)):
        return [Child(f"{{{i}}}", i, False, item) for i, item in enumerate(value)]
    return None


def rebuild(value: Any, children: Sequence[Child], items: Sequence[Any]) -> Any:
    """Returns a container like `value` with `items` in the place of its `children`.

    The type is kept, and so are attributes that are no children; `value` is not changed.

    Raises:
        ConfigError: a mapping class offers no way to make another one.
    """
    pairs = [(child.key, item) for child, item in zip(children, items, strict=True)]
    attributes = [pair for child, pair in zip(children, pairs, strict=True) if child.is_attribute]
    members = [pair for child, pair in zip(children, pairs, strict=True) if not child.is_attribute]
    if isinstance(value, Mapping):
        new = _rebuild_mapping(value, members)
    elif dataclasses.is_dataclass(value):
        new = copy.copy(value)
    elif is_named_tuple(value):
        return type(value)(*items)
    elif isinstance(value, list):
        new = copy.copy(value)
        new[:] = [item for _, item in members]
    else:
        assert isinstance(value, (tuple, set, frozenset)), type(value)
        return type(value)(items)
    for name, item in attributes:
        object.__setattr__(new, name, item)  # also on frozen dataclasses
    return new


def holds_arrays(value: object) -> bool:
    """Whether a tensor or NumPy array is found in `value`, through containers and plain objects.

    Modules, optimizers, gradient scalers, classes and functions do not count: they are not data.
    """
    return _holds_arrays(value, _OBJECT_DEPTH)


def object_attributes(value: object) -> dict[str, Any]:
    """Returns the attributes of a plain object that may be part of a batch; {} for all others."""
    if callable(value) or isinstance(value, _not_data()):
        return {}
    return dict(getattr(value, "__dict__", {}))


def _not_data() -> tuple[type, ...]:
    return (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, type)


def _holds_arrays(value: object, depth: int) -> bool:
    if is_array(value) or hasattr(type(value), "smp_slice"):
        return True
    children = children_of(value)
    if children is not None:
        return any(_holds_arrays(child.value, depth) for child in children)
    if depth == 0:
        return False
    return any(_holds_arrays(item, depth - 1) for item in object_attributes(value).values())


def _items_of_mapping(value: Mapping[Any, Any]) -> list[Child]:
    items = [Child(f"[{key!r}]", key, False, item) for key, item in value.items()]
    if type(value) is dict:
        return items
    return items + _extra_attributes(value, items)


def _extra_attributes(value: Any, items: Sequence[Child]) -> list[Child]:
    """What an instance of a container subclass keeps beside its items."""
    own = getattr(value, "__dict__", None)
    if not own or own is value:
        return []
    hidden = {"data"} if isinstance(value, UserDict) else set()
    hidden |= {child.key for child in items if isinstance(child.key, str)}
    if isinstance(value, Mapping) and not isinstance(value, (dict, UserDict)):
        return []  # its attributes are how it stores the items
    return _attributes(value, [name for name in own if name not in hidden])


def _attributes(value: Any, names: Sequence[str]) -> list[Child]:
    return [
        Child(f".{name}", name, True, getattr(value, name))
        for name in names
        if hasattr(value, name)
    ]


def _field_names(value: Any) -> list[str]:
    names = [field.name for field in dataclasses.fields(value)]
    return names + [name for name in getattr(value, "__dict__", ()) if name not in names]


def _rebuild_mapping(value: Mapping[Any, Any], members: Sequence[tuple[Any, Any]]) -> Any:
    if type(value) is dict:
        return dict(members)
    if not isinstance(value, (dict, UserDict)):
        return _construct_mapping(value, members)
    new: Any = copy.copy(value)
    own = getattr(value, "__dict__", {})
    if own is value:  # the `self.__dict__ = self` idiom: a copy would keep the old attributes
        object.__setattr__(new, "__dict__", new)
    for key, item in members:
        old = value[key]
        new[key] = item
        if own is not value and isinstance(key, str) and own.get(key) is old:
            new.__dict__[key] = item  # an attribute that mirrors the item
    return new


def _construct_mapping(value: Mapping[Any, Any], members: Sequence[tuple[Any, Any]]) -> Any:
    try:
        return type(value)(dict(members))  # type: ignore[call-arg]
    except TypeError as error:
        raise ConfigError(
            f"Asked to split a batch that contains a {type(value).__name__}, a mapping that cannot "
            f"be made from a dict ({error}). Give the class an "
            "`smp_slice(num_mb, mb, axis)` method, return a dict, or set microbatches=1."
        ) from error
