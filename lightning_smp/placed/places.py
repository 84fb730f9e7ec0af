"""Where in a lane the arguments of a program's calls are; see Note [Lanes] in `placed.ready`."""

from __future__ import annotations

from typing import Any

__all__ = ["ABSENT", "Places", "has_nested_tensors", "is_tensor"]

ABSENT = object()
"""In a place of a lane that holds nothing: no argument is it."""

_EMPTY = -1
"""The place of a lane that is always empty."""

_ANY_FLOAT = "f"
"""The key of floats."""


class Places:
    """Gives out the places of a lane.

    Constants follow the values. Counted from the end, the first is always empty, then come those
    that are filled during a microbatch.
    """

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values
        self._constants: dict[int, Any] = {}
        self._filled: dict[Any, int] = {}

    def find(self, argument: int | str, key: Any) -> int:
        """The place of what an argument with this key must be.

        Args:
            argument: its position or name. An object that several calls get comes by the same
                name as a rule, so that different objects of equal keys do not share a place.
            key: its key in the program.
        """
        constant = key[1] if _is(key, "b") else key
        if type(constant) is not tuple:
            if constant == _ANY_FLOAT:
                return _EMPTY
            self._constants.setdefault(id(constant), constant)
            return self._num_values + list(self._constants).index(id(constant))
        if _is(key, "v"):
            return int(key[1])
        if not _is_lasting(key):
            return _EMPTY
        return self._filled.setdefault((argument, key), _EMPTY - 1 - len(self._filled))

    def is_filled(self, place: int) -> bool:
        """Whether the place is filled when its object has been looked at."""
        return place < _EMPTY

    def lane(self) -> list[Any]:
        """A lane without values."""
        filled = [ABSENT] * (len(self._filled) + 1)
        return [ABSENT] * self._num_values + list(self._constants.values()) + filled

    def filled(self) -> slice:
        """The places that are filled during a microbatch."""
        return slice(_EMPTY - len(self._filled), _EMPTY)


def _is(key: Any, tag: str) -> bool:
    return type(key) is tuple and bool(key) and key[0] == tag


def is_tensor(key: Any) -> bool:
    """Whether an argument with this key is a tensor."""
    return _is(key, "v") or _is(key, "t") or _is(key, "p")


def has_nested_tensors(call: tuple[Any, ...]) -> bool:
    """Whether a call with this key has tensors inside its arguments."""
    _, _, positional, named = call
    keys = (*positional[1:], *(item for _, item in named[1:]))
    return any(_has_tensors(item) for item in keys if not is_tensor(item))


def _has_tensors(key: Any) -> bool:
    return is_tensor(key) or (type(key) is tuple and any(map(_has_tensors, key)))


def _is_lasting(key: Any) -> bool:
    """Whether an object with this key has it as long as it lives, or all ranks see it change."""
    if _is(key, "tuple"):
        return all(map(_is_lasting, key[1:]))
    if _is(key, "t"):
        return len(key) == 4  # not where its elements count
    return type(key) is not tuple or _is(key, "v") or _is(key, "o") or _is(key, "b")
