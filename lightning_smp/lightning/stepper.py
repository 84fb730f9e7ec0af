"""One call of the user's step for a whole batch: split, run, weigh, log, merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
        sizes = [piece.num_samples for piece in pieces]
        total = sum(sizes)
        with LogBuffer(self.deployment.module) as buffer:
            body = self._body(name, args, buffer)
            left = _Left(buffer)
            inputs = [list(iter_tensors(piece.value)) for piece in pieces]
            seeds = _Seeds(sizes, total, loss_scale(float(total))) if backward else None
            plan = StepPlan(
                name=name, bodies=[partial(body, m, piece) for m, piece in enumerate(pieces)],
                seed=seed, specs=self._specs(name, inputs, backward), inputs=inputs,
                loss_of=loss_of if backward else None, wanted=left.tensors,
                loss_seed=None if seeds is None else seeds.of,
                record=around_backward is not None, around_backward=around_backward,
                on_final=None if on_final is None
                else lambda parameters: on_final(parameters, float(total)),
            )  # fmt: skip
            results = self.deployment.run(plan)
        results = left.real(results, self.deployment.fetch)
        buffer.replay()
        if name != "training_step":
            return StepOutput(merge_outputs(results, sizes), None, float(total), 1.0)
        return _merge_losses(results, sizes, total)

    def _body(
        self, name: str, args: tuple[Any, ...], buffer: LogBuffer
    ) -> Callable[[int, Microbatch], Any]:
        step = getattr(self.deployment.module, name)
        begin, precision, rest = buffer.begin, self.precision, args[1:]
        trains = name == "training_step"

        def body(m: int, piece: Microbatch) -> Any:
            begin(m, piece.num_samples)
            with precision():
                result = step(piece.value, *rest)
            if trains and not isinstance(result, torch.Tensor):
                _check_result(result)
            return result

        return body

    def _specs(self, name: str, inputs: list[list[torch.Tensor]], backward: bool) -> list[Any]:
        """What the shapes of each microbatch depend on."""
        mode = (torch.is_grad_enabled(), self.deployment.module.training, backward)
        return [
            (name, tuple([(t.shape, t.dtype, t.requires_grad) for t in given]), *mode)
            for given in inputs
        ]


class _Left:
    """The tensors that a step leaves: those in its results, and the logged ones.

    Args:
        buffer: what the step logs.
    """

    def __init__(self, buffer: LogBuffer) -> None:
        self._buffer = buffer
        self._results: list[Any] | None = None
        self._tensors: list[torch.Tensor] = []

    def tensors(self, results: list[Any]) -> list[torch.Tensor]:
        """All of them, once every microbatch has come to its end; the same list on all ranks."""
        self._results = results
        returned = results if _are_tensors(results) else iter_tensors(results)
        self._tensors = [*returned, *self._buffer.values()]
        return self._tensors

    def real(
        self, results: list[Any], fetch: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    ) -> list[Any]:
        """The results with real tensors; the buffer's values become real, too.

        Args:
            results: what the microbatches returned.
            fetch: gives real tensors for those of `tensors`. If it communicates, all ranks must
                call this.
        """
        found = fetch(self._tensors if results is self._results else self.tensors(results))
        supply = iter(found)
        if _are_tensors(results):
            real: list[Any] = list(islice(supply, len(results)))
        else:
            real = [map_tensors(result, lambda _: next(supply)) for result in results]
        self._buffer.resolve(lambda _: list(supply))
        return real


def _are_tensors(results: list[Any]) -> bool:
    """Whether each result is one tensor; mostly it is, and walks take far longer."""
    return all([isinstance(result, torch.Tensor) for result in results])


def loss_of(result: Any) -> Any:
    """The loss in what a training step returned."""
    if isinstance(result, torch.Tensor):
        return result  # mostly: to ask for a mapping takes longer
    return result["loss"] if isinstance(result, Mapping) else result


def _weight_of(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return None
    return result.get("loss_weight") if isinstance(result, Mapping) else None


class _Seeds:
    """The gradients of a batch's losses; those that are equal are one tensor.

    Args:
        sizes: the samples of each microbatch.
        total: those of the batch.
        scale: factor of every gradient.
    """

    def __init__(self, sizes: list[int], total: int, scale: float | torch.Tensor) -> None:
        self._sizes = sizes
        self._total = total
        self._scale = scale
        self._known: dict[Any, torch.Tensor] = {}

    def of(self, m: int, result: Any) -> torch.Tensor | None:
        """The gradient of one microbatch's loss, on the rank that holds it.

        Args:
            m: the microbatch.
            result: what its step returned.
        """
        loss = loss_of(result)
        if isinstance(loss, PlacedTensor):
            loss = loss._value.local
        if loss is None:
            return None
        weight = _weight_of(result)
        if isinstance(weight, PlacedTensor):
            weight = _local_weight(weight)
        if isinstance(weight, torch.Tensor):
            return self._times_scale(weight, loss)
        share = self._sizes[m] / self._total if weight is None else weight
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
    num_missing = sum([loss is None for loss in losses])
    if num_missing == len(losses):
        return StepOutput(merge_outputs(results, sizes), None, float(total), 1.0)
    if num_missing:
        raise UnsupportedError(
            "training_step returned None for some microbatches of a batch and a loss for others; "
            "return a loss of zero with loss_weight=0 instead of None."
        )
    given = [weight for weight in map(_weight_of, results) if weight is not None]
    if len(given) not in (0, len(results)):
        raise UnsupportedError(
            "training_step returned `loss_weight` for some microbatches of a batch only; "
            "return it always or never."
        )
    weighted = bool(given)
    weights = list(map(float, given or sizes))
    weight = sum(weights)
    if len(losses) == 1:
        loss = losses[0]
    else:
        loss = weighted_mean(losses, weights) if weight else losses[0] * 0
    scale = 1.0 if not weighted else (1.0 / weight if weight else 0.0)
    if isinstance(results[0], torch.Tensor) or not isinstance(results[0], Mapping):
        return StepOutput(loss, loss, weight, scale, weighted)
    extra = [
        {k: v for k, v in result.items() if k not in ("loss", "loss_weight")} for result in results
    ]
    merged = {"loss": loss, **merge_outputs(extra, sizes)}
    return StepOutput(merged, loss, weight, scale, weighted)
