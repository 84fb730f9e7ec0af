"""All actions of one step numbered, with what each waits for: the form the algorithms run on.

Rules of waiting, the only place that states them:

* the forward of a segment waits for the forwards of the segments it consumes, and for the forward
  of the previous segment of its rank (a rank's forward of a microbatch is one run of the program);
* the backward of a segment waits for all forwards of its microbatch on its rank (only then does the
  rank know that the microbatch followed its program), and for the backwards of the segments that
  send it a gradient;
* a transfer between ranks takes the edge's cost, in either direction.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Action, Schedule, format_grid
from lightning_smp.schedule.graph import SegmentGraph

__all__ = ["Need", "Work", "build_work"]

Need = tuple[int, float]
"""An action to wait for, and the time its result takes to arrive."""


@dataclass(frozen=True, slots=True)
class Work:
    """The actions of a step under integer names, as parallel lists.

    The forward of segment ``s`` of microbatch ``m`` is ``offsets[m] + 2 * s``, its backward the
    next integer. Names of actions that are not part of the step exist, but are not in ``todo``.

    Attributes:
        num_ranks: Number of pipeline ranks.
        offsets: First name of each microbatch.
        actions: The action behind each name.
        ranks: The rank that executes it.
        costs: Its duration.
        needs: What it waits for; forwards that were already executed are left out.
        todo: Names to execute, ascending.
    """

    num_ranks: int
    offsets: tuple[int, ...]
    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    costs: tuple[float, ...]
    needs: tuple[tuple[Need, ...], ...]
    todo: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches, executed forwards included."""
        return len(self.offsets)

    def encode(self, schedule: Schedule) -> list[list[int]]:
        """Translate a schedule, row by row.

        Raises:
            ScheduleError: If the number of ranks differs, or an action is unknown, not to be
                executed, on another rank than its segment, or listed twice.
        """
        if schedule.num_ranks != self.num_ranks:
            raise ScheduleError(
                f"The schedule {schedule.name!r} has {schedule.num_ranks} ranks, the segment "
                f"graphs have {self.num_ranks}; make the schedule for these graphs."
            )
        names = {self.actions[name]: name for name in self.todo}
        seen: set[Action] = set()
        for rank, row in enumerate(schedule.ranks):
            for step, action in enumerate(row):
                problem = self._misplaced(names.get(action), action, rank)
                if not problem and action in seen:
                    problem = "is listed a second time; list every action once"
                if problem:
                    raise ScheduleError(
                        f"In the schedule {schedule.name!r}, step {step} of rank {rank}, {action}, "
                        f"{problem}.\n{format_grid(schedule, marks={rank: step})}"
                    )
                seen.add(action)
        return [[names[action] for action in row] for row in schedule.ranks]

    def decode(self, orders: Sequence[Sequence[int]], *, name: str) -> Schedule:
        """Translate rows of names into a schedule."""
        rows = tuple(tuple(self.actions[action] for action in order) for order in orders)
        return Schedule(rows, name=name)

    def _misplaced(self, name: int | None, action: Action, rank: int) -> str:
        if name is None:
            return f"is not part of the work: {self._absence(action)}"
        if self.ranks[name] != rank:
            return f"belongs to rank {self.ranks[name]}; move it to that rank's row"
        return ""

    def _absence(self, action: Action) -> str:
        if action.microbatch >= self.num_microbatches:
            return f"there are {self.num_microbatches} microbatches"
        first = self.offsets[action.microbatch]
        ends = (*self.offsets, len(self.actions))
        num_segments = (ends[action.microbatch + 1] - first) // 2
        if action.segment >= num_segments:
            return f"microbatch {action.microbatch} has {num_segments} segments"
        if action.kind == "F":
            return f"the forward of microbatch {action.microbatch} was already executed; drop it"
        return "this segment has no backward here; drop it"


def build_work(
    graphs: Sequence[SegmentGraph],
    *,
    forward_done: Set[int] = frozenset(),
    forward_only: bool = False,
) -> Work:
    """Number the actions of a step.

    Args:
        graphs: One graph per microbatch; the same object may be repeated.
        forward_done: Microbatches whose forward was already executed on all ranks.
        forward_only: Whether to leave out all backwards.

    Raises:
        ScheduleError: If there is no microbatch, graphs differ in their number of ranks, or
            ``forward_done`` names a microbatch that does not exist.
    """
    _check_request(graphs, forward_done)
    templates = {id(graph): _template(graph, forward_only=forward_only) for graph in graphs}
    offsets: list[int] = []
    actions: list[Action] = []
    needs: list[tuple[Need, ...]] = []
    todo: list[int] = []
    for microbatch, graph in enumerate(graphs):
        first = len(actions)
        done = microbatch in forward_done
        offsets.append(first)
        for local, (exists, local_needs) in enumerate(templates[id(graph)]):
            is_backward = local % 2
            actions.append(Action("B" if is_backward else "F", microbatch, local // 2))
            pending = [need for need in local_needs if need[0] % 2 or not done]
            needs.append(tuple([(first + need, delay) for need, delay in pending]))
            if exists and (is_backward or not done):
                todo.append(first + local)
    segments = [segment for graph in graphs for segment in graph.segments]
    return Work(
        num_ranks=graphs[0].num_ranks,
        offsets=tuple(offsets),
        actions=tuple(actions),
        ranks=tuple(rank for segment in segments for rank in (segment.rank,) * 2),
        costs=tuple(c for seg in segments for c in (seg.forward_cost, seg.backward_cost)),
        needs=tuple(needs),
        todo=tuple(todo),
    )


def _check_request(graphs: Sequence[SegmentGraph], forward_done: Iterable[int]) -> None:
    if not graphs:
        raise ScheduleError("No segment graph was given; a step has at least one microbatch.")
    sizes = sorted({graph.num_ranks for graph in graphs})
    if len(sizes) > 1:
        raise ScheduleError(
            f"The microbatches' graphs have {sizes} ranks; all must have the same num_ranks."
        )
    unknown = sorted(m for m in forward_done if not 0 <= m < len(graphs))
    if unknown:
        raise ScheduleError(
            f"forward_done names microbatches {unknown}, but there are {len(graphs)} "
            f"(0 to {len(graphs) - 1})."
        )


def _template(graph: SegmentGraph, *, forward_only: bool) -> list[tuple[bool, list[Need]]]:
    """For each local name, whether the action exists and what it waits for (local names)."""
    waits: list[dict[int, float]] = [{} for _ in range(2 * len(graph.segments))]
    previous: dict[int, int] = {}
    for index, segment in enumerate(graph.segments):
        if segment.rank in previous:
            waits[2 * index][2 * previous[segment.rank]] = 0.0
        previous[segment.rank] = index
    for index, segment in enumerate(graph.segments):
        waits[2 * index + 1][2 * previous[segment.rank]] = 0.0
    for edge in graph.edges:
        delay = edge.cost if graph.is_message(edge) else 0.0
        _wait(waits[2 * edge.target], 2 * edge.source, delay)
        if edge.has_gradient:
            _wait(waits[2 * edge.source + 1], 2 * edge.target + 1, delay)
    return [
        (
            not local % 2 or (graph.segments[local // 2].has_backward and not forward_only),
            list(waiting.items()),
        )
        for local, waiting in enumerate(waits)
    ]


def _wait(waiting: dict[int, float], need: int, delay: float) -> None:
    waiting[need] = max(delay, waiting.get(need, 0.0))
