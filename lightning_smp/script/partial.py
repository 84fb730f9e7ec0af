"""Partial state dicts: what one rank of a replica holds, the layout it was written in, and merging.

Pure functions over nested dicts, lists and tuples. A dict is a part if it says
`_smp_is_partial: True`, wherever in a saved object it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Final, TypeAlias

__all__ = ["PARTIAL_KEY", "Layout", "layout_of", "merge", "tagged", "untagged"]

Layout: TypeAlias = tuple[int, int, int]
"""(pp_size, tp_size, rdp_size) of the run that wrote a part."""

PARTIAL_KEY: Final = "_smp_is_partial"
"""True in a state dict that is one rank's part, False in a whole one."""
_LAYOUT_KEY: Final = "_smp_layout"


def tagged(obj: Any, layout: Layout) -> Any:
    """Returns a copy in which each part says in which layout it was made; tensors are shared."""
    return _map_parts(obj, lambda part: _with(part, {_LAYOUT_KEY: list(layout)}))


def untagged(obj: Any) -> Any:
    """Returns a copy without what `tagged` has added."""
    return _map_parts(obj, lambda part: _with(part, {}))


def layout_of(obj: Any) -> Layout | None:
    """Returns the layout that the parts in an object were tagged with; None if none was."""
    found: list[Layout] = []

    def note(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if _LAYOUT_KEY in part:
            pp_size, tp_size, rdp_size = part[_LAYOUT_KEY]
            found.append((int(pp_size), int(tp_size), int(rdp_size)))
        return part

    _map_parts(obj, note)
    return found[0] if found else None


def merge(objs: Sequence[Any]) -> Any:
    """Makes one object of those that the stages saved: parts become whole, the rest is the first's.

    Entries that several stages have are equal. The states of an optimizer are merged by the
    parameters' places in its groups, which are the same on all stages.

    Args:
        objs: one object per stage, alike in structure.
    """
    first = objs[0]
    if _is_part(first):
        return _merge_parts([obj for obj in objs if _is_part(obj)])
    if isinstance(first, Mapping):
        return _with(first, {key: merge([obj[key] for obj in objs]) for key in first})
    if type(first) in (list, tuple):
        return type(first)(merge(column) for column in zip(*objs, strict=True))
    return first


def _merge_parts(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        whole.update(part)
    if "param_groups" in whole and all(isinstance(part.get("state"), Mapping) for part in parts):
        places = [place for part in parts for place in part["state"].items()]
        whole["state"] = dict(sorted(places, key=lambda item: str(item[0]).zfill(12)))
    whole.pop(_LAYOUT_KEY, None)
    whole[PARTIAL_KEY] = False
    return whole


def _is_part(obj: Any) -> bool:
    return isinstance(obj, Mapping) and obj.get(PARTIAL_KEY) is True


def _map_parts(obj: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Returns a copy in which each part is replaced by `change(part)`."""
    if _is_part(obj):
        return change(obj)
    if isinstance(obj, dict):
        return _with(obj, {key: _map_parts(value, change) for key, value in obj.items()})
    if type(obj) in (list, tuple):
        return type(obj)(_map_parts(value, change) for value in obj)
    return obj


def _with(mapping: Mapping[str, Any], entries: Mapping[str, Any]) -> Any:
    """Returns a copy, of the same type, without a tag and with `entries`."""
    copied: Any = copy(mapping)
    copied.pop(_LAYOUT_KEY, None)
    copied.update(entries)
    return copied
