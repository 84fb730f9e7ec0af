"""The program of one microbatch: every call with its home, its results and its transfers, as data.

All ranks of a pipeline group run the same step on the same data, so each of them can write down the
same program. Nothing here communicates or runs a tensor operation.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "EVERYWHERE",
    "Edge",
    "Entry",
    "Leaf",
    "Outcome",
    "Program",
    "SegmentNode",
    "SegmentTracker",
    "TensorSpec",
    "fingerprint",
    "with_segments",
    "writes_out_of_order",
]

EVERYWHERE = -1
"""The home of a value that every rank computes for itself."""

SegmentNode = tuple[int, int]
"""(rank in the pipeline group, ordinal of the segment on that rank)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a rank knows of a tensor that it does not hold."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_run_device: bool
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a result.

    ``same`` is the operand that it is, ``view`` the operand whose storage it shares, or
    ``-2 - i`` where it shares that of leaf ``i`` of the same result.
    """

    spec: TensorSpec
    same: int = -1
    view: int = -1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call did, as far as the other ranks must know.

    Args:
        template: the structure of the result; tensors stand in it as indices into ``leaves``.
        leaves: the tensors of the result.
        mutated: (operand index, requires_grad afterwards) of each operand changed in place.
        escapes: (module path, attribute, template) of tensors that a unit left in its attributes.
        random: whether the call drew random numbers.
        writes: whether the call of a unit wrote a buffer of the unit.
    """

    template: Any
    leaves: tuple[Leaf, ...]
    mutated: tuple[tuple[int, bool], ...] = ()
    escapes: tuple[tuple[str, str, Any], ...] = ()
    random: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that crosses from one segment to another, on another rank or (carried) on the same.

    Args:
        index: ordinal of the edge in its program.
        value: ordinal of the value.
        source: segment that holds it.
        target: segment that receives it.
        produced: ordinal of the call after which the value can be sent.
        consumed: ordinal of the call that needs it.
        spec: what is sent.
        operand: which operand of the consuming call it is.

    Attributes:
        crosses: whether the tensor goes to another rank.
        is_message: whether it crosses ranks (and carries bytes at all).
    """

    index: int
    value: int
    source: SegmentNode
    target: SegmentNode
    produced: int
    consumed: int
    spec: TensorSpec
    operand: int
    crosses: bool = field(init=False, compare=False, repr=False)
    is_message: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        crosses = self.source[0] != self.target[0]
        object.__setattr__(self, "crosses", crosses)
        object.__setattr__(self, "is_message", crosses and 0 not in self.spec.shape)


@dataclass(slots=True)
class Entry:
    """One call of the program.

    ``first_value`` is the ordinal of the first value that it makes, ``unit_call`` for a unit the
    ordinal of the call among the unit's. ``makes_one`` (known after `Program.seal`) says that it
    gives one new tensor and does nothing else.
    """

    key: tuple[Any, ...]
    home: int
    outcome: Outcome
    arrivals: tuple[Edge, ...]
    new_segments: tuple[int, ...]
    cost: float = 0.0
    first_value: int = 0
    unit_call: int = 0
    departures: tuple[Edge, ...] = ()
    makes_one: bool = False


class SegmentTracker:
    """Cuts each rank's work into segments so that the segments of all ranks form no cycle.

    A received value joins the receiver's current segment unless that segment already leads,
    directly or through others, to the segment that made the value; then a new one starts.
    """

    def __init__(self, num_ranks: int) -> None:
        self.current = [0] * num_ranks
        self._successors: dict[SegmentNode, set[SegmentNode]] = {}

    @classmethod
    def resumed(cls, current: list[int], edges: Iterable[Edge]) -> SegmentTracker:
        """The tracker after these segments and edges."""
        tracker = cls(len(current))
        for rank, last in enumerate(current):
            for _ in range(last):
                tracker.advance(rank)
        for edge in edges:
            if edge.source != edge.target:
                tracker._successors.setdefault(edge.source, set()).add(edge.target)
        return tracker

    def node(self, rank: int) -> SegmentNode:
        """The segment that the rank is in."""
        return (rank, self.current[rank])

    def connect(self, source: SegmentNode, rank: int) -> bool:
        """Notes that ``rank`` receives from ``source``; returns whether a new segment started."""
        starts_new = self.leads(self.node(rank), source)
        if starts_new:
            self.advance(rank)
        self._successors.setdefault(source, set()).add(self.node(rank))
        return starts_new

    def advance(self, rank: int) -> None:
        """Starts a new segment on the rank."""
        previous = self.node(rank)
        self.current[rank] += 1
        self._successors.setdefault(previous, set()).add(self.node(rank))

    def order(self) -> list[SegmentNode]:
        """All segments, each after those it depends on; ties by ordinal, then rank."""
        nodes = [(r, s) for r, last in enumerate(self.current) for s in range(last + 1)]
        waiting = dict.fromkeys(nodes, 0)
        for targets in self._successors.values():
            for target in targets:
                waiting[target] += 1
        ready = sorted((n for n in nodes if not waiting[n]), key=lambda n: (n[1], n[0]))
        ordered: list[SegmentNode] = []
        while ready:
            node = ready.pop(0)
            ordered.append(node)
            for target in self._successors.get(node, ()):
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
            ready.sort(key=lambda n: (n[1], n[0]))
        assert len(ordered) == len(nodes), "segments form a cycle"
        return ordered

    def leads(self, start: SegmentNode, goal: SegmentNode) -> bool:
        """Whether the goal depends on the start, directly or through other segments."""
        seen, stack = {start}, [start]
        while stack:
            node = stack.pop()
            if node == goal:
                return True
            for target in self._successors.get(node, ()):
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        return False


@dataclass(slots=True)
class Program:
    """The calls of one microbatch, its segments and edges, and which edges carry gradients.

    ``gradient_edges`` and ``backward_segments`` are known once the ranks have compared their
    autograd graphs (`lightning_smp.engine`); they stay empty for a program without backward.
    ``losses`` are (value, call that made its version) of what the backward starts from, and
    ``loss_segments`` the segments where they were made;
    ``copied_edges`` are sent from a copy, since their tensor is changed in place later;
    ``attributes`` are those that the step writes on outer modules; ``visits`` counts each rank's
    segments; ``changing`` are the ranks on which a call changes something in place; ``num_values``
    counts the values that the calls make. ``route`` is how this rank passes by
    the calls of others (`lightning_smp.placed.passing`), made when the program is first followed.
    """

    entries: list[Entry] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    segments: list[SegmentNode] = field(default_factory=list)
    loss_segments: tuple[SegmentNode, ...] = ()
    losses: tuple[tuple[int, int], ...] = ()
    gradient_edges: frozenset[int] = frozenset()
    backward_segments: frozenset[SegmentNode] = frozenset()
    copied_edges: frozenset[int] = frozenset()
    forward_messages: dict[SegmentNode, list[Edge]] = field(default_factory=dict)
    gradient_messages: dict[SegmentNode, list[Edge]] = field(default_factory=dict)
    attributes: tuple[tuple[str, str], ...] = ()
    visits: Counter[int] = field(default_factory=Counter)
    changing: frozenset[int] = frozenset()
    num_values: int = 0
    route: Any = field(default=None, compare=False, repr=False)

    def first_value(self, position: int) -> int:
        """The ordinal of the first value that is made at or after a position."""
        if position < len(self.entries):
            return self.entries[position].first_value
        return self.num_values

    def seal(self) -> None:
        """Gives each call the edges that leave after it, in the order in which they are sent."""
        self.visits = Counter(rank for rank, _ in self.segments)
        homes = {entry.home for entry in self.entries if entry.outcome.mutated}
        self.changing = frozenset(self.visits if EVERYWHERE in homes else homes)
        leaving: dict[int, list[Edge]] = {}
        for edge in self.edges:
            if edge.crosses:  # without elements, too: its gradient counts
                leaving.setdefault(edge.produced, []).append(edge)
        for ordinal, entry in enumerate(self.entries):
            entry.departures = tuple(leaving.get(ordinal, ()))
            entry.makes_one = _makes_one(entry, ordinal)

    def resolve_gradients(self, reach: Iterable[dict[str, Any]]) -> None:
        """Follows gradients from the loss through all ranks' segments.

        Args:
            reach: one report per rank: ``{"edges": {edge left: [edges entered it depends on]},
                "loss": [edges entered] or None}``.
        """
        depends: dict[int, list[int]] = {}
        todo: list[int] = []
        for report in reach:
            depends.update(report["edges"])
            todo += report["loss"] or ()
        found: set[int] = set()
        while todo:
            edge = todo.pop()
            if edge not in found:
                found.add(edge)
                todo += depends.get(edge, ())
        self.gradient_edges = frozenset(found)
        segments = {self.edges[index].source for index in found}
        segments.update(self.loss_segments)
        self.backward_segments = frozenset(segments)


def _makes_one(entry: Entry, ordinal: int) -> bool:
    outcome = entry.outcome
    if entry.home == EVERYWHERE or any(edge.consumed == ordinal for edge in entry.departures):
        return False
    if outcome.mutated or outcome.escapes or len(outcome.leaves) != 1:
        return False
    leaf = outcome.leaves[0]
    return outcome.template == ["t", 0] and leaf.same < 0 and leaf.view == -1


def with_segments(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Counter[int]]]:
    """Each call, and the segment that each rank is in (one counter, which goes on)."""
    current: Counter[int] = Counter()
    for entry in entries:
        current.update(entry.new_segments)
        yield entry, current


def writes_out_of_order(entries: Iterable[Entry]) -> bool:
    """Whether a unit that writes its buffers is called in several segments of its rank.

    Other microbatches run between these calls, so that the buffers would be written in another
    order than when the microbatches run one after the other.
    """
    writers: dict[int, int] = {}
    for entry, current in with_segments(entries):
        if entry.outcome.writes:
            segment = current[max(entry.home, 0)]
            if writers.setdefault(entry.key[0][1], segment) != segment:
                return True
    return False


def fingerprint(keys: Iterable[Any]) -> str:
    """A short hash of call keys that is equal on ranks that made equal calls."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(repr(key).encode())
    return digest.hexdigest()[:16]
