"""Joins the two parts of a split backward again where that costs no time."""

from collections.abc import Sequence

from lightning_smp.schedule.actions import Action, Schedule
from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.simulate import simulate

__all__ = ["fuse_parts"]

_SAME = 1e-9  # relative


def fuse_parts(graphs: Sequence[SegmentGraph], schedule: Schedule) -> Schedule:
    """Replace I and the W that follows it at once by B: one run of autograd instead of two.

    The gradients of the inputs are then sent later, so all pairs are joined if the step stays as
    short, else those whose I no other segment waits for.
    """
    before = simulate(graphs, schedule).makespan
    for only_unawaited in (False, True):
        fused = _fused(graphs, schedule, only_unawaited=only_unawaited)
        if fused == schedule or only_unawaited:
            return fused
        after = simulate(graphs, fused).makespan
        if after <= before * (1.0 + _SAME):
            return fused
    return schedule


def _fused(graphs: Sequence[SegmentGraph], schedule: Schedule, *, only_unawaited: bool) -> Schedule:
    awaited = {
        id(graph): {edge.target for edge in graph.edges if edge.has_gradient} for graph in graphs
    }
    rows = []
    for actions in schedule.ranks:
        row: list[Action] = []
        for action in actions:
            previous = row[-1] if row else None
            is_pair = action.kind == "W" and previous == action._replace(kind="I")
            is_awaited = action.segment in awaited[id(graphs[action.microbatch])]
            if is_pair and not (only_unawaited and is_awaited):
                row[-1] = action._replace(kind="B")
            else:
                row.append(action)
        rows.append(tuple(row))
    return Schedule(tuple(rows), name=schedule.name)
