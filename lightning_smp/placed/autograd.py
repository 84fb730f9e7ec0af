"""Segments of one rank as islands of autograd.

Values enter a segment as leaves and leave it as gradient edges, so that a segment's backward is one
`torch.autograd.backward` that never enters another segment, and a stage's outputs need not stay
alive until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_smp.placed.splitting import LaterPart, backward_of_inputs, run_autograd

__all__ = ["Segment", "reachable_edges", "storage_uses"]

_as_new = torch.ops.aten._unsafe_view.default
"""A tensor on the same storage that autograd takes for a new one."""


class _Carry(torch.autograd.Function):
    """The same, but autograd sees when others who use the storage change its numbers."""

    @staticmethod
    def forward(ctx: Any, leaf: Any, payload: Any) -> Any:
        return payload.detach()  # of what needs no gradient, so that the result is no view

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


_carry = _Carry.apply
"""Bound here, before a step reroutes ``Function.apply`` for the user's functions."""


class Segment:
    """What entered and left one segment of one microbatch on this rank.

    Attributes:
        carried: value -> where its gradient must be put in, if it has gone on into a later segment.
        entered: edge -> the leaf that its value entered by.
        left: edge -> where its gradient must be put in.
        gradients: edge -> gradient of a value that entered, after the backward.
        roots: where the backward starts, with its gradients: losses that were made here.
    """

    __slots__ = ("carried", "entered", "gradients", "left", "roots")

    def __init__(self) -> None:
        self.carried: dict[int, GradientEdge] = {}
        self.entered: dict[int, torch.Tensor] = {}
        self.left: dict[int, GradientEdge] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.roots: list[tuple[GradientEdge | torch.Tensor, torch.Tensor]] = []

    def enter(
        self, edge: int, payload: torch.Tensor, *, is_shared: bool = False, is_fixed: bool = False
    ) -> torch.Tensor:
        """A tensor with the payload's numbers whose gradient is kept under ``edge``.

        Args:
            edge: no other value enters by it.
            payload: a tensor without a graph.
            is_shared: whether other tensors use its storage.
            is_fixed: whether nothing changes it in place; autograd forbids that for a leaf.
        """
        assert edge not in self.entered
        leaf = self.entered[edge] = (payload.detach() if is_shared else payload).requires_grad_()
        if is_fixed:
            return leaf
        with torch.enable_grad():
            return _carry(leaf, payload) if is_shared else _as_new(leaf, leaf.shape)

    def leave(self, edge: int, tensor: torch.Tensor) -> None:
        """Notes that a value leaves; it may be freed afterwards."""
        if tensor.requires_grad:
            self.left[edge] = _gradient_edge(tensor)

    def carry(self, edge: int, tensor: torch.Tensor, value: int) -> None:
        """Notes that a value goes on into a later segment of this rank."""
        if tensor.requires_grad:
            self.left[edge] = self.carried[value] = _gradient_edge(tensor)

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
        self._collect(retain_graph)

    def backward_of_inputs(self, seeds: dict[int, torch.Tensor]) -> LaterPart:
        """Runs the part of the backward that makes ``gradients``; returns the rest.

        Args:
            seeds: edge -> gradient of a value that left.
        """
        later = backward_of_inputs(*self._start(seeds), list(self.entered.values()))
        self._collect(retain_graph=False)
        return later

    def _start(self, seeds: dict[int, torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Where the backward starts, and with what."""
        roots: list[Any] = [self.left[edge] for edge in seeds]
        gradients = list(seeds.values())
        for root, gradient in self.roots:
            roots.append(root)
            gradients.append(gradient)
        return roots, gradients

    def _collect(self, retain_graph: bool) -> None:
        """Takes the gradients from the leaves; lets go of these if no other backward follows."""
        self.gradients = {}
        for edge, leaf in self.entered.items():
            gradient = leaf.grad
            if gradient is not None:
                # A parameter may have got the same storage, and adds its next gradient to it.
                is_shared = storage_uses(gradient) > _UNSHARED
                self.gradients[edge] = gradient.clone() if is_shared else gradient
                leaf.grad = None
        if not retain_graph:
            self.entered, self.carried = {}, {}


def _gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """Where the tensor's gradient is put in."""
    node = tensor.grad_fn
    if node is not None and not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr)  # by far the most common case
    if node is None and tensor._is_view():  # made in a `no_grad` block: it ends there
        tensor = tensor.detach().requires_grad_()
    return get_gradient_edge(tensor)


_UNSHARED = 2
"""Uses of a storage by one tensor and by who asks."""


def storage_uses(tensor: torch.Tensor) -> int:
    """How many hold the tensor's storage, of which one is this function's own question."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined,no-any-return]


def reachable_edges(roots: Iterable[Any], segment: Segment) -> list[int]:
    """Edges that entered ``segment`` on which the roots (gradient edges or tensors) depend."""
    by_leaf = {id(leaf): edge for edge, leaf in segment.entered.items()}
    found: set[int] = set()
    stack = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None:
            continue
        edge = by_leaf.get(id(getattr(node, "variable", None)))
        if edge is not None:
            found.add(edge)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return sorted(found)
