"""Results as data: the structure of what a call returned, with its tensors taken out.

A template holds only lists, strings and numbers, so that the home can publish it without pickle;
a class is named by module and qualified name and must already be loaded on the receiving rank.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from lightning_smp.errors import UnsupportedError

__all__ = ["build", "iter_tensors", "map_tensors", "take_apart"]

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def take_apart(
    result: Any, leaf: Callable[[torch.Tensor], int], operands: Mapping[int, int], origin: str
) -> Any:
    """The template of a result.

    Args:
        result: what the call returned.
        leaf: called with each tensor; returns the index that stands for it.
        operands: id -> index of the non-tensor objects among the call's arguments, which may
            come back (a cache that the unit filled).
        origin: names the call in an error.
    """
    if isinstance(result, torch.Tensor):
        return ["t", leaf(result)]
    if isinstance(result, torch.Size):
        return ["S", list(result)]
    if isinstance(result, _CONSTANTS):
        return ["c", result]

    def inner(item: Any) -> Any:
        return take_apart(item, leaf, operands, origin)

    kind = type(result)
    if kind is list:
        return ["l", [inner(item) for item in result]]
    if kind is tuple:
        return ["u", [inner(item) for item in result]]
    if kind in (dict, OrderedDict):
        return ["d", [[key, inner(item)] for key, item in result.items()]]
    if isinstance(result, tuple) and hasattr(kind, "_fields"):
        return ["n", _class_name(kind), [inner(item) for item in result]]
    if isinstance(result, tuple):  # torch.return_types.topk and the like
        return ["r", _class_name(kind), [inner(item) for item in result]]
    if dataclasses.is_dataclass(result) and not isinstance(result, Mapping):
        fields = [f.name for f in dataclasses.fields(result)]
        return ["D", _class_name(kind), [[f, inner(getattr(result, f))] for f in fields]]
    if isinstance(result, dict):
        return ["m", _class_name(kind), [[key, inner(item)] for key, item in result.items()]]
    if id(result) in operands:
        return ["o", operands[id(result)]]
    raise UnsupportedError(
        f"{origin} returned a {kind.__module__}.{kind.__qualname__}, which the other stages cannot "
        "rebuild. Return tensors in tuples, lists, dicts, named tuples or dataclasses."
    )


def build(template: Any, leaves: list[Any], operands: list[Any]) -> Any:
    """The result that a template describes, with ``leaves`` in the place of its tensors."""
    tag = template[0]
    if tag == "t":
        return leaves[template[1]]
    if tag == "c":
        return template[1]
    if tag == "S":
        return torch.Size(template[1])
    if tag == "o":
        return operands[template[1]]
    if tag == "l":
        return [build(item, leaves, operands) for item in template[1]]
    if tag == "u":
        return tuple(build(item, leaves, operands) for item in template[1])
    if tag == "d":
        return {key: build(item, leaves, operands) for key, item in template[1]}
    kind = _find_class(template[1])
    if tag == "n":
        return kind(*(build(item, leaves, operands) for item in template[2]))
    if tag == "r":
        return kind([build(item, leaves, operands) for item in template[2]])
    pairs = [(key, build(item, leaves, operands)) for key, item in template[2]]
    if tag == "D":
        result = object.__new__(kind)
        for key, item in pairs:
            object.__setattr__(result, key, item)
        return result
    if dataclasses.is_dataclass(kind):  # Hugging Face's ModelOutput: a dict and a dataclass
        return kind(**dict(pairs))
    result = kind()
    for key, item in pairs:
        result[key] = item
    return result


def map_tensors(obj: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with every tensor replaced; objects of other types stay as they are."""
    if isinstance(obj, torch.Tensor):
        return change(obj)
    kind = type(obj)
    if kind is tuple or kind is list:
        return kind(map_tensors(item, change) for item in obj)
    if kind is dict:
        return {key: map_tensors(item, change) for key, item in obj.items()}
    if kind is slice:
        return slice(*(map_tensors(item, change) for item in (obj.start, obj.stop, obj.step)))
    if isinstance(obj, tuple):
        items = [map_tensors(item, change) for item in obj]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(obj, dict):
        return _map_dict(obj, change)
    if isinstance(obj, MutableMapping):  # Hugging Face's BatchEncoding
        mapped = copy.copy(obj)
        mapped.update({key: map_tensors(item, change) for key, item in obj.items()})
        return mapped
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        if not any(True for _ in iter_tensors(obj)):
            return obj
        result = object.__new__(kind)
        for field in dataclasses.fields(obj):
            value = map_tensors(getattr(obj, field.name), change)
            object.__setattr__(result, field.name, value)
        return result
    return obj


def iter_tensors(obj: Any) -> Iterator[torch.Tensor]:
    """The tensors of a structure, in the order in which `map_tensors` meets them."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif type(obj) is list or isinstance(obj, tuple):
        for item in obj:
            if isinstance(item, torch.Tensor):
                yield item  # mostly: a generator of its own takes far longer
            else:
                yield from iter_tensors(item)
    elif isinstance(obj, (dict, MutableMapping)):
        for item in obj.values():
            yield from iter_tensors(item)
    elif type(obj) is slice:
        for item in (obj.start, obj.stop, obj.step):
            yield from iter_tensors(item)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield from iter_tensors(getattr(obj, field.name, None))


def _map_dict(obj: dict[Any, Any], change: Callable[[torch.Tensor], Any]) -> Any:
    pairs = {key: map_tensors(item, change) for key, item in obj.items()}
    if dataclasses.is_dataclass(obj):
        return type(obj)(**pairs)
    result = type(obj)()
    result.update(pairs)
    return result


def _class_name(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


def _find_class(name: list[str]) -> Any:
    module, qualname = name
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise UnsupportedError(
            f"a result of class {module}.{qualname} arrived, but this rank has not loaded that "
            "class at module level. Define it in an imported module, not inside a function."
        )
    return found
