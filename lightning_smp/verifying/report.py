"""Compares what one device and the ranks of a layout gave. Pure; results are plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Report", "compare"]

_TOLERANCE = {"torch.float64": 1e-9, "torch.float32": 1e-4}
_HALF = 2e-2
_SHOWN = 5


@dataclass(frozen=True)
class Report:
    """The outcome of a verification.

    Attributes:
        equal: whether everything compared agrees.
        first: the first unit, parameter or loss that differs, None if nothing does.
        counts: how many calls of units, gradients, weights and losses were compared.
        differences: each difference in words, the first one first.
    """

    equal: bool
    first: str | None
    counts: dict[str, int]
    differences: tuple[str, ...]

    def __str__(self) -> str:
        compared = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        if self.equal:
            return f"equal to one device: {compared}"
        lines = [f"differs from one device, first in {self.first} (compared: {compared})"]
        lines += [f"  {text}" for text in self.differences[:_SHOWN]]
        left = len(self.differences) - _SHOWN
        return "\n".join(lines + ([f"  ... and {left} more"] if left > 0 else []))


def compare(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], tolerance: float | None = None
) -> Report:
    """Compares the results of `lightning_smp.verifying.worker`.

    The first difference is looked for where it would start: in the calls of units in the order of
    the forward, then in the gradients from the last unit back, then in the losses and weights.

    Args:
        reference: of one device.
        ranks: of each rank.
        tolerance: relative to the size of what is compared; by default 1e-9 in float64, 1e-4 in
            float32 and 2e-2 below.
    """
    found: list[tuple[str, str]] = []
    counts = {
        "calls of units": _compare_calls(reference, ranks, tolerance, found),
        "gradients": _compare_gradients(reference, ranks, tolerance, found),
        "losses": _compare_losses(reference, ranks, tolerance, found),
        "weights": _compare_weights(reference, ranks[0], tolerance, found),
    }
    first = found[0][0] if found else None
    return Report(not found, first, counts, tuple(text for _, text in found))


def _compare_calls(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], tolerance: float | None,
    found: list[tuple[str, str]],
) -> int:  # fmt: skip
    there = {
        (replica, unit, ordinal): (rank, tensors)
        for rank, result in enumerate(ranks)
        for replica, unit, ordinal, tensors in result["probes"]
    }
    count = 0
    for replica, unit, ordinal, tensors in reference["probes"]:
        if (replica, unit, ordinal) not in there:
            continue  # tensor parallelism has put another module in its place
        rank, others = there[replica, unit, ordinal]
        count += 1
        text = _call_difference(tensors, others, tolerance)
        if text:
            where = f"call {ordinal + 1} of replica {replica}, on rank {rank}"
            found.append((f"unit {unit!r}", f"output of {unit!r} ({where}): {text}"))
    return count


def _call_difference(mine: Any, others: Any, tolerance: float | None) -> str:
    if [m[:2] for m in mine] != [o[:2] for o in others]:
        return f"shapes {[o[0] for o in others]} instead of {[m[0] for m in mine]}"
    for (shape, dtype, *numbers), (_, _, *theirs) in zip(mine, others, strict=True):
        size = math.prod(shape) or 1
        # The sums are at most this large (Cauchy and Schwarz).
        scale = math.sqrt(size * max(numbers[1], theirs[1])) or 1.0
        limit = _limit(dtype, tolerance)
        gap = max(abs(numbers[k] - theirs[k]) for k in (0, 2)) / scale
        gap = max(gap, abs(math.sqrt(numbers[1]) - math.sqrt(theirs[1])) / scale)
        if not gap <= limit:
            return f"relative difference {gap:.1e}, allowed {limit:.0e}"
    return ""


def _compare_gradients(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], tolerance: float | None,
    found: list[tuple[str, str]],
) -> int:  # fmt: skip
    count = 0
    for name, mine in reversed(list(reference["gradients"].items())):
        held = [(r, result["gradients"][name]) for r, result in enumerate(ranks)
                if name in result["gradients"]]  # fmt: skip
        if not held and not _is_renamed(name, ranks):
            found.append((f"parameter {name!r}", f"gradient of {name!r}: on no rank"))
        for rank, other in held:
            if other.shape != mine.shape:
                continue  # a slice: its weights are compared whole
            count += 1
            text = _tensor_difference(mine, other, tolerance)
            if text:
                found.append((f"parameter {name!r}", f"gradient of {name!r}, rank {rank}: {text}"))
    return count


def _is_renamed(name: str, ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tensor parallelism gave the parameter another name."""
    return all(name not in result["parameters"] for result in ranks)


def _compare_losses(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], tolerance: float | None,
    found: list[tuple[str, str]],
) -> int:  # fmt: skip
    count = 0
    for rank, result in enumerate(ranks):
        for step, loss in enumerate(result["losses"]):
            mine = reference["losses"][step][result["replica"]]
            count += 1
            limit = _limit(result["loss_dtype"], tolerance)
            gap = abs(loss - mine) / max(abs(mine), abs(loss), 1e-30)
            if not gap <= limit:
                text = f"loss of step {step}, rank {rank}: {loss:.9g} instead of {mine:.9g}"
                found.append((f"the loss of step {step}", text))
    return count


def _compare_weights(
    reference: Mapping[str, Any], whole: Mapping[str, Any], tolerance: float | None,
    found: list[tuple[str, str]],
) -> int:  # fmt: skip
    mine, other = reference["weights"], whole["weights"]
    for name in sorted(mine.keys() ^ other.keys()):
        found.append((f"weight {name!r}", f"weight {name!r} is on one side only"))
    shared = [name for name in mine if name in other]
    for name in shared:
        text = _tensor_difference(mine[name], other[name], tolerance)
        if text:
            found.append((f"weight {name!r}", f"weight {name!r} after the last step: {text}"))
    return len(shared)


def _tensor_difference(mine: torch.Tensor, other: torch.Tensor, tolerance: float | None) -> str:
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return f"{other.dtype} {tuple(other.shape)} instead of {mine.dtype} {tuple(mine.shape)}"
    if not mine.numel():
        return ""
    limit = _limit(str(mine.dtype), tolerance) if mine.is_floating_point() else 0.0
    gap = float((mine.double() - other.double()).abs().max())
    gap /= float(mine.double().abs().max()) or 1.0
    return "" if gap <= limit else f"relative difference {gap:.1e}, allowed {limit:.0e}"


def _limit(dtype: str, tolerance: float | None) -> float:
    return _TOLERANCE.get(dtype, _HALF) if tolerance is None else tolerance
