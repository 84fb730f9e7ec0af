"""Atoms: the module subtrees that are never divided between stages.

Fixed by the module tree alone: neither the number of stages nor a cost may change them, because
random streams, checkpoints and programs are keyed by atom.

Note [What becomes an atom]
Going down from the root (which never is one), each module meets these rules in this order:

1.  boundary: anything of torchmetrics. Not an atom and not entered; every rank keeps its own.
2.  outer: losses of ``torch.nn``, ParameterList, ParameterDict, empty containers (they hold no
    child to go to).
3.  opened: a module with a boundary or a LightningModule somewhere below it, because both need to
    run on every rank; and a LightningModule itself.
4.  atom: parametrized, scripted and compiled modules, whose inside cannot be reached by calls, and
    classes that say ``is_never_divided = True``.
5.  opened: the containers of ``torch.nn`` (Sequential, ModuleList, ModuleDict, Transformer,
    TransformerEncoder, TransformerDecoder); a Sequential that is itself an element of a list falls
    under rule 8.
6.  atom: classes named by a ``_no_split_modules`` in the tree (Hugging Face's convention, open to
    anybody).
7.  atom: modules without children and every other module of ``torch.nn`` (MultiheadAttention, LSTM,
    ...).
8.  elements, that is children of a container and siblings of one user class: atoms, unless one
    holds more than a quarter of the root's parameters and has a list of two or more
    parameter-carrying elements.
9.  atom: modules with less than 2 % of the root's parameters.
10. atom: modules that hold more than half of their parameters directly and contain no list (opening
    them would replicate the bulk on all stages).
11. opened: everything else.

A module reached by two paths is one atom, named by the first. If a user shares a module between two
atoms, or between an atom and outer code, atoms overlap; the plan then treats what they share as
tied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

__all__ = [
    "Atom",
    "find_atoms",
    "is_boundary",
    "is_lightning_module",
    "outer_parameters",
    "parameter_names",
]

_ELEMENT_SHARE = 0.25
_SMALL_SHARE = 0.02
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_PARAMETER_HOLDERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, eq=False)
class Atom:
    """A module subtree that lives on one stage as a whole.

    Attributes:
        name: Dotted name of the first path that leads to it.
        module: The live module.
        index: Position in module order, from 0.
    """

    name: str
    module: nn.Module = field(repr=False)
    index: int

    @property
    def is_stateless(self) -> bool:
        """True without parameters and buffers: it can run wherever its input lives."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        return not tensors


class _Verdict(Enum):
    ATOM = "atom"
    OPEN = "open"  # not an atom; its children are looked at
    SKIP = "skip"  # not an atom; nothing below it is one


def find_atoms(root: nn.Module) -> tuple[Atom, ...]:
    """Returns the atoms of a module tree in module order; see Note [What becomes an atom].

    Args:
        root: The module to divide, usually the LightningModule. It is never an atom itself.
    """
    return _Finder(root).run()


def outer_parameters(root: nn.Module, atoms: tuple[Atom, ...]) -> dict[str, nn.Parameter]:
    """Returns, by first dotted name, the parameters outside every atom: each rank holds a copy.

    They are held directly by outer modules, or belong to metrics.
    """
    inside = {id(p) for atom in atoms for p in atom.module.parameters()}
    return {name: p for name, p in root.named_parameters() if id(p) not in inside}


def parameter_names(root: nn.Module) -> dict[int, tuple[str, ...]]:
    """Returns all dotted names of each parameter and buffer, by the ``id`` of the tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return {key: tuple(value) for key, value in names.items()}


def _numel(module: nn.Module, *, recurse: bool = True) -> int:
    return sum(0 if is_lazy(p) else p.numel() for p in module.parameters(recurse=recurse))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def is_boundary(module: nn.Module) -> bool:
    """True for metrics and whatever else torchmetrics defines, without importing it."""
    return any(base.__module__.split(".")[0] == "torchmetrics" for base in type(module).__mro__)


def is_lightning_module(module: nn.Module) -> bool:
    """True for a LightningModule of either package, without importing it."""
    return any(
        base.__name__ == "LightningModule"
        and base.__module__.split(".")[0] in ("lightning", "pytorch_lightning")
        for base in type(module).__mro__
    )


def _is_builtin(module: nn.Module) -> bool:
    """True for classes of torch.nn other than containers, and for classes derived from them."""
    return any(
        base.__module__.startswith(("torch.nn.modules.", "torch.ao.nn."))
        and base not in _CONTAINERS
        and base is not nn.Module
        for base in type(module).__mro__
    )


def _is_outer_leaf(module: nn.Module) -> bool:
    if isinstance(module, _PARAMETER_HOLDERS):
        return True
    if isinstance(module, _CONTAINERS):
        return not any(True for _ in module.children()) and not _has_parameters(module)
    is_loss = any(base.__module__ == "torch.nn.modules.loss" for base in type(module).__mro__)
    return is_loss and not _has_parameters(module)


def _is_sealed(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or is_parametrized(module)
        or type(module).__module__.startswith("torch._dynamo.")
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(type(module), "is_never_divided", False)
    )


def _needs_opening(module: nn.Module) -> bool:
    below = (m for m in module.modules() if m is not module)
    return is_lightning_module(module) or any(
        is_boundary(m) or is_lightning_module(m) for m in below
    )


def _no_split_classes(root: nn.Module) -> frozenset[str]:
    names: set[str] = set()
    for module in root.modules():
        declared = getattr(module, "_no_split_modules", None)
        if isinstance(declared, (list, tuple, set, frozenset)):
            names.update(str(name) for name in declared)
    return frozenset(names)


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the children that form a list: those of a container, or siblings of one user class."""
    children = list(module.children())
    if isinstance(module, _LISTS):
        yield from children
        return
    siblings = Counter(
        type(child)
        for child in children
        if _has_parameters(child) and not _is_builtin(child) and not isinstance(child, _CONTAINERS)
    )
    yield from (child for child in children if siblings[type(child)] >= 2)


def _holds_list(module: nn.Module) -> bool:
    """True if a list with two or more parameter-carrying elements is inside."""
    if _is_builtin(module):
        return False
    if sum(_has_parameters(element) for element in _elements(module)) >= 2:
        return True
    return any(_holds_list(child) for child in module.children())


class _Finder:
    """One walk over a module tree."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._total = max(1, _numel(root))
        self._no_split = _no_split_classes(root)
        self._seen = {id(root)}
        self._atoms: list[Atom] = []

    def run(self) -> tuple[Atom, ...]:
        self._walk(self._root, "")
        return tuple(self._atoms)

    def _walk(self, parent: nn.Module, prefix: str) -> None:
        elements = {id(element) for element in _elements(parent)}
        for name, child in parent.named_children():
            if id(child) in self._seen:
                continue
            self._seen.add(id(child))
            verdict = self._judge(child, is_element=id(child) in elements)
            if verdict is _Verdict.ATOM:
                self._atoms.append(Atom(prefix + name, child, len(self._atoms)))
            elif verdict is _Verdict.OPEN:
                self._walk(child, f"{prefix}{name}.")

    def _judge(self, module: nn.Module, *, is_element: bool) -> _Verdict:
        if is_boundary(module) or _is_outer_leaf(module):
            return _Verdict.SKIP
        if _needs_opening(module):
            return _Verdict.OPEN
        if _is_sealed(module):
            return _Verdict.ATOM
        is_named = any(base.__name__ in self._no_split for base in type(module).__mro__)
        is_container = isinstance(module, _CONTAINERS) and not (
            is_element and isinstance(module, nn.Sequential)
        )
        if is_container and not is_named:
            return _Verdict.OPEN
        if is_named or _is_builtin(module) or not any(True for _ in module.children()):
            return _Verdict.ATOM
        return _Verdict.ATOM if self._is_whole(module, is_element=is_element) else _Verdict.OPEN

    def _is_whole(self, module: nn.Module, *, is_element: bool) -> bool:
        share = _numel(module) / self._total
        if is_element:
            return share <= _ELEMENT_SHARE or not _holds_list(module)
        if share < _SMALL_SHARE:
            return True
        own = _numel(module, recurse=False)
        return own > _numel(module) / 2 and not _holds_list(module)
