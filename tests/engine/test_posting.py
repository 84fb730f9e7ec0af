"""Receives are posted ahead of need, and hosts that wait for their devices never meet in a circle.

``plays`` is the worst case: before each action a host waits until all that it has issued is done,
as the CUDA allocator may make it, and a message is done once both sides are issued, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_smp.engine.messages import forward_messages, gradient_messages, segment_graph, sent
from lightning_smp.engine.posting import Receive, earlier, one_order, receives_before
from lightning_smp.program import Program
from lightning_smp.schedule import Action, Schedule, make_schedule
from tests.test_program import edge, entry


def chain(ranks: int, chunks: int, skips: Sequence[tuple[int, int]] = ()) -> Program:
    """Segments that pass the ranks ``chunks`` times; ``skips`` are further edges."""
    nodes = [(k % ranks, k // ranks) for k in range(ranks * chunks)]
    pairs = [*((k, k + 1) for k in range(len(nodes) - 1)), *skips]
    program = Program(
        entries=[entry(node[0], (node[0],) if node[1] else ()) for node in nodes],
        edges=[
            edge(index, nodes[a], nodes[b], produced=a, consumed=b)
            for index, (a, b) in enumerate(pairs)
        ],
        segments=nodes,
        loss_segments=(nodes[-1],),
    )
    program.seal()
    reports = []
    for rank in range(ranks):
        into = {n: [i for i, (_, b) in enumerate(pairs) if nodes[b] == n] for n in nodes}
        edges = {i: into[nodes[a]] for i, (a, _) in enumerate(pairs) if nodes[a][0] == rank}
        loss = into[nodes[-1]] if nodes[-1][0] == rank else None
        reports.append({"edges": edges, "loss": loss})
    program.resolve_gradients(reports)
    program.forward_messages = forward_messages(program)
    program.gradient_messages = gradient_messages(program)
    return program


class Rank:
    """What one rank has issued."""

    def __init__(self, row: Sequence[Action], receives: Sequence[Sequence[Receive]]) -> None:
        self.row, self.receives = row, receives
        self.posted: dict[int, list[object]] = {}  # by the sender, in order
        self.sends: dict[int, list[object]] = {}  # by the receiver, in order
        self.cursor = 0
        self.is_ready = False  # the receives of the next action are posted


def plays(
    rows: Sequence[Sequence[Action]],
    receives: Sequence[Sequence[Sequence[Receive]]],
    programs: Sequence[Program],
) -> bool:
    """Whether the ranks come to the end of their rows."""
    ranks = [Rank(row, before) for row, before in zip(rows, receives, strict=True)]
    moved = True
    while moved:
        moved = any([_moves(ranks, number, programs) for number in range(len(ranks))])
    return all(rank.cursor == len(rank.row) for rank in ranks)


def _moves(ranks: list[Rank], number: int, programs: Sequence[Program]) -> bool:
    rank = ranks[number]
    if rank.cursor == len(rank.row):
        return False
    if not rank.is_ready:
        for receive in rank.receives[rank.cursor]:
            rank.posted.setdefault(receive.sender, []).append(receive.key)
        rank.is_ready = True
        return True
    for sender, keys in rank.posted.items():
        given = ranks[sender].sends.get(number, [])
        assert given[: len(keys)] == keys[: len(given)]  # both sides have one order
        if len(given) < len(keys):
            return False
    for receiver, keys in rank.sends.items():
        if len(ranks[receiver].posted.get(number, [])) < len(keys):
            return False
    for node, key, _ in sent(rank.row[rank.cursor], programs):
        rank.sends.setdefault(node[0], []).append(key)
    rank.cursor += 1
    rank.is_ready = False
    return True


def ahead_of_need(
    schedule: Schedule, programs: Sequence[Program], ahead: int
) -> list[list[list[Receive]]]:
    """The receives as they would be with some posted ahead of the one that is needed."""
    order = one_order(schedule.ranks, programs)
    tables = [receives_before(order, programs, rank) for rank in range(schedule.num_ranks)]
    found = []
    for rank, table in enumerate(tables):
        coming: dict[int, list[Receive]] = {}
        for receive in (receive for receives in table for receive in receives):
            coming.setdefault(receive.sender, []).append(receive)
        done = dict.fromkeys(coming, 0)
        new = []
        for action in schedule.ranks[rank]:
            now = []
            for sender, receives in coming.items():
                needed = [i for i, r in enumerate(receives) if _needs(action, r, programs)]
                upto = max(done[sender], max(needed, default=-1) + 1 + ahead if needed else 0)
                now += receives[done[sender] : upto]
                done[sender] = min(upto, len(receives))
            new.append(now)
        found.append(new)
    return found


def _needs(action: Action, receive: Receive, programs: Sequence[Program]) -> bool:
    kind, m, index = receive.key
    edge = programs[m].edges[index]
    node = programs[action.microbatch].segments[action.segment]
    wanted = edge.target if kind == "f" else edge.source
    return m == action.microbatch and node == wanted and (action.kind == "F") == (kind == "f")


_U = [(0, 3), (1, 2)]
CASES = [
    pytest.param(p, v, skips, m, pipeline, id=f"pp{p}-v{v}-{len(skips)}skips-m{m}-{pipeline}")
    for p, v, skips in [
        (2, 1, []), (4, 1, []), (2, 2, []), (2, 2, _U), (3, 2, [(0, 4), (1, 5)]), (4, 3, [(2, 9)]),
        (2, 4, [(0, 7), (1, 6), (2, 5)]),
    ]
    for m in (1, 4, 7)
    for pipeline in ("simple", "interleaved", "zero_bubble")
]  # fmt: skip


@pytest.mark.parametrize(("p", "v", "skips", "m", "pipeline"), CASES)
def test_hosts_that_wait_for_their_devices_come_to_the_end(
    p: int, v: int, skips: list[tuple[int, int]], m: int, pipeline: str
) -> None:
    programs = [chain(p, v, skips)] * m
    schedule = make_schedule([segment_graph(programs[0], p)] * m, pipeline)
    order = one_order(schedule.ranks, programs)
    rows = [[action for rank, action in order if rank == r] for r in range(p)]
    assert rows == [list(row) for row in schedule.ranks]
    tables = [receives_before(order, programs, rank) for rank in range(p)]
    for table, row in zip(tables, rows, strict=True):
        posted: list[Receive] = []
        for action, receives in zip(row, table, strict=True):
            posted += receives
            needed = {r for r in _all(tables) if _needs(action, r, programs)} & set(_all([table]))
            assert needed <= set(posted)
    assert plays(rows, tables, programs)


def _all(tables: Sequence[Sequence[Sequence[Receive]]]) -> list[Receive]:
    return [receive for table in tables for receives in table for receive in receives]


def test_more_ahead_would_lock_up() -> None:
    """The fault that this is for: a fixed number of receives ahead of the one that is needed."""
    programs = [chain(2, 2)] * 4
    schedule = make_schedule([segment_graph(programs[0], 2)] * 4, "interleaved")
    assert not plays(schedule.ranks, ahead_of_need(schedule, programs, 4), programs)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 8)])
def test_receives_that_are_posted_ahead_of_need_spin_beside_forwards(p: int, m: int) -> None:
    programs = [chain(p, 1)] * m
    schedule = make_schedule([segment_graph(programs[0], p)] * m, "interleaved")
    order = one_order(schedule.ranks, programs)
    early = [
        action.kind
        for rank in range(p)
        for action, receives in zip(
            schedule.ranks[rank], receives_before(order, programs, rank), strict=True
        )
        for receive in receives if not _needs(action, receive, programs)
    ]  # fmt: skip
    assert early
    assert set(early) == {"F"}


@pytest.mark.parametrize("ahead", [0, 1, 2, 99])
def test_posting_earlier_keeps_the_order_and_leaves_nothing_out(ahead: int) -> None:
    programs = [chain(2, 2)] * 4
    schedule = make_schedule([segment_graph(programs[0], 2)] * 4, "interleaved")
    table = receives_before(one_order(schedule.ranks, programs), programs, 1)
    shifted = earlier(table, ahead)
    assert len(shifted) == len(table)
    assert _all([shifted]) == _all([table])
    for position in range(len(table)):
        posted = _all([shifted[: position + 1]])
        at_least = _all([table[: position + ahead + 1]])
        assert posted[: len(at_least)] == at_least
        at_most = _all([table[: position + max(2 * ahead, 1)]])
        assert posted == at_most[: len(posted)]
