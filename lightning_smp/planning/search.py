"""Searches the layout with the shortest step that fits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_smp.errors import ConfigError
from lightning_smp.planning.estimate import Estimate, Estimator, Layout

__all__ = ["FIXED", "Found", "search"]

FIXED = ("pp", "tp", "virtual", "microbatches", "microbatch_size", "recompute")
"""What a caller may fix."""

_VIRTUAL = (1, 2, 3, 4)
_SIMULATED = 8


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        best: Layouts that fit, the fastest first; empty if none does.
        smallest: The layout that needs the least memory on its fullest rank.
        num_tried: How many layouts there were.
    """

    best: tuple[Estimate, ...]
    smallest: Estimate
    num_tried: int


def search(
    estimator: Estimator,
    *,
    fixed: Mapping[str, int | bool],
    max_tensor_degree: int | None = None,
) -> Found:
    """Tries all layouts of the world.

    All are approximated; the fastest that fit are then simulated. Recomputation is tried for what
    does not fit without.

    Args:
        estimator: Knows the model and the machine.
        fixed: Values for some of ``FIXED``.
        max_tensor_degree: Most ranks that can split one module.

    Raises:
        ConfigError: If no layout has the fixed values.
    """
    tried = [estimator.approximate(one) for one in _layouts(estimator, fixed, max_tensor_degree)]
    if not tried:
        setup = estimator.setup
        raise ConfigError(
            f"No layout of {setup.world_size} ranks with {_shown(fixed)} splits a batch of "
            f"{setup.batch_size} samples: the degrees must divide the number of ranks, and "
            "replicas times microbatches times microbatch size is the batch. Change --batch-size "
            "or one of them."
        )
    limit = estimator.setup.memory
    fitting = sorted((one for one in tried if one.peak <= limit), key=_preference)
    best: list[Estimate] = []
    for one in fitting:
        exact = estimator.simulated(one.layout)
        if exact.peak <= limit:
            best.append(exact)
        if len(best) == _SIMULATED:
            break
    smallest = estimator.simulated(min(tried, key=lambda one: one.peak).layout)
    if not best and smallest.peak <= limit:
        best.append(smallest)
    return Found(tuple(sorted(best, key=_preference)), smallest, len(tried))


def _preference(one: Estimate) -> tuple[float, Layout]:
    return one.step_s, one.layout


def _shown(fixed: Mapping[str, int | bool]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any degrees"


def _layouts(
    estimator: Estimator, fixed: Mapping[str, int | bool], max_tensor_degree: int | None
) -> Iterator[Layout]:
    setup = estimator.setup
    for pp, tp in _degrees(estimator, fixed, max_tensor_degree):
        dp = setup.world_size // (pp * tp)
        if setup.batch_size % dp:
            continue
        samples = setup.batch_size // dp
        for count, size in _microbatches(samples, fixed):
            for virtual in _chunks(estimator, pp, fixed):
                for recompute in (False, True):
                    if fixed.get("recompute", recompute) == recompute:
                        yield Layout(pp, tp, dp, virtual, count, size, recompute)


def _degrees(
    estimator: Estimator, fixed: Mapping[str, int | bool], max_tensor_degree: int | None
) -> Iterator[tuple[int, int]]:
    world, host = estimator.setup.world_size, estimator.setup.gpus_per_host
    for tp in _divisors(world):
        allowed = tp <= host and (max_tensor_degree is None or max_tensor_degree % tp == 0)
        if fixed.get("tp", tp) != tp or not (allowed or "tp" in fixed):
            continue
        for pp in _divisors(world // tp):
            if fixed.get("pp", pp) == pp and (pp <= estimator.num_pieces or "pp" in fixed):
                yield pp, tp


def _microbatches(samples: int, fixed: Mapping[str, int | bool]) -> Iterator[tuple[int, int]]:
    for size in _divisors(samples):
        is_power = size & (size - 1) == 0
        if not is_power and "microbatch_size" not in fixed and "microbatches" not in fixed:
            continue
        count = samples // size
        if fixed.get("microbatches", count) == count and fixed.get("microbatch_size", size) == size:
            yield count, size


def _chunks(estimator: Estimator, pp: int, fixed: Mapping[str, int | bool]) -> Iterator[int]:
    if "virtual" in fixed:
        yield int(fixed["virtual"])
        return
    for virtual in _VIRTUAL:
        if virtual == 1 or (pp > 1 and pp * virtual <= estimator.num_pieces):
            yield virtual


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
