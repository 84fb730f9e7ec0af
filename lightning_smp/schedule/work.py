"""All actions of one step numbered, with what each waits for: the form the algorithms run on.

Rules of waiting, the only place that states them:

* the forward of a segment waits for the forwards of the segments it consumes, and for the forward
  of the previous segment of its rank (a rank's forward of a microbatch is one run of the program);
* the backward of a segment waits for all forwards of its microbatch on its rank (only then does the
  rank know that the microbatch followed its program), and for the backwards of the segments that
  send it a gradient;
* where a backward is split, all this holds for its first part (I), which sends the gradients, and
  the second part (W) waits for the first alone;
* a transfer between ranks takes the edge's cost, in either direction.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Action, Schedule, format_grid
from lightning_smp.schedule.graph import SegmentGraph

__all__ = [
    "BACKWARD",
    "FORWARD",
    "KINDS",
    "WEIGHT",
    "Need",
    "Work",
    "build_work",
    "every_split",
    "split_by",
]

FORWARD, BACKWARD, WEIGHT = range(3)
KINDS = 3
"""Names of one segment: ``name % KINDS`` is FORWARD, BACKWARD (whole or I) or WEIGHT (W)."""

Need = tuple[int, float]
"""An action to wait for, and the time its result takes to arrive."""


@dataclass(frozen=True, slots=True)
class Work:
    """The actions of a step under integer names, as parallel lists.

    The forward of segment ``s`` of microbatch ``m`` is ``offsets[m] + 3 * s``, its backward (or,
    where it is split, its I) the next integer, its W the one after. Names of actions that are not
    part of the step exist, but are not in ``todo``.

    Attributes:
        num_ranks: Number of pipeline ranks.
        offsets: First name of each microbatch.
        actions: The action behind each name.
        ranks: The rank that executes it.
        costs: Its duration.
        memory: What its segment's forward keeps alive.
        needs: What it waits for.
        todo: Names to execute, ascending.
    """

    num_ranks: int
    offsets: tuple[int, ...]
    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    costs: tuple[float, ...]
    memory: tuple[float, ...]
    needs: tuple[tuple[Need, ...], ...]
    todo: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return len(self.offsets)

    def is_last_use(self, name: int) -> bool:
        """Tell whether the action frees what its segment's forward keeps alive."""
        kind = name % KINDS
        return kind == WEIGHT or (kind == BACKWARD and self.actions[name].kind == "B")

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
        num_segments = (ends[action.microbatch + 1] - first) // KINDS
        if action.segment >= num_segments:
            return f"microbatch {action.microbatch} has {num_segments} segments"
        split = self.actions[first + KINDS * action.segment + BACKWARD].kind == "I"
        if split and action.kind == "B":
            return "its two parts, I and W, are listed too; drop either"
        return "this segment has no backward here; drop it"


def every_split(graphs: Sequence[SegmentGraph]) -> frozenset[tuple[int, int]]:
    """Name the (microbatch, segment) of every backward that can be split."""
    return frozenset(
        (microbatch, index)
        for microbatch, graph in enumerate(graphs)
        for index, segment in enumerate(graph.segments)
        if segment.can_split
    )


def split_by(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Name the (microbatch, segment) of every backward that the schedule splits."""
    return frozenset(
        (action.microbatch, action.segment)
        for row in schedule.ranks
        for action in row
        if action.kind in ("I", "W")
    )


def build_work(
    graphs: Sequence[SegmentGraph],
    *,
    forward_only: bool = False,
    split: Set[tuple[int, int]] = frozenset(),
) -> Work:
    """Number the actions of a step.

    Args:
        graphs: One graph per microbatch; the same object may be repeated.
        forward_only: Whether to leave out all backwards.
        split: (microbatch, segment) of the backwards that are done in two parts.

    Raises:
        ScheduleError: If there is no microbatch, or graphs differ in their number of ranks.
    """
    _check_request(graphs)
    templates = {id(graph): _template(graph) for graph in graphs}
    offsets: list[int] = []
    actions: list[Action] = []
    costs: list[float] = []
    needs: list[tuple[Need, ...]] = []
    todo: list[int] = []
    for microbatch, graph in enumerate(graphs):
        first = len(actions)
        offsets.append(first)
        for index, segment in enumerate(graph.segments):
            name = first + KINDS * index
            is_split = (microbatch, index) in split
            actions += _actions(microbatch, index, is_split=is_split)
            weight = segment.weight_cost if is_split else 0.0
            costs += (segment.forward_cost, segment.backward_cost - weight, weight)
            todo.append(name + FORWARD)
            if segment.has_backward and not forward_only:
                todo += (name + BACKWARD, name + WEIGHT) if is_split else (name + BACKWARD,)
        for local_needs in templates[id(graph)]:
            needs.append(tuple([(first + need, delay) for need, delay in local_needs]))
    segments = [segment for graph in graphs for segment in graph.segments]
    return Work(
        num_ranks=graphs[0].num_ranks,
        offsets=tuple(offsets),
        actions=tuple(actions),
        ranks=tuple(rank for segment in segments for rank in (segment.rank,) * KINDS),
        costs=tuple(costs),
        memory=tuple(memory for seg in segments for memory in (seg.memory,) * KINDS),
        needs=tuple(needs),
        todo=tuple(todo),
    )


def _actions(microbatch: int, segment: int, *, is_split: bool) -> tuple[Action, ...]:
    return (
        Action("F", microbatch, segment),
        Action("I" if is_split else "B", microbatch, segment),
        Action("W", microbatch, segment),
    )


def _check_request(graphs: Sequence[SegmentGraph]) -> None:
    if not graphs:
        raise ScheduleError("No segment graph was given; a step has at least one microbatch.")
    sizes = sorted({graph.num_ranks for graph in graphs})
    if len(sizes) > 1:
        raise ScheduleError(
            f"The microbatches' graphs have {sizes} ranks; all must have the same num_ranks."
        )


def _template(graph: SegmentGraph) -> list[list[Need]]:
    """For each local name, what it waits for (local names)."""
    waits: list[dict[int, float]] = [{} for _ in range(KINDS * len(graph.segments))]
    last: dict[int, int] = {}
    for index, segment in enumerate(graph.segments):
        name = KINDS * index
        if segment.rank in last:
            waits[name + FORWARD][last[segment.rank]] = 0.0
        last[segment.rank] = name + FORWARD
        waits[name + WEIGHT][name + BACKWARD] = 0.0
    for index, segment in enumerate(graph.segments):
        waits[KINDS * index + BACKWARD][last[segment.rank]] = 0.0
    for edge in graph.edges:
        delay = edge.cost if graph.is_message(edge) else 0.0
        source, target = KINDS * edge.source, KINDS * edge.target
        _wait(waits[target + FORWARD], source + FORWARD, delay)
        if edge.has_gradient:
            _wait(waits[source + BACKWARD], target + BACKWARD, delay)
    return [list(waiting.items()) for waiting in waits]


def _wait(waiting: dict[int, float], need: int, delay: float) -> None:
    waiting[need] = max(delay, waiting.get(need, 0.0))
