"""When a parameter's gradient is final: after the last backward of any segment that uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_smp.program import Program
from lightning_smp.schedule import Action

if TYPE_CHECKING:
    from torch import nn

    from lightning_smp.placed.units import UnitEntry

__all__ = ["final_parameters"]


def final_parameters(
    row: Sequence[Action],
    programs: Mapping[int, Program],
    rank: int,
    units: Mapping[int, UnitEntry],
) -> dict[int, list[nn.Parameter]]:
    """For positions in a rank's row, the parameters that are final after that action.

    Parameters that the step's own code uses, and those of units without backward, are left out.
    """
    used = {id(p): _uses(p, rank) for p in {id(p): p for p in programs.values()}.values()}
    last: dict[nn.Parameter, int] = {}
    outer: set[str] = set()
    for position, action in enumerate(row):
        program = programs[action.microbatch]
        by_segment, names = used[id(program)]
        outer |= names
        if action.kind in "BW":
            for index in by_segment.get(program.segments[action.segment][1], ()):
                for parameter in units[index].trainable():
                    last[parameter] = position
    excluded = {
        id(parameter)
        for unit in units.values()
        for path, parameter in unit.module.named_parameters()
        if f"{unit.name}.{path}" in outer
    }
    found: dict[int, list[nn.Parameter]] = {}
    for parameter, position in last.items():
        if id(parameter) not in excluded:
            found.setdefault(position, []).append(parameter)
    return found


def _uses(program: Program, rank: int) -> tuple[dict[int, set[int]], set[str]]:
    """Units by segment of this rank, and names of parameters used in the step's own code."""
    segment = 0
    units: dict[int, set[int]] = {}
    names: set[str] = set()
    for entry in program.entries:
        segment += entry.new_segments.count(rank)
        if isinstance(entry.key[0], tuple) and entry.home == rank:
            units.setdefault(segment, set()).add(entry.key[0][1])
        names.update(_parameter_names(entry.key[2:]))
    return units, names


def _parameter_names(key: Any) -> Iterator[str]:
    if isinstance(key, tuple):
        if len(key) == 3 and key[0] == "p" and isinstance(key[1], str):
            yield key[1]
        for part in key:
            yield from _parameter_names(part)
