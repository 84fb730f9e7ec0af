"""One call of the user's step for a whole batch: split, run, weigh, log, merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_smp.batch import Microbatch, split_batch
from lightning_smp.batch_merge import merge_outputs, weighted_mean
from lightning_smp.deploy.deployment import Deployment
from lightning_smp.engine import StepPlan
from lightning_smp.errors import UnsupportedError
from lightning_smp.lightning.logs import LogBuffer
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.placed.tensor import PlacedTensor

__all__ = ["StepOutput", "Stepper"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step over a whole batch gave.

    Attributes:
        result: the merged return value, with real, detached tensors on every rank.
        loss: the loss of the batch, or None.
        weight: what the loss is a mean over: samples, or the sum of ``loss_weight``.
        scale: what gradients made in the step must be multiplied by.
        weighted: whether the step returned ``loss_weight``.
    """

    result: Any
    loss: torch.Tensor | None
    weight: float
    scale: float
    weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    """Runs steps of one module.

    Args:
        deployment: the LightningModule over the ranks.
        precision: context of one microbatch's step.
    """

    deployment: Deployment
    precision: Callable[[], AbstractContextManager[Any]]

    def run(
        self,
        name: str,
        args: tuple[Any, ...],
        *,
        microbatches: int,
        allow_uneven: bool,
        seed: tuple[int, ...],
        backward: bool,
        loss_scale: Callable[[float], float | torch.Tensor] = lambda _: 1.0,
        around_backward: Callable[[Callable[[], None]], None] | None = None,
        on_final: Callable[[list[nn.Parameter], float], None] | None = None,
    ) -> StepOutput:
        """Runs ``module.<name>`` over a batch. Collective over pp.

        Args:
            name: "training_step", "validation_step", "test_step" or "predict_step".
            args: the step's arguments, the batch first.
            microbatches: how many parts.
            allow_uneven: whether the parts may differ in size.
            seed: integers that the units' random streams start with.
            backward: whether to run the backward of the loss.
            loss_scale: factor of every gradient, for a batch of the given number of samples.
            around_backward: for steps that call backward themselves: runs such a backward.
            on_final: called with parameters whose gradients are final, and the batch's samples.
        """
        pieces = split_batch(args[0], microbatches, allow_uneven=allow_uneven)
        total = sum(piece.num_samples for piece in pieces)
        with LogBuffer(self.deployment.module) as buffer:
            body = self._body(name, args, buffer)
            bodies = [lambda m=m: body(m, pieces[m]) for m in range(len(pieces))]

            def wanted(results: list[Any]) -> list[torch.Tensor]:
                return [*iter_tensors(results), *buffer.values()]

            seeds = _Seeds(loss_scale(float(total)) if backward else 1.0)

            def loss_seed(m: int, result: Any) -> torch.Tensor | None:
                loss = loss_of(result)
                if loss is None:
                    return None
                weight = _weight_of(result)
                return seeds.seed(loss, pieces[m].num_samples / total if weight is None else weight)

            plan = StepPlan(
                name=name, bodies=bodies, seed=seed,
                specs=[self._spec(name, piece.value, backward) for piece in pieces],
                loss_of=loss_of if backward else None, wanted=wanted,
                loss_seed=loss_seed if backward else None,
                record=around_backward is not None, around_backward=around_backward,
                on_final=None if on_final is None
                else lambda parameters: on_final(parameters, float(total)),
            )  # fmt: skip
            results = self.deployment.run(plan)
        return self._conclude(results, pieces, total, buffer, name == "training_step")

    def _body(
        self, name: str, args: tuple[Any, ...], buffer: LogBuffer
    ) -> Callable[[int, Microbatch], Any]:
        step = getattr(self.deployment.module, name)

        def body(m: int, piece: Microbatch) -> Any:
            buffer.begin(m, piece.num_samples)
            with self.precision():
                result = step(piece.value, *args[1:])
            if name == "training_step":
                _check_result(result)
            return result

        return body

    def _spec(self, name: str, batch: Any, backward: bool) -> Any:
        """What a microbatch's shapes depend on."""
        shapes = tuple([(t.shape, t.dtype) for t in iter_tensors(batch)])
        return (name, shapes, torch.is_grad_enabled(), self.deployment.module.training, backward)

    def _conclude(
        self, results: list[Any], pieces: list[Microbatch], total: int, buffer: LogBuffer,
        training: bool,
    ) -> StepOutput:  # fmt: skip
        """Brings what the step left to every rank and makes one value of it."""
        returned = list(iter_tensors(results))
        logged = buffer.values()
        real = self.deployment.fetch([*returned, *logged])
        supply = iter(real[: len(returned)])
        results = [map_tensors(result, lambda _: next(supply)) for result in results]
        buffer.resolve(lambda _: real[len(returned) :])
        buffer.replay()
        sizes = [piece.num_samples for piece in pieces]
        if not training:
            return StepOutput(merge_outputs(results, sizes), None, float(total), 1.0)
        return _merge_losses(results, sizes, total)


def loss_of(result: Any) -> Any:
    """The loss in what a training step returned."""
    return result["loss"] if isinstance(result, Mapping) else result


def _weight_of(result: Any) -> Any:
    return result.get("loss_weight") if isinstance(result, Mapping) else None


class _Seeds:
    """The gradients of a batch's losses; those that are equal are one tensor.

    Args:
        scale: factor of every gradient.
    """

    def __init__(self, scale: float | torch.Tensor) -> None:
        self._scale = scale
        self._known: dict[Any, torch.Tensor] = {}

    def seed(self, loss: torch.Tensor, share: Any) -> torch.Tensor | None:
        """The gradient of one microbatch's loss, on the rank that holds it.

        Args:
            loss: the loss.
            share: of the batch's mean, a number or a tensor.
        """
        if isinstance(loss, PlacedTensor):
            local = loss._value.local
            if local is None:
                return None
            loss = local
        if isinstance(share, PlacedTensor):
            share = _local_weight(share)
        if isinstance(share, torch.Tensor):
            return self._times_scale(share, loss)
        key = (share, loss.shape, loss.dtype)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._times_scale(float(share), loss)
        return found

    def _times_scale(self, share: float | torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(loss.dtype, torch.float32)
        factors = [f.to(wide) if isinstance(f, torch.Tensor) else f for f in (share, self._scale)]
        product = factors[0] * factors[1]
        if not isinstance(product, torch.Tensor):
            return torch.full_like(loss, product)
        return product.to(loss).expand_as(loss).contiguous()


def _local_weight(weight: PlacedTensor) -> torch.Tensor:
    held = weight._value.local
    if held is None:
        raise UnsupportedError(
            "training_step returned a `loss_weight` that was computed on another stage than "
            "the loss. Compute it from the batch, or from the tensors that the loss comes from."
        )
    return held.detach()


def _check_result(result: Any) -> None:
    """Checks what training_step returned as Lightning does."""
    if result is None or isinstance(result, torch.Tensor):
        return
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise _misconfigured(
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key "
                "needs to be present"
            )
        return
    raise _misconfigured(
        "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where "
        "the step will be skipped)."
    )


def _misconfigured(message: str) -> Exception:
    from lightning_utilities.core.imports import module_available

    if module_available("lightning"):
        from lightning.pytorch.utilities.exceptions import MisconfigurationException
    else:
        from pytorch_lightning.utilities.exceptions import MisconfigurationException
    return MisconfigurationException(message)


def _merge_losses(results: list[Any], sizes: list[int], total: int) -> StepOutput:
    losses = [loss_of(result) for result in results]
    if all(loss is None for loss in losses):
        return StepOutput(merge_outputs(results, sizes), None, float(total), 1.0)
    if any(loss is None for loss in losses):
        raise UnsupportedError(
            "training_step returned None for some microbatches of a batch and a loss for others; "
            "return a loss of zero with loss_weight=0 instead of None."
        )
    given = [_weight_of(result) for result in results]
    if any(weight is None for weight in given) and any(weight is not None for weight in given):
        raise UnsupportedError(
            "training_step returned `loss_weight` for some microbatches of a batch only; "
            "return it always or never."
        )
    weighted = given[0] is not None
    weights = [float(w) for w in given] if weighted else [float(size) for size in sizes]
    weight = sum(weights)
    if len(losses) == 1:
        loss = losses[0]
    else:
        loss = weighted_mean(losses, weights) if weight else losses[0] * 0
    scale = 1.0 if not weighted else (1.0 / weight if weight else 0.0)
    if isinstance(results[0], Mapping):
        extra = [
            {k: v for k, v in result.items() if k not in ("loss", "loss_weight")}
            for result in results
        ]
        result: Any = {"loss": loss, **merge_outputs(extra, sizes)}
    else:
        result = loss
    return StepOutput(result, loss, weight, scale, weighted)
