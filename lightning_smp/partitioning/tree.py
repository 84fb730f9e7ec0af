"""SMP's tree partition: stages are dealt out from the root of the module tree. Pure.

Note [How the tree is split]
Every node n of the tree has a row of stages P(n); the root has all. Going down breadth first, the
children of a node, in execution order, are cut into min(children, |P(n)|) runs so that the
costliest run is as cheap as possible; P(n) is dealt to the runs, in order, in proportion to their
costs by D'Hondt's method. A run that gets no stage goes to the first of P(n), the node's own. A run
of one stage is final; a run of several children is cut again with its stages; a single child with
several stages is gone into, and if it has no children, its first stage takes it. A node's cost is
memory_weight times its share of all memory plus the rest times its share of all compute, with
everything below. Items that share parameters are one node, at the place of the first. (The rule is
that of arXiv 2111.05972 as restated by open re-implementations.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.split import Item, Split, stage_costs, stage_memories

__all__ = ["solve_tree"]

Tied = Literal["auto", "together", "mirrored"]


@dataclass
class _Node:
    """A module: an item, or what is below a name. `items` are those of the whole subtree."""

    items: list[int] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)
    cost: float = 0.0


def solve_tree(
    names: Sequence[str],
    items: Sequence[Item],
    num_stages: int,
    memory_weight: float,
    memory_limit: float | None = None,
    *,
    tied: Tied = "auto",
) -> Split:
    """Assigns items to stages by the tree rule; see Note [How the tree is split].

    Args:
        names: Dotted module name of each item; no name is below another.
        items: In execution order.
        num_stages: At least 1.
        memory_weight: From 0 (compute alone counts) to 1 (memory alone counts).
        memory_limit: Most bytes that a stage may hold; the rule does not look for it.
        tied: ``together`` (also for ``auto``, as in SMP), or ``mirrored``: members of a tie group
            go anywhere, unless they are inseparable.

    Raises:
        PartitionError: A stage holds more than the limit.
    """
    mode: Literal["together", "mirrored"] = "mirrored" if tied == "mirrored" else "together"
    groups = _merged(items, mode)
    stages = [0] * len(items)
    for first, stage in _deal(_tree(names, items, groups, memory_weight), num_stages).items():
        for index in groups[first]:
            stages[index] = stage
    fullest = max(stage_memories(items, stages, num_stages))
    if memory_limit is not None and fullest > memory_limit:
        raise PartitionError(
            f"The tree partition over {num_stages} stages needs {fullest:.0f} bytes on its fullest "
            f"stage, above the limit of {memory_limit:.0f} bytes. Use "
            "partition_policy='contiguous', which looks for a split within it."
        )
    return Split(stages, mode, max(stage_costs(items, stages, num_stages, memory_weight)))


def _merged(items: Sequence[Item], mode: str) -> dict[int, list[int]]:
    """The items of each node, by its first item."""
    inseparable = {item.tie_group for item in items if item.is_inseparable}
    firsts: dict[object, int] = {}
    merged: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        is_bound = item.tie_group is not None and (
            mode == "together" or item.tie_group in inseparable
        )
        first = firsts.setdefault(item.tie_group, index) if is_bound else index
        merged.setdefault(first, []).append(index)
    return merged


def _tree(
    names: Sequence[str],
    items: Sequence[Item],
    groups: dict[int, list[int]],
    memory_weight: float,
) -> _Node:
    """The module tree above the merged items, children in execution order."""
    root = _Node()
    for first, members in groups.items():
        alone = [0 if index in members else 1 for index in range(len(items))]
        cost = stage_costs(items, alone, 2, memory_weight)[0]
        node = root
        for part in names[first].split("."):
            node.items.append(first)
            node.cost += cost
            node = node.children.setdefault(part, _Node())
        node.items.append(first)
        node.cost += cost
    return root


def _deal(root: _Node, num_stages: int) -> dict[int, int]:
    """The stage of each merged item."""
    stage_of: dict[int, int] = {}
    pending: deque[tuple[list[_Node], range]] = deque([([root], range(num_stages))])
    while pending:
        nodes, stages = pending.popleft()
        if len(nodes) == 1 and len(stages) > 1 and nodes[0].children:
            nodes = list(nodes[0].children.values())
            if len(nodes) == 1:
                pending.append((nodes, stages))
                continue
        if len(stages) == 1 or len(nodes) == 1:
            stage_of.update((item, stages[0]) for node in nodes for item in node.items)
            continue
        runs = _cut(nodes, min(len(nodes), len(stages)))
        counts = _dhondt([sum(node.cost for node in run) for run in runs], len(stages))
        start = 0
        for run, count in zip(runs, counts, strict=True):
            given = stages[start : start + count] if count else stages[:1]
            pending.append((run, given))
            start += count
    return stage_of


def _cut(nodes: list[_Node], num_runs: int) -> list[list[_Node]]:
    """Cuts a row into runs, none empty, with the cheapest costliest run (dynamic programming)."""
    ends = [0.0]
    for node in nodes:
        ends.append(ends[-1] + node.cost)
    # best[k][j]: the costliest run where the first j nodes make k runs; cut: where the last begins.
    best = [[float("inf")] * (len(nodes) + 1) for _ in range(num_runs + 1)]
    cut = [[0] * (len(nodes) + 1) for _ in range(num_runs + 1)]
    best[0][0] = 0.0
    for count in range(1, num_runs + 1):
        for end in range(count, len(nodes) + 1):
            for start in range(count - 1, end):
                cost = max(best[count - 1][start], ends[end] - ends[start])
                if cost < best[count][end]:
                    best[count][end], cut[count][end] = cost, start
    runs: list[list[_Node]] = []
    end = len(nodes)
    for count in range(num_runs, 0, -1):
        start = cut[count][end]
        runs.insert(0, nodes[start:end])
        end = start
    return runs


def _dhondt(costs: list[float], seats: int) -> list[int]:
    """Deals seats in proportion to costs: each to the highest cost / (seats so far + 1)."""
    given = [0] * len(costs)
    for _ in range(seats):
        winner = max(range(len(costs)), key=lambda i: (costs[i] / (given[i] + 1), -given[i], -i))
        given[winner] += 1
    return given
