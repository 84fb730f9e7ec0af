"""Calls of a program that have been made ready: what such a call must be given, and when it is.

A call is ready-made where it is the next one of the program and its arguments are those that the
program expects. All others go the long way (`MicrobatchRun.call`), which looks at everything.

Note [Lanes]
Arguments are compared object by object. The objects that a microbatch must meet are in its lane: a
list with a place for each value of the program, for each constant, and for each argument that comes
from elsewhere (a mask, a cache), which is filled when the object has been looked at once. So most
arguments are settled by one ``is``. Where that fails, they are compared with the keys that the
program has of them, and where that says no, the call goes the long way.

A lane outlives its microbatch: in the next step another one uses the same placeholders again, where
nobody holds them any more. Each microbatch of a step has a lane of its own.

Those of a lane that are real on this rank are lent: the lane would keep their numbers alive, so
these are taken back where the step's own code holds the placeholder no more (`take_back`). A
placeholder in its lane is in the list of those that are lent if and only if it has numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import getrefcount
from typing import TYPE_CHECKING, Any
from weakref import getweakrefcount

import torch

from lightning_smp.placed.operands import fits
from lightning_smp.placed.places import ABSENT, is_tensor
from lightning_smp.placed.tensor import AS_NEW, SPOILT, PlacedTensor, Value
from lightning_smp.program import Entry

if TYPE_CHECKING:
    from lightning_smp.placed.places import Places
    from lightning_smp.placed.run import MicrobatchRun

__all__ = ["NOTHING", "ReadyCall", "take_back"]

_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def _count_unheld(lane: list[Any]) -> int:
    tensor = lane[0]
    return getrefcount(tensor)


_UNHELD = _count_unheld([object()])
"""References to a placeholder that only a lane and a local variable hold.

It depends on Python's release whether the argument of the count is one of them.
"""

_LENT = _UNHELD + 1
"""The same for one that is also in the list of those that are lent."""


def take_back(run: MicrobatchRun) -> None:
    """Frees the numbers of lent placeholders that the step's own code holds no more."""
    kept = []
    for tensor in run.lent:
        if getrefcount(tensor) > _LENT:
            kept.append(tensor)
        elif getweakrefcount(tensor):
            run.lane[tensor._value.index] = ABSENT  # so that it ends as it would on one device
        else:
            tensor._value.local = None
    run.lent = kept


class ReadyCall:
    """One call of a program.

    Args:
        entry: the call in the program.
        position: its ordinal there.
        target: the unit or function.
        places: where in a lane its arguments are.

    Attributes:
        token: for a unit, the token that it must have.
        following: what comes after it on the route.
        is_here: whether this rank runs it.
        tensors: which arguments are tensors.
        value: ordinal of the first value that it makes.
        specs: of the tensors that it makes.
    """

    __slots__ = (
        "_count", "_filled", "_flags", "_is_plain", "_keys", "_names", "_places", "entry",
        "following", "position", "specs", "target", "tensors", "token", "value",
    )  # fmt: skip

    is_here = False

    def __init__(self, entry: Entry, position: int, target: Any, places: Places) -> None:
        self.token, self._flags, positional, named = entry.key
        self.target, self.position, self.following = target, position, NOTHING
        self.entry = entry
        self._names = tuple(name for name, _ in named[1:])
        self._keys = (*positional[1:], *(key for _, key in named[1:]))
        self._count = len(self._keys)
        self.tensors = [i for i, key in enumerate(self._keys) if is_tensor(key)]
        arguments = (*range(len(positional) - 1), *self._names)
        self._places = tuple(map(places.find, arguments, self._keys))
        self._filled = [(i, p) for i, p in enumerate(self._places) if places.is_filled(p)]
        self.value = entry.first_value
        self.specs = [leaf.spec for leaf in entry.outcome.leaves if leaf.same < 0]
        moves = entry.arrivals or entry.new_segments
        self._is_plain = not self.is_here and entry.makes_one and not moves

    def take(self, run: MicrobatchRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The call's result if all is as expected; None if not (a result is never None)."""
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
            return self._finish(run, args)
        tensor = lane[self.value]
        is_free = getrefcount(tensor) == _UNHELD and not getweakrefcount(tensor)
        if is_free and tensor._value.wear == AS_NEW:
            tensor._value.mark = run.mark
            if run.region is not None:
                run.region.append((self.entry, None, tensor))
            return tensor
        del tensor  # nor may this hold it
        return self._finish(run, args)

    def _looks_right(self, run: MicrobatchRun, args: tuple[Any, ...]) -> bool:
        """Compares the arguments with their keys; remembers those that come from elsewhere."""
        if not fits(run, args, self._keys):
            return False
        for index, place in self._filled:
            run.lane[place] = args[index]
        return True

    def _finish(self, run: MicrobatchRun, args: tuple[Any, ...]) -> Any:
        """What is left to do for the call, whose arguments are as expected."""
        raise NotImplementedError

    def _stand_in(self, run: MicrobatchRun, ordinal: int) -> PlacedTensor:
        """The placeholder of a tensor of the result: that of an earlier microbatch, or a new one.

        Args:
            run: the microbatch.
            ordinal: which of the tensors that the call makes.
        """
        home, place, lane = self.entry.home, self.value + ordinal, run.lane
        node = run.tracker.node(home)
        tensor: PlacedTensor = lane[place]
        is_free = getrefcount(tensor) == _UNHELD and not getweakrefcount(tensor)
        if is_free and tensor._value.wear < SPOILT:
            value = tensor._value
            value.mark = run.mark
            value.renew(home, node, self.position)
            return tensor
        value = Value(run.mark, place, home, node)
        value.produced = self.position
        lane[place] = tensor = run.placeholder(self.specs[ordinal], value)
        return tensor


class _Nothing(ReadyCall):
    """Stands where no call is ready."""

    __slots__ = ()

    def __init__(self) -> None:
        self.target = ABSENT


NOTHING: ReadyCall = _Nothing()
