"""Which atoms hold the same tensor: tied parameters, and buffers reached by two paths. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_smp.partitioning.atoms import Atom, parameter_names

__all__ = ["SharedParameter", "TieGroups", "find_ties", "shared_tensors"]


@dataclass(frozen=True)
class SharedParameter:
    """A parameter (or buffer) that more than one atom holds.

    Attributes:
        names: All its dotted names, in module order.
        stages: The stages that hold a copy, in order; one stage if it is kept together.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def is_mirrored(self) -> bool:
        """True if gradients have to be summed between copies."""
        return len(self.stages) > 1


@dataclass(frozen=True)
class TieGroups:
    """Atoms connected by tensors they share.

    Attributes:
        group_of: Group number by atom name, for atoms that share something that matters.
        shared_ids: ``id`` of every parameter held by two atoms or more.
        inseparable: Groups that share a buffer the step writes: copies would drift apart.
    """

    group_of: Mapping[str, int]
    shared_ids: frozenset[int]
    inseparable: frozenset[int]


def find_ties(root: nn.Module, atoms: tuple[Atom, ...], mutable: Collection[str]) -> TieGroups:
    """Groups the atoms that share a parameter or a mutable buffer.

    Args:
        root: The module tree.
        atoms: Its atoms.
        mutable: First names of the buffers that the step writes; sharing other buffers (masks,
            rotary tables) ties nothing, since copies stay equal.
    """
    names = parameter_names(root)
    parameters = _holders(atoms, names, buffers=False)
    buffers = {
        key: holders
        for key, holders in _holders(atoms, names, buffers=True).items()
        if names[key][0] in mutable
    }
    parent = {atom.index: atom.index for atom in atoms}

    def find(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    for holders in (*parameters.values(), *buffers.values()):
        for other in holders[1:]:
            low, high = sorted((find(holders[0].index), find(other.index)))
            parent[high] = low
    tied = {atom.index for holders in (*parameters.values(), *buffers.values()) for atom in holders}
    return TieGroups(
        group_of={atom.name: find(atom.index) for atom in atoms if atom.index in tied},
        shared_ids=frozenset(parameters),
        inseparable=frozenset(find(holders[0].index) for holders in buffers.values()),
    )


def shared_tensors(
    root: nn.Module, atoms: tuple[Atom, ...], stage_of: Mapping[str, int], *, buffers: bool
) -> tuple[SharedParameter, ...]:
    """Returns every parameter (or buffer) that two atoms hold, in module order, with its stages."""
    names = parameter_names(root)
    return tuple(
        SharedParameter(names[key], tuple(sorted({stage_of[atom.name] for atom in holders})))
        for key, holders in _holders(atoms, names, buffers=buffers).items()
    )


def _holders(
    atoms: tuple[Atom, ...], names: Mapping[int, tuple[str, ...]], *, buffers: bool
) -> dict[int, list[Atom]]:
    """Atoms that hold a tensor, by its id, where there are two or more, in module order."""
    holders: dict[int, list[Atom]] = {}
    for atom in atoms:
        module = atom.module
        tensors: list[Tensor] = [*(module.buffers() if buffers else module.parameters())]
        for tensor in tensors:
            holders.setdefault(id(tensor), []).append(atom)
    return {key: held for key, held in holders.items() if len(held) > 1 and key in names}
