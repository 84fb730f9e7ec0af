"""Flow: which atoms the split decides about, in execution order, and which follow them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_smp.partitioning.analysis import Analysis
from lightning_smp.partitioning.atoms import Atom
from lightning_smp.partitioning.sharing import TieGroups

__all__ = ["Flow", "trace_flow"]


@dataclass(frozen=True)
class Flow:
    """Atoms in execution order.

    Attributes:
        order: All atoms: those called, by first call, then those never called, in module order.
        heads: The atoms that the split places: called and with state. (All called ones if none
            has.)
        leader: The atom whose stage a non-head takes.
        compute_s: Seconds by head, with those of the stateless atoms called after it.
        saved_bytes: Activations by head, likewise.
        stateless: Atoms without parameters and buffers.
    """

    order: tuple[str, ...]
    heads: tuple[str, ...]
    leader: Mapping[str, str]
    compute_s: Mapping[str, float]
    saved_bytes: Mapping[str, float]
    stateless: frozenset[str]

    def followers(self, head: str) -> tuple[str, ...]:
        """Returns the non-heads that end up on a head's stage."""
        return tuple(name for name in self.leader if self._head(name) == head)

    def spread(self, stages: Mapping[str, int]) -> dict[str, int]:
        """Returns a stage for every atom from those of some: the others follow their leader."""
        return {name: self._stage(name, stages) for name in self.order}

    def _stage(self, name: str, stages: Mapping[str, int]) -> int:
        while name not in stages:
            if name not in self.leader:  # no atom is called at all
                return 0
            name = self.leader[name]
        return stages[name]

    def _head(self, name: str) -> str:
        while name in self.leader:
            name = self.leader[name]
        return name


def trace_flow(analysis: Analysis, atoms: tuple[Atom, ...], ties: TieGroups) -> Flow:
    """Finds heads, followers and their costs.

    A stateless atom follows the head called before it (an activation belongs to its layer). An atom
    that is never called follows a called one that shares a tensor with it, else the nearest before
    it in module order, else the nearest after it.
    """
    stateless = frozenset(atom.name for atom in atoms if atom.is_stateless)
    called = tuple(dict.fromkeys(analysis.order))
    heads = tuple(name for name in called if name not in stateless) or called
    never = tuple(atom.name for atom in atoms if atom.name not in set(called))
    leader = _leaders_of_called(analysis.order, heads)
    leader.update(_leaders_of_never(atoms, frozenset(called), ties))
    compute_s, saved_bytes = _sums(analysis, heads)
    return Flow((*called, *never), heads, leader, compute_s, saved_bytes, stateless)


def _leaders_of_called(calls: tuple[str, ...], heads: tuple[str, ...]) -> dict[str, str]:
    leader: dict[str, str] = {}
    last = heads[0] if heads else None
    placed = frozenset(heads)
    for name in calls:
        if name in placed:
            last = name
        elif last is not None:
            leader.setdefault(name, last)
    return leader


def _leaders_of_never(
    atoms: tuple[Atom, ...], called: frozenset[str], ties: TieGroups
) -> dict[str, str]:
    first_of_group: dict[int, str] = {}
    for atom in atoms:
        if atom.name in called and atom.name in ties.group_of:
            first_of_group.setdefault(ties.group_of[atom.name], atom.name)
    following = next((atom.name for atom in atoms if atom.name in called), None)
    leader: dict[str, str] = {}
    before = following
    for atom in atoms:
        if atom.name in called:
            before = atom.name
            continue
        group = ties.group_of.get(atom.name)
        chosen = first_of_group.get(group, before) if group is not None else before
        if chosen is not None:
            leader[atom.name] = chosen
        if group is not None:  # sharers that are all never called stay together too
            first_of_group.setdefault(group, atom.name)
    return leader


def _sums(analysis: Analysis, heads: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float]]:
    compute_s = dict.fromkeys(heads, 0.0)
    saved_bytes = dict.fromkeys(heads, 0.0)
    if heads:
        compute_s[heads[0]] += analysis.outer.compute_s
        saved_bytes[heads[0]] += analysis.outer.saved_bytes
    last = heads[0] if heads else None
    for name in analysis.order:
        cost = analysis.costs[name]
        if name in compute_s:
            last = name
        if last is not None:
            compute_s[last] += cost.compute_s / cost.calls
            saved_bytes[last] += cost.saved_bytes / cost.calls
    return compute_s, saved_bytes
