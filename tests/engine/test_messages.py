"""Both sides of a pair of ranks see the same messages in the same order."""

from __future__ import annotations

import re

import pytest

from lightning_smp.engine.messages import (
    backward_order,
    forward_messages,
    gradient_messages,
    segment_graph,
    sent,
)
from lightning_smp.errors import ScheduleError
from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.program import Program
from lightning_smp.schedule import Action, make_schedule
from tests.test_program import edge, entry


def u_program() -> Program:
    """Rank 0, rank 1, rank 0 again, with a value carried over on rank 0."""
    program = Program(
        entries=[entry(0), entry(1), entry(0, (0,))],
        edges=[
            edge(0, (0, 0), (1, 0), produced=0, consumed=1),
            edge(1, (1, 0), (0, 1), produced=1, consumed=2),
            edge(2, (0, 0), (0, 1), produced=0, consumed=2),
        ],
        segments=[(0, 0), (1, 0), (0, 1)],
        loss_segments=((0, 1),),
    )
    program.seal()
    program.resolve_gradients(
        [{"edges": {0: [], 2: []}, "loss": [1, 2]}, {"edges": {1: [0]}, "loss": None}]
    )
    program.forward_messages = forward_messages(program)
    program.gradient_messages = gradient_messages(program)
    return program


def test_messages_of_each_segment() -> None:
    program = u_program()
    forward = {node: [e.index for e in edges] for node, edges in program.forward_messages.items()}
    backward = {node: [e.index for e in edges] for node, edges in program.gradient_messages.items()}
    assert forward == {(0, 0): [0], (1, 0): [1]}
    assert backward == {(1, 0): [0], (0, 1): [1]}


def test_backward_runs_from_the_loss() -> None:
    assert backward_order(u_program()) == [(0, 1), (1, 0), (0, 0)]


def test_graph_for_the_scheduler() -> None:
    program = u_program()
    program.entries[1].cost = 2.0
    graph = segment_graph(program, 2)
    assert [s.rank for s in graph.segments] == [0, 1, 0]
    assert [s.forward_cost for s in graph.segments] == [0.0, 2.0, 0.0]
    assert [s.backward_cost for s in graph.segments] == [0.0, 4.0, 0.0]
    pairs = {(e.source, e.target): e.has_gradient for e in graph.edges}
    assert pairs == {(0, 1): True, (1, 2): True, (0, 2): True}


def test_graph_knows_what_a_backward_costs_and_keeps() -> None:
    program = u_program()
    for index, program_entry in enumerate(program.entries):
        program_entry.cost = 2.0
        program_entry.key = (("unit", index, 0), *program_entry.key[1:])
    cost = AtomCost(calls=2, forward_s=1.0, backward_s=1.5, saved_bytes=600 * 2**20)
    segments = segment_graph(program, 2, {0: cost, 1: cost}).segments
    assert [s.backward_cost for s in segments] == [3.0, 3.0, 4.0]
    assert [s.memory for s in segments] == [300, 300, 0]  # MiB, as in activation_limit_mb
    # The first segment sends no gradient: all of its backward may wait.
    assert [s.weight_cost for s in segments] == [3.0, 1.0, 2.0]


def test_second_parts_send_nothing() -> None:
    program = u_program()
    first, second = (list(sent(Action(kind, 0, 1), [program])) for kind in ("I", "W"))
    assert [(node, key) for node, key, _ in first] == [((0, 0), ("g", 0, 0))]
    assert second == []


def test_the_least_limit_that_is_named_is_enough() -> None:
    program = u_program()
    cost = AtomCost(calls=1, forward_s=1.0, backward_s=2.0, saved_bytes=1_234_567)
    for index, program_entry in enumerate(program.entries):
        program_entry.key = (("unit", index, 0), *program_entry.key[1:])
    graphs = [segment_graph(program, 2, dict.fromkeys(range(9), cost))] * 3
    with pytest.raises(ScheduleError, match=r"the least found is ([\d.]+)\. Raise") as error:
        make_schedule(graphs, "interleaved", memory_limit=1e-3)
    least = re.search(r"least found is ([\d.]+)\.", str(error.value))
    assert least is not None
    make_schedule(graphs, "interleaved", memory_limit=float(least[1]))
