"""What to run in one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["StepPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What to run in one step.

    Args:
        name: the step's name; the first step of a name records every microbatch.
        bodies: the user's step for each microbatch.
        specs: for each microbatch what its shapes depend on; equal specs share a program.
        seed: integers that the seeds of units' streams start with.
        loss_of: finds the loss in what a body returned, or None for a forward-only step.
        wanted: given what the bodies returned, the tensors that `PipelineEngine.fetch` will be
            called with right after the step.
        loss_seed: gradient of each microbatch's loss, given what the body returned.
        record: record every microbatch, call by call.
        around_backward: runs a backward that the step itself asked for.
        on_final: called with parameters of units that no more gradient will come to.
        roots: for a step that notes itself what its backward starts from: on a single stage, where
            it puts the gradient edges of a microbatch and their gradients.
        keeps_graphs: on a single stage, results keep their graphs.
        inputs: for each microbatch the plain tensors that it is given, where its spec tells all of
            their types, shapes and whether they require gradients; ``()`` if it does not.
    """

    name: str
    bodies: Sequence[Callable[[], Any]]
    specs: Sequence[Hashable]
    seed: tuple[int, ...]
    loss_of: Callable[[Any], Any] | None = None
    wanted: Callable[[list[Any]], list[torch.Tensor]] | None = None
    loss_seed: Callable[[int, Any], torch.Tensor | None] | None = None
    record: bool = False
    around_backward: Callable[[Callable[[], None]], None] | None = None
    on_final: Callable[[list[nn.Parameter]], None] | None = None
    roots: list[tuple[Any, torch.Tensor]] | None = None
    keeps_graphs: bool = False
    inputs: Sequence[Sequence[torch.Tensor]] = ()
