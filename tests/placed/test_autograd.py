"""Segments as islands of autograd: cut where values enter, joined by gradients."""

from __future__ import annotations

import weakref

import pytest
import torch

from lightning_smp.placed.autograd import Segment, reachable_edges


def test_two_segments_give_the_gradients_of_one_graph() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)
    (torch.tanh(x @ weight) @ weight).sum().backward()
    expected, weight.grad = weight.grad, None

    first, second = Segment(), Segment()
    sent = torch.tanh(x @ weight)
    first.leave(7, sent)
    received = second.enter(7, sent.detach())
    second.add_root((received @ weight).sum(), torch.ones(()))
    second.backward({})
    first.backward({7: second.gradients[7]})
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("is_shared", [False, True])
def test_arrival_may_be_changed_in_place(is_shared: bool) -> None:
    segment = Segment()
    value = segment.enter(0, torch.ones(3), is_shared=is_shared)
    assert value.requires_grad
    assert not value.is_leaf
    value.mul_(2)
    value[0] = 5
    segment.add_root((value * 3).sum(), torch.ones(()))
    segment.backward({})
    assert segment.gradients[0].tolist() == [0, 6, 6]


def test_arrival_without_grad_mode_still_has_a_graph() -> None:
    with torch.no_grad():
        value = Segment().enter(0, torch.ones(3))
    assert value.requires_grad


def test_changes_of_a_shared_storage_are_seen_by_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    source = weight.exp()  # keeps its result for the backward
    value = Segment().enter(0, source.detach(), is_shared=True)
    assert not value.is_leaf
    value.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        source.sum().backward()


@pytest.mark.parametrize("is_shared", [False, True])
def test_gradient_is_not_that_of_a_parameter(is_shared: bool) -> None:
    weight = torch.ones(3, requires_grad=True)
    segment = Segment()
    value = segment.enter(0, torch.ones(3), is_shared=is_shared)
    segment.leave(1, value + weight)  # autograd has one gradient for both
    segment.backward({1: torch.ones(3)})
    assert weight.grad is not None
    weight.grad += 5  # as the next microbatch does
    assert segment.gradients[0].tolist() == [1, 1, 1]


def test_unused_arrival_gets_no_gradient() -> None:
    segment = Segment()
    used, _ = segment.enter(0, torch.ones(2)), segment.enter(1, torch.ones(2))
    segment.add_root(used.sum(), torch.ones(()))
    segment.backward({})
    assert list(segment.gradients) == [0]


def test_value_that_left_may_be_freed() -> None:
    weight = torch.ones(3, requires_grad=True)
    segment = Segment()
    sent = weight * 2
    segment.leave(0, sent)
    ref = weakref.ref(sent)
    del sent
    assert ref() is None
    segment.backward({0: torch.ones(3)})
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]


def test_value_without_gradient_does_not_leave() -> None:
    segment = Segment()
    segment.leave(0, torch.ones(3))
    assert segment.left == {}
    segment.backward({})
    assert segment.gradients == {}


def test_reachable_edges_stay_in_their_segment() -> None:
    segment, other = Segment(), Segment()
    a, b, c = (segment.enter(edge, torch.ones(2)) for edge in (3, 1, 2))
    foreign = other.enter(9, torch.ones(2))
    segment.leave(5, a * b + foreign)
    assert reachable_edges([segment.left[5]], segment) == [1, 3]
    assert reachable_edges([c.sum(), a], segment) == [2, 3]
    assert reachable_edges([segment.left[5]], other) == [9]
    assert reachable_edges([torch.ones(1)], segment) == []


def test_graph_may_be_kept() -> None:
    segment = Segment()
    value = segment.enter(0, torch.ones(2))
    segment.add_root((value**2).sum(), torch.ones(()))
    for _ in range(2):
        segment.backward({}, retain_graph=True)
        assert segment.gradients[0].tolist() == [2, 2]
