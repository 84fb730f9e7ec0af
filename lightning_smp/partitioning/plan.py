"""The partition: a stage for every atom, planned from costs or taken from the user. Pure.

The same on every rank, because it depends on the module tree and on shapes only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import nn

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.analysis import Analysis
from lightning_smp.partitioning.atoms import Atom
from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.partitioning.flow import Flow, trace_flow
from lightning_smp.partitioning.manual import check_stage, manual_stages
from lightning_smp.partitioning.sharing import (
    SharedParameter,
    TieGroups,
    find_ties,
    shared_tensors,
)
from lightning_smp.partitioning.split import Item, solve, stage_costs
from lightning_smp.partitioning.tree import solve_tree
from lightning_smp.partitioning.virtual import even_out

__all__ = ["Partition", "plan_partition"]

TiedParameters = Literal["auto", "together", "mirrored"]
Policy = Literal["contiguous", "tree"]


@dataclass(frozen=True, eq=False)
class Partition:
    """Where every atom lives.

    Attributes:
        stage_of: Stage by atom name, for every atom, in module order.
        num_stages: Number of stages; some may be empty.
        order: Atoms in order of their first call, then those never called.
        sharing: Parameters held by two or more atoms.
        shared_buffers: Buffers held by two or more atoms; if on several stages, no step writes
            them.
        mode: How tied parameters are treated: ``none`` if there are none.
        floating: Atoms without parameters and buffers that nobody assigned: they may run wherever
            their input lives; ``stage_of`` holds the stage of the first call.
        costs: By atom name.
        slowest: Weighted share of the slowest stage, None if assigned by hand.
        reason: Why costs are parameter counts only, or None.
        virtual_stages: How many contiguous chunks of the model a stage was given.
        mutable_buffers: First names of the buffers that the step writes.
    """

    stage_of: Mapping[str, int]
    num_stages: int
    order: tuple[str, ...]
    sharing: tuple[SharedParameter, ...]
    shared_buffers: tuple[SharedParameter, ...]
    mode: Literal["none", "together", "mirrored"]
    floating: tuple[str, ...]
    costs: Mapping[str, AtomCost]
    slowest: float | None = None
    reason: str | None = None
    virtual_stages: int = 1
    mutable_buffers: tuple[str, ...] = ()

    @property
    def empty_stages(self) -> tuple[int, ...]:
        """Stages on which no atom lives."""
        return tuple(sorted(set(range(self.num_stages)) - set(self.stage_of.values())))

    def atoms_on(self, stage: int) -> tuple[str, ...]:
        """Returns the names of a stage's atoms, in module order."""
        return tuple(name for name, home in self.stage_of.items() if home == stage)

    def fingerprint(self) -> str:
        """Returns a digest of all placements, to be compared between ranks and with checkpoints."""
        content = {
            "num_stages": self.num_stages,
            "stages": list(self.stage_of.items()),
            "floating": self.floating,
            "sharing": [(s.names, s.stages) for s in (*self.sharing, *self.shared_buffers)],
            "mode": self.mode,
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def plan_partition(
    root: nn.Module,
    analysis: Analysis,
    atoms: tuple[Atom, ...],
    num_stages: int,
    *,
    memory_weight: float,
    tied_parameters: TiedParameters = "auto",
    default_partition: int | None = 0,
    manual: Mapping[str, int] | None = None,
    memory_limit: float | None = None,
    virtual_stages: int = 1,
    policy: Policy = "contiguous",
) -> Partition:
    """Assigns every atom to a stage.

    With ``virtual_stages`` of v the model is split into v times as many contiguous chunks as there
    are stages, and chunk c lives on stage ``c % num_stages``: a microbatch passes every stage v
    times (interleaved schedules, Narayanan et al. 2021).

    Args:
        root: The module tree.
        analysis: From :func:`analyze` on the same atoms.
        atoms: From :func:`find_atoms` on the same root.
        num_stages: At least 1.
        memory_weight: From 0 (balance compute) to 1 (balance memory).
        tied_parameters: ``together`` on one stage, ``mirrored`` on each that uses them, or
            whichever the estimate says is faster.
        default_partition: Stage of what ``manual`` does not cover; None: it must cover everything.
        manual: Stage by module name; None: split automatically, and ``default_partition`` is
            unused.
        memory_limit: Most bytes on a stage for parameters, gradients, optimizer states and
            activations (automatic split only).
        virtual_stages: Chunks of the model per stage, at least 1 (automatic split only).
        policy: ``contiguous``: the exact split in execution order; ``tree``: SMP's rule, down the
            module tree (automatic split only).

    Raises:
        PartitionError: An argument out of range, an unknown module, a division of what is never
            divided, tied parameters apart although ``together``, or no split within the memory
            limit.
    """
    if num_stages < 1:
        raise PartitionError(f"Asked for {num_stages} stages; there must be at least 1.")
    _check_virtual(virtual_stages, manual, policy)
    ties = find_ties(root, atoms, analysis.mutable_buffers)
    flow = trace_flow(analysis, atoms, ties)
    slowest: float | None = None
    if manual is None:
        items = _items(flow, analysis, atoms, ties, num_stages, virtual_stages)
        heads, mode, slowest = _automatic(
            items, flow, num_stages, virtual_stages, memory_weight, memory_limit, tied_parameters,
            policy,
        )  # fmt: skip
        stage_of, assigned = flow.spread(heads), frozenset[str]()
    else:
        stages = manual_stages(root, atoms, manual, num_stages)
        assigned = frozenset(stages)
        stage_of = _with_default(stages, flow, default_partition, num_stages)
        mode = "mirrored"
    partition = Partition(
        stage_of=MappingProxyType({atom.name: stage_of[atom.name] for atom in atoms}),
        num_stages=num_stages,
        order=flow.order,
        sharing=shared_tensors(root, atoms, stage_of, buffers=False),
        shared_buffers=shared_tensors(root, atoms, stage_of, buffers=True),
        mode=_mode(root, atoms, stage_of, mode),
        floating=tuple(a.name for a in atoms if a.is_stateless and a.name not in assigned),
        costs=MappingProxyType(dict(analysis.costs)),
        slowest=slowest,
        reason=analysis.reason,
        virtual_stages=virtual_stages,
        mutable_buffers=tuple(sorted(analysis.mutable_buffers)),
    )
    _check_sharing(partition, analysis, tied_parameters)
    return partition


def _check_virtual(virtual_stages: int, manual: Mapping[str, int] | None, policy: Policy) -> None:
    if virtual_stages < 1:
        raise PartitionError(f"Asked for {virtual_stages} chunks a stage; there must be 1 or more.")
    if virtual_stages > 1 and manual is not None:
        raise PartitionError(
            f"Asked for {virtual_stages} chunks a stage and for a partition by hand, which says "
            "itself how often a microbatch passes a stage: assign modules to the stages in turn "
            "(0, 1, 0, 1), or leave the split to the library."
        )
    if virtual_stages > 1 and policy == "tree":
        raise PartitionError(
            f"Asked for {virtual_stages} chunks a stage and partition_policy='tree', which knows "
            "none: use 'contiguous', or one chunk a stage."
        )


def _automatic(
    items: list[Item],
    flow: Flow,
    num_stages: int,
    virtual_stages: int,
    memory_weight: float,
    memory_limit: float | None,
    tied: TiedParameters,
    policy: Policy,
) -> tuple[dict[str, int], Literal["together", "mirrored"], float]:
    if policy == "tree":
        found = solve_tree(flow.heads, items, num_stages, memory_weight, memory_limit, tied=tied)
        return dict(zip(flow.heads, found.stages, strict=True)), found.tied, found.slowest
    # A stage holds one chunk of each round, so chunks within their share of the limit are enough.
    chunk_limit = None if memory_limit is None else memory_limit / virtual_stages
    num_chunks = num_stages * virtual_stages
    found = solve(items, num_chunks, memory_weight, chunk_limit, tied=tied)
    chunks = found.stages
    if virtual_stages > 1 and memory_limit is None:
        chunks = even_out(items, chunks, num_stages, memory_weight)
    stages = [chunk % num_stages for chunk in chunks]
    slowest = max(stage_costs(items, stages, num_stages, memory_weight))
    return dict(zip(flow.heads, stages, strict=True)), found.tied, slowest


def _items(
    flow: Flow,
    analysis: Analysis,
    atoms: tuple[Atom, ...],
    ties: TieGroups,
    num_stages: int,
    virtual_stages: int,
) -> list[Item]:
    """One item for each head, with the memory of what follows it.

    With p stages the first keeps the activations of p microbatches and the last those of one, and
    with v virtual stages rank r keeps those of 2 (p - r) - 1 + (v - 1) p chunks; an item must be
    weighed before its stage is known, so each counts as the average over ranks and chunks.
    """
    in_flight = (num_stages + 1) / 2 if virtual_stages == 1 else float(num_stages)
    by_name = {atom.name: atom for atom in atoms}
    items = []
    for head in flow.heads:
        followers = [analysis.costs[name] for name in flow.followers(head)]
        state = analysis.costs[head].state_bytes + sum(c.state_bytes for c in followers)
        group = ties.group_of.get(head)
        shared = _shared_state(by_name[head], ties) if group is not None else 0
        items.append(
            Item(
                cost=flow.compute_s[head],
                memory=state + in_flight * flow.saved_bytes[head],
                tie_group=group,
                shared_memory=shared,
                is_inseparable=group in ties.inseparable,
            )
        )
    return items


def _shared_state(atom: Atom, ties: TieGroups) -> int:
    # Value, gradient and two optimizer states if trained, as in AtomCost.state_bytes.
    return sum(
        p.numel() * p.element_size() * (4 if p.requires_grad else 1)
        for p in atom.module.parameters()
        if id(p) in ties.shared_ids
    )


def _with_default(
    stages: Mapping[str, int], flow: Flow, default: int | None, num_stages: int
) -> dict[str, int]:
    if default is not None:
        check_stage(default, num_stages, "default_partition")
    homes = dict(stages)
    missing = [name for name in flow.order if name not in homes and name not in flow.stateless]
    if missing and default is None:
        raise PartitionError(
            f"auto_partition is off and {len(missing)} modules have no stage, the first of "
            f"them {missing[0]!r}. Each needs one: assign them, or set default_partition."
        )
    homes.update(dict.fromkeys(missing, default or 0))
    return flow.spread(homes)


def _mode(
    root: nn.Module,
    atoms: tuple[Atom, ...],
    stage_of: Mapping[str, int],
    mode: Literal["together", "mirrored"],
) -> Literal["none", "together", "mirrored"]:
    sharing = shared_tensors(root, atoms, stage_of, buffers=False)
    if not sharing:
        return "none"
    return mode if any(s.is_mirrored for s in sharing) else "together"


def _check_sharing(partition: Partition, analysis: Analysis, tied: TiedParameters) -> None:
    for shared in partition.sharing:
        if shared.is_mirrored and tied == "together":
            raise PartitionError(
                f"Tied parameters {', '.join(shared.names)} are on stages "
                f"{', '.join(map(str, shared.stages))}, but tied_parameters is 'together'. Put "
                "their modules on one stage, or set tied_parameters='mirrored'."
            )
    for shared in partition.shared_buffers:
        written = sorted(analysis.mutable_buffers.intersection(shared.names))
        if shared.is_mirrored and written:
            raise PartitionError(
                f"Buffer {written[0]!r} is written by the step and belongs to modules on stages "
                f"{', '.join(map(str, shared.stages))}; its copies would drift apart. Put the "
                f"modules that share it ({', '.join(shared.names)}) on one stage."
            )
