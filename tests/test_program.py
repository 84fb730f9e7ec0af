"""Programs as data: segments never form a cycle, gradients are followed, sends are assigned."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smp.engine.messages import forward_messages
from lightning_smp.program import (
    Edge,
    Entry,
    Outcome,
    Program,
    SegmentNode,
    SegmentTracker,
    TensorSpec,
    fingerprint,
    writes_out_of_order,
)

SPEC = TensorSpec((2, 3), (3, 1), torch.float32, True, True)
_NUM_RANKS = 4

# (sender, receiver): the value was made in the sender's segment of that moment, or an earlier one.
Transfers = list[tuple[int, int, int]]
transfers = st.lists(
    st.tuples(st.integers(0, _NUM_RANKS - 1), st.integers(0, _NUM_RANKS - 1), st.integers(0, 3)),
    max_size=25,
)


def edge(
    index: int, source: SegmentNode, target: SegmentNode, *, produced: int = 0, consumed: int = 1,
    spec: TensorSpec = SPEC,
) -> Edge:  # fmt: skip
    return Edge(index, index, source, target, produced, consumed, spec, 0)


def entry(home: int = 0, new_segments: tuple[int, ...] = ()) -> Entry:
    return Entry(("call",), home, Outcome(["c", None], ()), (), new_segments)


def tracked(moves: Transfers) -> tuple[SegmentTracker, list[Edge]]:
    tracker, edges = SegmentTracker(_NUM_RANKS), []
    for sender, receiver, age in moves:
        if sender == receiver:
            continue
        source = (sender, max(0, tracker.current[sender] - age))
        tracker.connect(source, receiver)
        edges.append(edge(len(edges), source, tracker.node(receiver)))
    return tracker, edges


@given(transfers)
def test_order_is_topological(moves: Transfers) -> None:
    tracker, edges = tracked(moves)
    order = tracker.order()  # asserts that there is no cycle
    place = {node: number for number, node in enumerate(order)}
    assert len(place) == len(order) == sum(last + 1 for last in tracker.current)
    assert all(place[e.source] < place[e.target] for e in edges)
    for rank, last in enumerate(tracker.current):
        places = [place[rank, ordinal] for ordinal in range(last + 1)]
        assert places == sorted(places)


@given(transfers)
def test_new_segment_only_where_needed(moves: Transfers) -> None:
    tracker = SegmentTracker(_NUM_RANKS)
    for sender, receiver, age in moves:
        if sender != receiver:
            source = (sender, max(0, tracker.current[sender] - age))
            would_cycle = tracker.leads(tracker.node(receiver), source)
            assert tracker.connect(source, receiver) == would_cycle


@given(transfers)
def test_resumed_tracker_goes_on_alike(moves: Transfers) -> None:
    tracker, edges = tracked(moves)
    resumed = SegmentTracker.resumed(list(tracker.current), edges)
    assert resumed.order() == tracker.order()
    for sender in range(_NUM_RANKS):
        for receiver in range(_NUM_RANKS):
            pair = tracker.node(sender), tracker.node(receiver)
            assert resumed.leads(*pair) == tracker.leads(*pair)


def test_chain_has_one_segment_a_rank() -> None:
    tracker, _ = tracked([(0, 1, 0), (1, 2, 0), (2, 3, 0)])
    assert tracker.order() == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_way_back_starts_a_segment_and_a_skip_does_not() -> None:
    tracker, _ = tracked([(0, 1, 0), (1, 0, 0), (0, 2, 1), (0, 2, 0)])
    assert tracker.current == [1, 0, 0, 0]


def test_departures_are_in_order_and_messages_where_there_are_elements() -> None:
    empty = TensorSpec((0, 3), (3, 1), torch.float32, True, True)
    edges = [
        edge(0, (0, 0), (1, 0), produced=1),
        edge(1, (0, 0), (0, 1), produced=1),  # carried over
        edge(2, (0, 0), (2, 0), produced=1),
        edge(3, (0, 0), (1, 0), produced=1, spec=empty),
        edge(4, (1, 0), (2, 0), produced=0),
    ]
    program = Program(entries=[entry(), entry()], edges=edges)
    program.seal()
    assert [[e.index for e in call.departures] for call in program.entries] == [[4], [0, 2, 3]]
    messages = forward_messages(program)
    assert [e.index for e in messages[0, 0]] == [0, 2]
    assert [e.index for e in messages[1, 0]] == [4]


def test_gradients_are_followed_through_all_ranks() -> None:
    edges = [
        edge(0, (0, 0), (1, 0)), edge(1, (1, 0), (2, 0)), edge(2, (0, 0), (2, 0)),
        edge(3, (1, 0), (0, 1)),
    ]  # fmt: skip
    program = Program(edges=edges, loss_segments=((2, 0),))
    program.resolve_gradients(
        [{"edges": {}, "loss": None}, {"edges": {1: [0], 3: [0]}, "loss": None},
         {"edges": {}, "loss": [1]}]
    )  # fmt: skip
    assert program.gradient_edges == {0, 1}
    assert program.backward_segments == {(0, 0), (1, 0), (2, 0)}


def test_no_loss_no_gradients() -> None:
    program = Program(edges=[edge(0, (0, 0), (1, 0))])
    program.resolve_gradients([{"edges": {0: []}, "loss": None}])
    assert program.gradient_edges == program.backward_segments == frozenset()


def test_loss_that_needs_no_edge_still_has_a_backward() -> None:
    program = Program(loss_segments=((1, 0),))
    program.resolve_gradients([{"edges": {}, "loss": []}])
    assert program.backward_segments == {(1, 0)}


def test_fingerprint_depends_on_keys_and_their_order() -> None:
    assert fingerprint([("a", 1)]) == fingerprint([("a", 1)])
    different = {fingerprint(keys) for keys in ([], ["a"], ["a", "b"], ["b", "a"], [("a", "b")])}
    assert len(different) == 5


def test_size_in_bytes() -> None:
    assert SPEC.num_bytes == 24
    assert TensorSpec((), (), torch.float64, True, False).num_bytes == 8


def test_buffers_written_in_several_segments_lose_their_order() -> None:
    def call(unit: int, home: int, new: tuple[int, ...] = (), *, writes: bool = True) -> Entry:
        outcome = Outcome(["c", None], (), writes=writes)
        return Entry((("unit", unit, 0),), home, outcome, (), new)

    twice_in_one = [call(0, 0), call(0, 0), call(1, 1)]
    assert not writes_out_of_order(twice_in_one)
    assert writes_out_of_order([call(0, 0), call(1, 1), call(0, 0, (0,))])
    assert not writes_out_of_order([call(0, 0), call(1, 1), call(2, 0, (0,))])
    reads = [call(0, 0), call(0, 0, (0,), writes=False)]
    assert not writes_out_of_order(reads)
