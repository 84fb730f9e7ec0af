"""Segments as islands of autograd: cut where values enter, joined by gradients."""

from __future__ import annotations

import weakref

import torch

from lightning_smp.placed.autograd import Segment, arrive, reachable_edges

ANCHOR = torch.empty((), requires_grad=True)


def test_two_segments_give_the_gradients_of_one_graph() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)
    (torch.tanh(x @ weight) @ weight).sum().backward()
    expected, weight.grad = weight.grad, None

    first, second = Segment(ANCHOR), Segment(ANCHOR)
    sent = torch.tanh(x @ weight)
    first.leave(7, sent)
    received = arrive(sent.detach(), second, 7)
    second.add_root((received @ weight).sum(), torch.ones(()))
    second.backward({})
    first.backward({7: second.gradients[7]})
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


def test_arrival_may_be_changed_in_place() -> None:
    segment = Segment(ANCHOR)
    value = arrive(torch.ones(3), segment, 0)
    assert value.requires_grad
    assert not value.is_leaf
    value.mul_(2)
    value[0] = 5
    segment.add_root((value * 3).sum(), torch.ones(()))
    segment.backward({})
    assert segment.gradients[0].tolist() == [0, 6, 6]


def test_arrival_without_grad_mode_still_has_a_graph() -> None:
    with torch.no_grad():
        value = arrive(torch.ones(3), Segment(ANCHOR), 0)
    assert value.requires_grad


def test_value_that_enters_twice_gets_the_sum() -> None:
    segment = Segment(ANCHOR)
    one, two = (arrive(torch.ones(2), segment, 4) for _ in range(2))
    segment.add_root((one * 2 + two * 3).sum(), torch.ones(()))
    segment.backward({})
    assert segment.entered == [4, 4]
    assert segment.gradients[4].tolist() == [5, 5]


def test_unused_arrival_gets_no_gradient() -> None:
    segment = Segment(ANCHOR)
    used, _ = arrive(torch.ones(2), segment, 0), arrive(torch.ones(2), segment, 1)
    segment.add_root(used.sum(), torch.ones(()))
    segment.backward({})
    assert list(segment.gradients) == [0]


def test_value_that_left_may_be_freed() -> None:
    weight = torch.ones(3, requires_grad=True)
    segment = Segment(ANCHOR)
    sent = weight * 2
    segment.leave(0, sent)
    ref = weakref.ref(sent)
    del sent
    assert ref() is None
    segment.backward({0: torch.ones(3)})
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]


def test_value_without_gradient_does_not_leave() -> None:
    segment = Segment(ANCHOR)
    segment.leave(0, torch.ones(3))
    assert segment.left == {}
    segment.backward({})
    assert segment.gradients == {}


def test_reachable_edges_stay_in_their_segment() -> None:
    segment, other = Segment(ANCHOR), Segment(ANCHOR)
    a, b, c = (arrive(torch.ones(2), segment, edge) for edge in (3, 1, 2))
    foreign = arrive(torch.ones(2), other, 9)
    segment.leave(5, a * b + foreign)
    assert reachable_edges([segment.left[5]], segment) == [1, 3]
    assert reachable_edges([c.sum(), a], segment) == [2, 3]
    assert reachable_edges([segment.left[5]], other) == [9]
    assert reachable_edges([torch.ones(1)], segment) == []


def test_graph_may_be_kept() -> None:
    segment = Segment(ANCHOR)
    value = arrive(torch.ones(2), segment, 0)
    segment.add_root((value**2).sum(), torch.ones(()))
    for _ in range(2):
        segment.backward({}, retain_graph=True)
        assert segment.gradients[0].tolist() == [2, 2]
