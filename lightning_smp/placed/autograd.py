"""Segments of one rank as islands of autograd.

Values enter a segment as outputs of an `_Arrival` node and leave it as gradient edges, so that a
segment's backward is one `torch.autograd.backward` that never enters another segment, and a
stage's outputs need not stay alive until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_smp.placed.splitting import LaterPart, backward_of_inputs, run_autograd

__all__ = ["Segment", "arrive", "reachable_edges"]


class _Arrival(torch.autograd.Function):
    """Hands a value into a segment; its gradient lands in the segment's ``gradients``.

    The payload does not require a gradient, so the result is no leaf and no view of one: the
    user may change it in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Any, payload: Any, segment: Segment, edge: int) -> Any:
        ctx.segment, ctx.edge = segment, edge
        ctx.set_materialize_grads(False)
        return payload.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is not None:
            held = ctx.segment.gradients.get(ctx.edge)
            ctx.segment.gradients[ctx.edge] = gradient if held is None else held + gradient
        return None, None, None, None


_enter = _Arrival.apply
"""Bound here, before a step reroutes ``Function.apply`` for the user's functions."""


class Segment:
    """What entered and left one segment of one microbatch on this rank.

    Attributes:
        anchor: makes what enters require a gradient; a leaf that never gets one.
        entered: edges whose values entered.
        left: edge -> where its gradient must be put in.
        gradients: edge -> gradient of a value that entered, after the backward.
        roots: where the backward starts, with its gradients: losses that were made here.
    """

    __slots__ = ("anchor", "entered", "gradients", "left", "roots")

    def __init__(self, anchor: torch.Tensor) -> None:
        self.anchor = anchor
        self.entered: list[int] = []
        self.left: dict[int, GradientEdge] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.roots: list[tuple[GradientEdge | torch.Tensor, torch.Tensor]] = []

    def leave(self, edge: int, tensor: torch.Tensor) -> None:
        """Notes that a value leaves; it may be freed afterwards."""
        if tensor.requires_grad:
            self.left[edge] = get_gradient_edge(tensor)

    def add_root(self, loss: torch.Tensor, gradient: torch.Tensor) -> None:
        """Notes a loss that was made here; what is done to it afterwards does not matter."""
        # Without a graph the tensor itself: torch's own error follows in the backward.
        root = get_gradient_edge(loss) if loss.requires_grad else loss
        self.roots.append((root, gradient))

    def backward(self, seeds: dict[int, torch.Tensor], *, retain_graph: bool = False) -> None:
        """Runs the segment's backward.

        Args:
            seeds: edge -> gradient of a value that left.
            retain_graph: as in torch.
        """
        roots, gradients = self._start(seeds)
        if roots:
            run_autograd(roots, gradients, keep_graph=retain_graph)

    def backward_of_inputs(self, seeds: dict[int, torch.Tensor]) -> LaterPart:
        """Runs the part of the backward that makes ``gradients``; returns the rest.

        Args:
            seeds: edge -> gradient of a value that left.
        """
        return backward_of_inputs(*self._start(seeds), self.anchor)

    def _start(self, seeds: dict[int, torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Where the backward starts, and with what."""
        self.gradients = {}
        roots: list[Any] = [self.left[edge] for edge in seeds]
        gradients = list(seeds.values())
        for root, gradient in self.roots:
            roots.append(root)
            gradients.append(gradient)
        return roots, gradients


def arrive(payload: torch.Tensor, segment: Segment, edge: int) -> torch.Tensor:
    """A tensor with the payload's numbers whose gradient is kept under ``edge``."""
    segment.entered.append(edge)
    if torch.is_grad_enabled():
        return _enter(segment.anchor, payload, segment, edge)  # type: ignore[no-any-return]
    with torch.enable_grad():
        return _enter(segment.anchor, payload, segment, edge)  # type: ignore[no-any-return]


def reachable_edges(roots: Iterable[Any], segment: Segment) -> list[int]:
    """Edges that entered ``segment`` on which the roots (gradient edges or tensors) depend."""
    found: set[int] = set()
    stack = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if getattr(node, "segment", None) is segment:
            found.add(node.edge)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return sorted(found)
