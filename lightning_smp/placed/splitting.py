"""A backward in two parts: first what other segments wait for, later the products for parameters.

Note [What is put off]
The gradient of a linear or convolution weight is one large product of the layer's input and the
gradient of its output, and nothing but the optimizer waits for it (Qi et al. 2023, arXiv
2401.10241). The first part runs autograd with ``inputs`` that leave these weights out, so their
products are not computed, and keeps both factors; the rest of the graph is freed as usual. The
second part computes the products and hands them to autograd below the layer, so that casts, hooks
and accumulation happen as ever.

Everything else stays in the first part: parameters that are used twice in the segment, custom
functions, compiled code, and layers whose inputs are recomputed or offloaded (their saved tensors
have hooks and must be asked for only once).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

__all__ = ["LaterPart", "backward_of_inputs", "run_autograd"]

_NEVER_SPLIT = "CheckpointFunctionBackward"  # refuses to run with ``inputs``

_LEAF = "torch::autograd::AccumulateGrad"

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(what the layer was given, the gradient of what it gave) -> the gradient of its weight."""


@dataclass(slots=True)
class LaterPart:
    """What is left of a backward after its first part."""

    products: list[_PutOff] = field(default_factory=list)
    roots: list[Any] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Computes the gradients that were put off and adds them to their parameters'."""
        roots, gradients = self.roots, self.gradients
        for put_off in self.products:
            product = put_off.compute()
            if product is not None:
                roots.append(put_off.target)
                gradients.append(product)
        self.products = []
        if roots:
            run_autograd(roots, gradients)
        self.roots, self.gradients = [], []


class _PutOff:
    """One product: its factors, and where it goes."""

    __slots__ = ("_factor", "_gradient", "_product", "handle", "target")

    def __init__(self, node: Any, target: GradientEdge, factor: torch.Tensor, kind: _Kind) -> None:
        self.target = target
        self._factor = factor
        self._gradient: torch.Tensor | None = None
        self._product = kind.prepare(node)
        self.handle = node.register_prehook(self._note)

    def _note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._gradient = gradients[0]

    def compute(self) -> torch.Tensor | None:
        """The product; None where no gradient came."""
        if self._gradient is None:
            return None
        with torch.no_grad():
            return self._product(self._factor, self._gradient)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A layer whose weight's gradient can be put off: where its operands are, and the product.

    ``prepare`` is called before the graph is freed.
    """

    factor: str
    weight: int
    prepare: Callable[[Any], Product]


def _of_matrix(node: Any) -> Product:
    alpha = getattr(node, "_saved_alpha", 1)

    def product(factor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        # As autograd does for a transposed weight: the parameter's gradient is then contiguous.
        found = gradient.t().mm(factor).t()
        return found if alpha == 1 else found * alpha

    return product


def _of_convolution(node: Any) -> Product:
    weight = node._saved_weight
    how = (
        node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
        node._saved_output_padding, node._saved_groups,
    )  # fmt: skip

    def product(factor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        wanted = [False, True, False]
        found = torch.ops.aten.convolution_backward(gradient, factor, weight, None, *how, wanted)
        return found[1]  # type: ignore[no-any-return]

    return product


_KINDS = {
    "AddmmBackward0": _Kind("_raw_saved_mat1", 2, _of_matrix),
    "MmBackward0": _Kind("_raw_saved_self", 1, _of_matrix),
    "ConvolutionBackward0": _Kind("_raw_saved_input", 1, _of_convolution),
}


def run_autograd(
    roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor], *,
    keep_graph: bool = False, inputs: Sequence[torch.Tensor] = (),
) -> None:  # fmt: skip
    """`torch.autograd.backward` for gradients that are all given.

    It enters autograd below the Python of torch's function, which takes as long as the rest of a
    small backward; autograd itself compares the shapes and types of the gradients.
    """
    Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        tuple(roots), tuple(gradients), keep_graph, False, tuple(inputs), True, True
    )


def backward_of_inputs(
    roots: list[Any], gradients: list[torch.Tensor], entered: Sequence[torch.Tensor]
) -> LaterPart:
    """Runs the part of a backward that leads to some leaves; see Note [What is put off].

    Args:
        roots: tensors or gradient edges.
        gradients: theirs.
        entered: the leaves whose gradients are wanted now.

    Returns:
        what is to be run later. If nothing leads to these leaves, that is all.
    """
    graph = _Graph(roots, entered)
    if not graph.to_entered:
        return LaterPart(roots=roots, gradients=gradients)
    products = [] if graph.is_whole else graph.put_off()
    if not products:
        run_autograd(roots, gradients)
        return LaterPart()
    try:
        run_autograd(roots, gradients, inputs=graph.leaves_now())
    finally:
        for product in products:
            product.handle.remove()
    return LaterPart(products=products)


class _Graph:
    """The autograd graph below some roots.

    Attributes:
        to_entered: nodes that lead to what entered.
        is_whole: whether it must be run at once.
    """

    def __init__(self, roots: Sequence[Any], entered: Sequence[torch.Tensor]) -> None:
        starts = [r.node if isinstance(r, GradientEdge) else r.grad_fn for r in roots]
        self.order = _sorted_nodes(starts)
        self.to_entered: set[Any] = set()
        self.is_whole = False
        self._starts = starts
        self._later: set[Any] = set()
        wanted = set(map(id, entered))
        for node in reversed(self.order):
            self.is_whole |= node.name() == _NEVER_SPLIT
            is_wanted = node.name() == _LEAF and id(node.variable) in wanted
            if is_wanted or any(child in self.to_entered for child, _ in node.next_functions):
                self.to_entered.add(node)
        self._users = self._count_users()

    def _count_users(self) -> dict[Any, int]:
        """For each node off the way to what entered, the edges that lead from the way to it."""
        users: dict[Any, int] = {}
        for node in self._starts:
            if node not in self.to_entered:
                users[node] = users.get(node, 0) + 1
        for node in self.order:
            for child, _ in node.next_functions:
                if child is not None and child not in self.to_entered:
                    come = 1 if node in self.to_entered else users.get(node, 0)
                    users[child] = users.get(child, 0) + come
        return users

    def put_off(self) -> list[_PutOff]:
        """Chooses the products that are computed later."""
        found = []
        for node in self.order:
            kind = _KINDS.get(node.name())
            if kind is None or node not in self.to_entered:
                continue
            child, output = node.next_functions[kind.weight]
            if child is None or child in self.to_entered:
                continue
            leaves = _leaves(child)
            if any(self._users[leaf] != 1 or leaf.variable.is_complex() for leaf in leaves):
                continue
            factor = _saved(getattr(node, kind.factor))
            if factor is not None and leaves:
                found.append(_PutOff(node, GradientEdge(child, output), factor, kind))
                self._later.update(leaves)
        return found

    def leaves_now(self) -> list[torch.Tensor]:
        """The leaves whose gradients are not put off."""
        return [
            node.variable for node in self.order if node.name() == _LEAF and node not in self._later
        ]


def _sorted_nodes(starts: Sequence[Any]) -> list[Any]:
    """All nodes below the starts, each before those that it leads to."""
    done: set[Any] = set()
    order: list[Any] = []
    stack = [(node, False) for node in starts if node is not None]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            order.append(node)
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            stack += [
                (child, False)
                for child, _ in node.next_functions
                if child is not None and child not in done
            ]
    return order[::-1]


def _leaves(node: Any) -> list[Any]:
    return [inner for inner in _sorted_nodes([node]) if inner.name() == _LEAF]


def _saved(raw: Any) -> torch.Tensor | None:
    """A saved tensor, unless it has hooks, which may compute it again or load it."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    try:
        raw.register_hooks(keep, lambda tensor: tensor)
    except RuntimeError:  # torch allows one pair of hooks
        return None
    return kept[0].detach()
