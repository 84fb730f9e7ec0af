"""Manual assignments: from stages given to modules by name to a stage for each atom. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.atoms import Atom

__all__ = ["check_stage", "manual_stages"]


def manual_stages(
    root: nn.Module, atoms: tuple[Atom, ...], manual: Mapping[str, int], num_stages: int
) -> dict[str, int]:
    """Returns the stage of every atom that a manual assignment covers.

    An assignment covers the module and everything below it; the nearest one wins. One to a module
    inside an atom counts for the atom if nothing contradicts it.

    Args:
        root: The module tree.
        atoms: Its atoms.
        manual: Stage by dotted module name; any of a module's names will do.
        num_stages: Number of stages.

    Raises:
        PartitionError: A stage out of range, an unknown name, or an atom that would be divided.
    """
    wanted = _by_first_name(root, manual, num_stages)
    stages: dict[str, int] = {}
    for atom in atoms:
        stage = _stage_of(atom, wanted)
        if stage is not None:
            stages[atom.name] = stage
    return stages


def check_stage(stage: int, num_stages: int, what: str) -> None:
    """Raises PartitionError if a stage is not a number from 0 to ``num_stages - 1``."""
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < num_stages:
        raise PartitionError(
            f"{what} is {stage!r}. With {num_stages} stages it must be an integer from 0 to "
            f"{num_stages - 1}: use such a stage, or raise the number of stages."
        )


def _by_first_name(root: nn.Module, manual: Mapping[str, int], num_stages: int) -> dict[str, int]:
    modules = dict(root.named_modules(remove_duplicate=False))
    first_names = {id(module): name for name, module in root.named_modules()}
    wanted: dict[str, int] = {}
    for name, stage in manual.items():
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PartitionError(
                f"Stage {stage} was asked for module {name!r}, but the model has no module of that "
                f"name.{hint} Use a name from named_modules()."
            )
        check_stage(stage, num_stages, f"The stage asked for module {name!r}")
        first = first_names[id(modules[name])]
        if wanted.setdefault(first, stage) != stage:
            raise PartitionError(
                f"Module {first!r} is asked to be on stage {wanted[first]} and, under its other "
                f"name {name!r}, on stage {stage}. One module has one stage: drop one of the two."
            )
    return wanted


def _stage_of(atom: Atom, wanted: Mapping[str, int]) -> int | None:
    above = _nearest(atom.name, wanted)
    prefix = atom.name + "."
    inside = {name: stage for name, stage in wanted.items() if name.startswith(prefix)}
    stages = set(inside.values())
    if not stages or stages == {above}:
        return above
    if len(stages) == 1 and (above is None or atom.name not in wanted) and _covers(atom, inside):
        return stages.pop()
    name, stage = next((n, s) for n, s in inside.items() if s != above)
    rest = "no stage of its own" if above is None else f"stage {above}"
    raise PartitionError(
        f"Module {name!r} is asked to be on stage {stage}, but it is inside {atom.name!r} "
        f"({type(atom.module).__name__}), which has {rest} and is never divided between stages. "
        f"Give the stage to {atom.name!r} instead."
    )


def _nearest(name: str, wanted: Mapping[str, int]) -> int | None:
    while True:
        if name in wanted:
            return wanted[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def _covers(atom: Atom, inside: Mapping[str, int]) -> bool:
    """True if every parameter of the atom is under an assigned name."""
    names = (f"{atom.name}.{name}" for name, _ in atom.module.named_parameters())
    return all(any(name.startswith(f"{given}.") for given in inside) for name in names)
