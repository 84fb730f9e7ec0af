"""What a call did: taken from the real result, published, and compared with later results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.functions import function_name
from lightning_smp.placed.operands import Operands
from lightning_smp.placed.structure import take_apart
from lightning_smp.placed.tensor import spec_of
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import EVERYWHERE, Leaf, Outcome, TensorSpec

if TYPE_CHECKING:
    from lightning_smp.placed.run import MicrobatchRun

__all__ = ["describe", "matches", "mismatch", "outcome_from_plain", "outcome_to_plain"]

_NUMBERS = (int, float, complex)


def describe(
    run: MicrobatchRun, target: Any, result: Any, operands: Operands, changes: bool
) -> Outcome:
    """The outcome of a call that has just run on this rank."""
    is_unit = type(target) is UnitEntry
    origin = f"unit {target.name!r}" if is_unit else function_name(target)
    collector = _Leaves(run, operands)
    objects = {id(obj): index for index, obj in enumerate(operands.objects)}
    template = take_apart(result, collector.add, objects, origin)
    if not is_unit and template[0] == "c" and type(template[1]) in _NUMBERS:
        _refuse_number(origin)
    escapes = []
    if is_unit:
        for path, name, held in target.observed():
            escapes.append((path, name, take_apart(held, collector.add, objects, origin)))
    changed = operands.changed()
    if changes and 0 not in changed:
        changed.insert(0, 0)  # requires_grad_ and detach_ change no numbers
    locals_ = operands._locals or []
    mutated = tuple((ordinal, locals_[ordinal].requires_grad) for ordinal in changed)
    if operands.run.entries[-1].home == EVERYWHERE:
        mutated = tuple(m for m in mutated if m[1] or operands.values[m[0]] is not None)
    return Outcome(
        template, tuple(collector.leaves), mutated, tuple(escapes), run.drew, run.wrote
    )  # fmt: skip


def matches(
    run: MicrobatchRun, target: Any, result: Any, outcome: Outcome, real: list[torch.Tensor]
) -> str:
    """Collects a real result's tensors in the outcome's order; says what differs, or ''."""
    leaves = outcome.leaves
    if len(leaves) == 1 and isinstance(result, torch.Tensor) and not outcome.escapes:
        found = [result]  # by far the most common case
    else:
        found = []
        known: dict[int, int] = {}

        def add(tensor: torch.Tensor) -> int:
            if id(tensor) not in known:
                known[id(tensor)] = len(found)
                found.append(tensor)
            return known[id(tensor)]

        held = [result]
        if type(target) is UnitEntry and outcome.escapes:
            held += target.collect(outcome.escapes)
        objects = _AnyOperand()
        templates = [take_apart(item, add, objects, "a call") for item in held]
        expected = [outcome.template, *(template for _, _, template in outcome.escapes)]
        for ours, theirs in zip(templates, expected, strict=True):
            if not _same_structure(ours, theirs):
                return f"returned the structure {ours}"
    if len(found) != len(leaves):
        return f"returned {len(found)} tensors"
    for tensor, leaf in zip(found, leaves, strict=True):
        problem = mismatch(tensor, leaf.spec)
        if problem:
            return problem
    real += found
    return ""


def mismatch(tensor: torch.Tensor, spec: TensorSpec) -> str:
    """What differs between a real tensor and the spec that the others take it to have, or ''."""
    if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
        return f"returned a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
    if tensor.requires_grad != spec.requires_grad:
        return f"returned a tensor with requires_grad={tensor.requires_grad}"
    return ""


def outcome_to_plain(outcome: Outcome) -> list[Any]:
    """The outcome as lists and numbers, for `wire`."""
    leaves = [
        [list(leaf.spec.shape), list(leaf.spec.stride), leaf.spec.dtype, leaf.spec.on_run_device,
         leaf.spec.requires_grad, leaf.same, leaf.view]
        for leaf in outcome.leaves
    ]  # fmt: skip
    escapes = [list(escape) for escape in outcome.escapes]
    return [
        outcome.template, leaves, [list(m) for m in outcome.mutated], escapes, outcome.random,
        outcome.writes,
    ]  # fmt: skip


def outcome_from_plain(plain: list[Any]) -> Outcome:
    """The outcome that another rank wrote by `outcome_to_plain`."""
    template, leaves, mutated, escapes, random, writes = plain
    return Outcome(
        template,
        tuple(
            Leaf(TensorSpec(tuple(shape), tuple(stride), dtype, on_device, grad), same, view)
            for shape, stride, dtype, on_device, grad, same, view in leaves
        ),
        tuple((ordinal, grad) for ordinal, grad in mutated),
        tuple((path, name, held) for path, name, held in escapes),
        random,
        writes,
    )


class _Leaves:
    """Numbers the tensors of a result and says which are operands or views of operands."""

    def __init__(self, run: MicrobatchRun, operands: Operands) -> None:
        self.leaves: list[Leaf] = []
        self._device = run.context.device
        self._locals = operands._locals or []
        self._ids: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._storages = {_storage(t): k for k, t in reversed(list(enumerate(self._locals)))}

    def add(self, tensor: torch.Tensor) -> int:
        known = self._ids.get(id(tensor))
        if known is not None:
            return known
        same = next((k for k, local in enumerate(self._locals) if local is tensor), -1)
        view = -1 if same >= 0 else self._storages.get(_storage(tensor), -1)
        ordinal = len(self.leaves)
        if same < 0 and view == -1:
            self._storages[_storage(tensor)] = -2 - ordinal
        self.leaves.append(Leaf(spec_of(tensor, self._device), same, view))
        self._ids[id(tensor)] = ordinal
        self._kept.append(tensor)
        return ordinal


class _AnyOperand(dict[int, int]):
    """Accepts every object: structures are compared without the identity of opaque parts."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: int) -> int:
        return -1


def _same_structure(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        if ours[:1] == ["o"] or theirs[:1] == ["o"]:
            return True
        return len(ours) == len(theirs) and all(map(_same_structure, ours, theirs))
    return bool(ours == theirs)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _refuse_number(origin: str) -> None:
    raise UnsupportedError(
        f"{origin} on a tensor of the model returns a Python number that only one stage knows. "
        "Use .item() on the tensor, or move this code into a submodule."
    )
