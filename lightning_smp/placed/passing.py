"""Calls that other ranks run: what is left for this rank to do, made ready once for each program.

Where a rank owns few of the units, a step consists almost wholly of such calls, so that their cost
is the price of running the user's own step on every rank. A call is passed by where it is the next
one of the program, its arguments are those that the program expects, and nothing moves to or from
this rank. Then its result is a placeholder, and no more is done.

Note [Lanes]
Arguments are compared object by object. The objects that a microbatch must meet are in its lane: a
list with a place for each value of the program, for each constant, and for each argument that comes
from elsewhere (a mask, a cache), which is filled when the object has been looked at once. So most
arguments are settled by one ``is``. Where that fails, they are compared with the keys that the
program has of them, and where that says no, the call goes the long way (`MicrobatchRun.call`).

A lane outlives its microbatch: the next one that starts uses the same placeholders again, where
nobody holds them any more. Several microbatches in flight have a lane each.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.placed.operands import fits
from lightning_smp.placed.structure import build
from lightning_smp.placed.tensor import AS_NEW, SPOILT, PlacedTensor, Value
from lightning_smp.program import EVERYWHERE, Entry, Program

if TYPE_CHECKING:
    from lightning_smp.placed.run import MicrobatchRun
    from lightning_smp.placed.units import UnitEntry

__all__ = ["ABSENT", "NOTHING", "PassedCall", "Route"]

_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

ABSENT = object()
"""In a place of a lane that holds nothing: no argument is it."""

_UNHELD = 3
"""References to a placeholder that a lane, a local variable and the count's own argument hold."""

_EMPTY = -1
"""The place of a lane that is always empty."""

_ANY_FLOAT = "f"
"""The key of floats."""

_CPU = torch.device("cpu")


class PassedCall:
    """One call of a program that another rank runs.

    Args:
        entry: the call in the program.
        position: its ordinal there.
        target: the unit or function.
        places: where in a lane its arguments are.

    Attributes:
        token: for a unit, the token that it must have.
        following: what comes after it on the route.
    """

    __slots__ = (
        "_count", "_entry", "_filled", "_flags", "_is_plain", "_keys", "_moves", "_names",
        "_places", "_specs", "_tensors", "_value", "following", "position", "target", "token",
    )  # fmt: skip

    def __init__(self, entry: Entry, position: int, target: Any, places: _Places) -> None:
        self.token, self._flags, positional, named = entry.key
        self.target, self.position, self.following = target, position, NOTHING
        self._entry = entry
        self._names = tuple(name for name, _ in named[1:])
        self._keys = (*positional[1:], *(key for _, key in named[1:]))
        self._count = len(self._keys)
        self._tensors = [i for i, key in enumerate(self._keys) if _is_tensor(key)]
        arguments = (*range(len(positional) - 1), *self._names)
        self._places = tuple(map(places.find, arguments, self._keys))
        self._filled = [(i, p) for i, p in enumerate(self._places) if places.is_filled(p)]
        self._moves = [(self._tensors[edge.operand], edge.target) for edge in entry.arrivals]
        self._value = entry.first_value
        self._specs = [leaf.spec for leaf in entry.outcome.leaves if leaf.same < 0]
        self._is_plain = entry.makes_one and not entry.arrivals and not entry.new_segments

    def take(self, run: MicrobatchRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Passes the call by, if all is as expected: its result; None if not (it is never None)."""
        if kwargs or self._names:
            if tuple(kwargs) != self._names:
                return None
            args = (*args, *kwargs.values())
        flags = self._flags
        if len(args) != self._count or _is_grad_enabled() != flags & 1:
            return None
        if (flags > 1 or _is_any_autocast_enabled()) and run.mode_flags() != flags:
            return None
        lane = run.lane
        for place, argument in zip(self._places, args):  # noqa: B905 - of equal length
            if lane[place] is not argument:
                if not self._looks_right(run, args):
                    return None
                break
        run.position = self.position + 1
        run.upcoming = self.following
        if not self._is_plain:
            return self._pass_all(run, args)
        tensor = lane[self._value]
        if getrefcount(tensor) == _UNHELD and tensor._value.wear == AS_NEW:
            tensor._value.run = run
        else:
            del tensor  # nor may this hold it
            tensor = self._stand_in(run, 0)
        if run.region is not None:
            run.region.append((self._entry, None, tensor))
        return tensor

    def _looks_right(self, run: MicrobatchRun, args: tuple[Any, ...]) -> bool:
        """Compares the arguments with their keys; remembers those that come from elsewhere."""
        if not fits(run, args, self._keys):
            return False
        for index, place in self._filled:
            run.lane[place] = args[index]
        return True

    def _stand_in(self, run: MicrobatchRun, ordinal: int) -> PlacedTensor:
        """The placeholder of a tensor of the result: that of an earlier microbatch, or a new one.

        Args:
            run: the microbatch.
            ordinal: which of the tensors that the call makes.
        """
        home, place, lane = self._entry.home, self._value + ordinal, run.lane
        node = run.tracker.node(home)
        tensor: PlacedTensor = lane[place]
        if getrefcount(tensor) == _UNHELD and tensor._value.wear < SPOILT:
            value = tensor._value
            value.run = run
            value.renew(home, node, self.position)
            return tensor
        value = Value(run, place, home, node)
        value.produced = self.position
        spec = self._specs[ordinal]
        device = run.context.device if spec.on_run_device else _CPU
        lane[place] = tensor = PlacedTensor(spec, device, value)
        return tensor

    def _pass_all(self, run: MicrobatchRun, args: tuple[Any, ...]) -> Any:
        """Passes by a call between whose ranks values move, or that gives other than one tensor."""
        for rank in self._entry.new_segments:
            run.tracker.current[rank] += 1
        for index, node in self._moves:
            args[index]._value.note_copy(*node)
        leaves: list[Any] = []
        made = 0
        for leaf in self._entry.outcome.leaves:
            if leaf.same >= 0:
                leaves.append(args[self._tensors[leaf.same]])
                continue
            tensor = self._stand_in(run, made)
            made += 1
            if leaf.view != -1:
                on = args[self._tensors[leaf.view]] if leaf.view >= 0 else leaves[-2 - leaf.view]
                tensor._value.join(on._value if type(on) is PlacedTensor else None)
            leaves.append(tensor)
        result = build(self._entry.outcome.template, leaves, [])
        if run.region is not None:
            run.region.append((self._entry, None, result))
        return result


class _Nothing(PassedCall):
    """Stands where no call can be passed by."""

    __slots__ = ()

    def __init__(self) -> None:
        self.target = ABSENT


NOTHING: PassedCall = _Nothing()


class Route:
    """The calls of a program that one rank passes by, and the lanes of its microbatches.

    Args:
        program: the program.
        rank: the rank.
        units: the units by ordinal.
    """

    def __init__(self, program: Program, rank: int, units: Mapping[int, UnitEntry]) -> None:
        places = _Places(program.num_values)
        self._calls: list[PassedCall] = []
        for position, entry in enumerate(program.entries):
            call: PassedCall = NOTHING
            if _is_passed(entry, rank):
                token = entry.key[0]
                target = units[token[1]] if isinstance(token, tuple) else token
                call = PassedCall(entry, position, target, places)
            self._calls.append(call)
        self._calls.append(NOTHING)
        for call, following in pairwise(self._calls):
            if call is not NOTHING:
                call.following = following
        self._fresh, self._filled = places.lane(), places.filled()
        self._lanes: list[list[Any]] = []

    def at(self, position: int) -> PassedCall:
        """The call at this position of the program; `NOTHING` if it cannot be passed by."""
        return self._calls[position]

    def enter(self) -> list[Any]:
        """A lane for a microbatch that begins."""
        return self._lanes.pop() if self._lanes else list(self._fresh)

    def leave(self, lane: list[Any]) -> None:
        """The microbatch has come to its end."""
        self.forget(lane)
        self._lanes.append(lane)

    def forget(self, lane: list[Any]) -> None:
        """What came from elsewhere must be looked at again."""
        lane[self._filled] = self._fresh[self._filled]


class _Places:
    """Gives out the places of a lane; see Note [Lanes].

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


def _is_tensor(key: Any) -> bool:
    return _is(key, "v") or _is(key, "t") or _is(key, "p")


def _has_tensors(key: Any) -> bool:
    return _is_tensor(key) or (type(key) is tuple and any(map(_has_tensors, key)))


def _is_lasting(key: Any) -> bool:
    """Whether an object with this key has it as long as it lives, or all ranks see it change."""
    if _is(key, "tuple"):
        return all(map(_is_lasting, key[1:]))
    if _is(key, "t"):
        return len(key) == 4  # not where its elements count
    return type(key) is not tuple or _is(key, "v") or _is(key, "o") or _is(key, "b")


def _is_passed(entry: Entry, rank: int) -> bool:
    """Whether a rank has nothing to do in a call but to make placeholders."""
    outcome = entry.outcome
    if entry.home in (rank, EVERYWHERE) or rank in entry.new_segments:
        return False
    if any(edge.target[0] == rank for edge in entry.arrivals):
        return False
    if any(edge.source[0] == rank for edge in entry.departures):
        return False
    if not outcome.leaves or outcome.mutated or outcome.escapes or _has_objects(outcome.template):
        return False
    if outcome.random and not isinstance(entry.key[0], tuple):
        return False  # not a unit: it draws from the stream of all ranks
    is_tied = any(max(leaf.same, leaf.view) >= 0 for leaf in outcome.leaves)
    return not ((is_tied or entry.arrivals) and _has_nested_tensors(entry.key))


def _has_nested_tensors(key: tuple[Any, ...]) -> bool:
    _, _, positional, named = key
    keys = (*positional[1:], *(item for _, item in named[1:]))
    return any(_has_tensors(item) for item in keys if not _is_tensor(item))


def _has_objects(template: Any) -> bool:
    if not isinstance(template, list):
        return False
    return template[:1] == ["o"] or any(map(_has_objects, template))
