"""The partition as a table for people. Pure: returns text, prints nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.atoms import find_atoms
from lightning_smp.partitioning.operations import nbytes
from lightning_smp.partitioning.plan import Partition

__all__ = ["compress_names", "report"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TRAILING_NUMBER = re.compile(r"(?P<prefix>.*\.|)(?P<number>\d+)")
_Row = tuple[str, str, str, str, str]


def report(partition: Partition, root: nn.Module) -> str:
    """Returns a table: for each stage its units, parameters, bytes and share of the compute.

    Args:
        partition: The plan.
        root: The module tree that was planned.

    Raises:
        PartitionError: The units of ``root`` are not those of the plan: the tree was changed after
            it was planned, so the table could not account for every layer.
    """
    rows: list[_Row] = [("stage", "parameters", "size", "compute", "units")]
    accounted: set[int] = set()
    total_s = sum(cost.compute_s for cost in partition.costs.values())
    for stage in range(partition.num_stages):
        names = partition.atoms_on(stage)
        held = {id(p): p for name in names for p in root.get_submodule(name).parameters()}
        accounted.update(held)
        seconds = sum(partition.costs[name].compute_s for name in names)
        share = f"{seconds / total_s:.1%}" if total_s > 0 else "-"
        units = ", ".join(compress_names(names, partition.stage_of)) or "(empty)"
        rows.append((str(stage), *_sizes(held.values()), share, units))
    outer = {id(p): p for p in root.parameters() if id(p) not in accounted}
    if outer:
        rows.append(("all", *_sizes(outer.values()), "-", "parameters outside units"))
    _check_complete(partition, root)
    rows.append(("total", *_sizes(root.parameters()), "", f"{len(partition.stage_of)} units"))
    return "\n".join(["Partition assignments:", *_aligned(rows), *_notes(partition)])


def compress_names(names: Iterable[str], universe: Iterable[str] | None = None) -> tuple[str, ...]:
    """Shortens unit names: whole subtrees become one name, runs of numbers become ranges.

    >>> compress_names(["wte", "h.0", "h.1", "h.2"], ["wte", "h.0", "h.1", "h.2", "h.3"])
    ('wte', 'h.0-2')

    Args:
        names: The names to shorten, in order.
        universe: All unit names; a subtree is whole if ``names`` has all of its units. None:
            ``names``.
    """
    chosen = list(names)
    inside = frozenset(chosen)
    whole: dict[str, bool] = {}
    for name in universe if universe is not None else chosen:
        for prefix in _prefixes(name):
            whole[prefix] = whole.get(prefix, True) and name in inside
    shortest = dict.fromkeys(
        next((prefix for prefix in _prefixes(name) if whole.get(prefix)), name) for name in chosen
    )
    return tuple(_ranges(list(shortest)))


def _prefixes(name: str) -> list[str]:
    """A name's ancestors with at least one part, outermost first, itself included."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _ranges(names: list[str]) -> Iterable[str]:
    def run(indexed: tuple[int, str]) -> tuple[str, int]:
        match = _TRAILING_NUMBER.fullmatch(indexed[1])
        if match is None:
            return indexed[1], -1
        return match["prefix"], int(match["number"]) - indexed[0]

    for (prefix, offset), group in groupby(enumerate(names), key=run):
        members = [name for _, name in group]
        if (offset == -1 and members[0] == prefix) or len(members) == 1:
            yield from members
        else:
            last = members[-1].rpartition(".")[2]
            yield f"{members[0]}-{last}"


def _sizes(parameters: Iterable[nn.Parameter]) -> tuple[str, str]:
    ready = [p for p in parameters if not is_lazy(p)]
    return f"{sum(p.numel() for p in ready):,}", _human(sum(nbytes(p) for p in ready))


def _human(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def _aligned(rows: list[_Row]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]


def _check_complete(partition: Partition, root: nn.Module) -> None:
    planned, present = set(partition.stage_of), {atom.name for atom in find_atoms(root)}
    if planned != present:
        names = ", ".join(sorted(planned ^ present)[:3])
        raise PartitionError(
            f"The partition has {len(planned)} units and the model {len(present)}; they differ in "
            f"{names}. Modules may not be added or removed after the partition was planned: make "
            "such changes in configure_model or before."
        )


def _notes(partition: Partition) -> Iterable[str]:
    if partition.reason is not None:
        yield (
            f"Costs are parameter counts in module order, because the model could not be analysed "
            f"({partition.reason})."
        )
    if partition.virtual_stages > 1:
        yield (
            f"Each stage holds {partition.virtual_stages} chunks of the model: a microbatch passes "
            "the stages as often."
        )
    for stage in partition.empty_stages:
        yield f"Stage {stage} is empty: there are too few units, or none was assigned to it."
    for shared in partition.sharing:
        where = ", ".join(map(str, shared.stages))
        how = "mirrored on stages" if shared.is_mirrored else "together on stage"
        yield f"Tied: {' = '.join(shared.names)} {how} {where}."
