"""The strategy's steps: a batch in, losses, logs and gradients out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_smp.batch import split_batch
from lightning_smp.deploy.reducing import EarlyReducer
from lightning_smp.deploy.running import no_inference_mode
from lightning_smp.errors import UnsupportedError
from lightning_smp.lightning.batch_broadcast import broadcast_batch
from lightning_smp.lightning.data import prepare_dataloader
from lightning_smp.lightning.foresight import Foresight, foresee
from lightning_smp.lightning.handoff import (
    ExpectedGradient,
    GradientStash,
    GradientSum,
    KnownGradient,
    StepGradients,
    hand_off,
)
from lightning_smp.lightning.saving import Saving
from lightning_smp.lightning.stepper import StepOutput, Stepper
from lightning_smp.lightning.timelines import log_timeline
from lightning_smp.placed.runtime import OutsideOuterMode
from lightning_smp.process_state import state
from lightning_smp.weights.clip import global_clip
from lightning_smp.weights.sharing import WeightAgreement

__all__ = ["Steps"]

_NUMBERS = {"training_step": 0, "validation_step": 1, "test_step": 2, "predict_step": 3}


class Steps(Saving):
    """Runs the user's steps and hands their gradients to Lightning."""

    def _ensure_ready(self, name: str, args: tuple[Any, ...]) -> None:
        raise NotImplementedError

    # ---- training ---------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step, forward and backward. Collective over the world."""
        with state.calls.collective("training_step", state.replica_axis):
            return self._training_step(*args, **kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        args = self._same_batch((*args, *kwargs.values()))
        self._ensure_ready("training_step", self._first_piece(args))
        loop = self._trainer.fit_loop
        self.deployment.is_last_batch = loop.epoch_loop.batch_progress.is_last_batch
        seed = (*self._seed(0), loop.total_batch_idx)
        if not self.lightning_module.automatic_optimization:
            return self._manual_step(args, seed)
        foresight = foresee(self._trainer, self._pl)
        expected = self._expected_gradient(foresight)
        gradients = self._step_gradients(foresight)
        reducer = self._early_reducer()
        is_mean = self._weighted is False
        try:
            with self._timeline(), self._unit_times():
                output = self._stepper("training_step").run(
                    "training_step", args, microbatches=self.config.microbatches,
                    allow_uneven=not self.config.drop_last, seed=seed,
                    backward=not self._trainer.fit_loop._skip_backward,
                    loss_scale=self._loss_scale(expected, weighs=is_mean and reducer is None),
                    on_final=None if reducer is None else reducer.ready,
                )  # fmt: skip
            if reducer is not None:
                with state.calls.collective("the reduction of gradients", "dp"):
                    reducer.finish(output.weight)
        except BaseException:
            gradients.restore()
            raise
        gradients.close()
        if output.loss is None:
            if self.groups.world_size == 1:
                return output.result
            # Lightning refuses None in several processes, where one of them alone might give it.
            # A loss without gradients does the same: nothing is updated.
            output = replace(output, loss=torch.zeros((), device=self.root_device))
        else:
            self._weighted = output.weighted
        return self._with_hand_off(
            output, gradients, expected, is_mean=is_mean, reduced=reducer is not None
        )

    def _expected_gradient(self, foresight: Foresight) -> ExpectedGradient:
        """What the gradient of the returned loss will be, if it is left alone."""
        share = 1.0 / self._trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is None:
            return ExpectedGradient(share)
        one = torch.ones((), dtype=torch.float64, device=self.root_device)
        return ExpectedGradient(share, scaler.scale(one), is_sure=foresight.is_undisturbed)

    def _step_gradients(self, foresight: Foresight) -> StepGradients:
        """Where this step's gradients are until Lightning's backward."""
        if foresight.zeroes:
            self.optimizers[0].zero_grad()  # now, so that there are never two sets
            self._is_summed = True
        elif foresight.adds and self._weighted is False:
            self._make_partial()
            return GradientSum()  # no factor becomes known after the step only
        return GradientStash(self.deployment.local_parameters())

    def _loss_scale(
        self, expected: ExpectedGradient, *, weighs: bool
    ) -> Callable[[float], float | torch.Tensor]:
        """What the step's gradients are multiplied by, given the number of the batch's samples.

        Args:
            expected: what it is on one device.
            weighs: whether the share of this replica's samples is in it.
        """

        def scale(samples: float) -> float | torch.Tensor:
            agreement = self._agreement(samples) if weighs else None
            return expected.seed if agreement is None else expected.seed * agreement.share()

        return scale

    def _agreement(self, weight: float) -> WeightAgreement | None:
        """Tells the replicas what each of them weighs; None if there is one. Collective over dp."""
        sharing = self.deployment.sharing
        assert sharing is not None
        if sharing.dp_group is None:
            return None
        return WeightAgreement(weight, sharing.dp_group, len(sharing.dp_ranks), self.root_device)

    @contextmanager
    def _timeline(self) -> Iterator[None]:
        """Measures and logs the step inside, if it is one of those. Collective over the world."""
        every, engine = self.config.timeline_every_n_steps, self.deployment.engine
        step = self._trainer.fit_loop.total_batch_idx
        if engine is None or every == 0 or step == 0 or step % every:
            yield
            return
        with engine.measured() as records:
            yield
        folder = self._trainer.log_dir or self._trainer.default_root_dir  # a collective
        if records and self.is_global_zero:
            log_timeline(self._trainer, Path(folder) / "timelines", records)

    def _unit_times(self) -> AbstractContextManager[None]:
        """Measures the units in the step inside, if they are to be rebalanced."""
        return nullcontext() if self._rebalancer is None else self._rebalancer.measuring()

    def _early_reducer(self) -> EarlyReducer | None:
        """Reduces gradients while the rest of the backward runs, where that is possible.

        Not while batches accumulate, since only their sum is reduced, and not where steps return a
        ``loss_weight`` (which the first step tells), since gradients are then weighted by sums that
        are known at the end.
        """
        accumulates = self._trainer.accumulate_grad_batches > 1 or not self._is_summed
        if accumulates or self._weighted is not False:
            return None
        reducer = self._reducer.of(self.deployment)
        return EarlyReducer(reducer) if reducer.communicates else None

    def _with_hand_off(
        self, output: StepOutput, gradients: StepGradients, expected: ExpectedGradient, *,
        is_mean: bool, reduced: bool,
    ) -> Any:  # fmt: skip
        """The step's result with a loss whose backward installs the step's gradients.

        Args:
            output: of the step.
            gradients: of the step.
            expected: what the step was run with.
            is_mean: whether it was run as one that returns no ``loss_weight``.
            reduced: whether its gradients are summed over the replicas.
        """
        assert output.loss is not None
        factor = output.scale
        is_fixed = self.groups.dp_size > 1 or reduced or isinstance(gradients, GradientSum)
        if output.weighted and is_mean and is_fixed:
            raise UnsupportedError(
                "training_step returned `loss_weight` in this step but not in the first one. "
                "Return it in every step, or never."
            )
        agreement = None if is_mean else self._agreement(output.weight)
        if agreement is not None:
            # Weighted gradients are sums until now; this rank's may hold those of others in its
            # tensor group, also where its own weight is 0.
            factor = 1.0 / agreement.total() if output.weighted else agreement.share()

        def install(gradient: torch.Tensor) -> None:
            known = None if self._gradient is None else self._gradient.of(loss)
            if not reduced:
                self._make_partial()
            gradients.install(factor * expected.times(gradient, known))
            if not reduced and not self._block_sync:
                self._reduce_gradients()
                self._is_summed = True

        loss = hand_off(output.loss, install)
        if isinstance(output.result, Mapping):
            return {**output.result, "loss": loss}
        return loss

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's backward of the loss that `training_step` returned."""
        plugin, module = self.precision_plugin, self.lightning_module
        is_plain = (
            module.automatic_optimization
            and type(plugin).__module__.startswith(self._pl.__name__)
            and type(module).backward is self._pl.LightningModule.backward
            and isinstance(closure_loss, torch.Tensor)
            and not (args or kwargs)
        )
        self._gradient = KnownGradient(closure_loss) if is_plain else None
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._gradient = None

    def _manual_step(self, args: tuple[Any, ...], seed: tuple[int, ...]) -> Any:
        if self.config.microbatches > 1:
            raise UnsupportedError(
                f"manual optimization with microbatches={self.config.microbatches}: the step calls "
                "backward and optimizer.step itself, so it cannot be cut into microbatches. Set "
                "microbatches=1."
            )
        with self._global_norms():  # a manual step clips before the optimizer's step
            return self._stepper("training_step").run(
                "training_step", args, microbatches=1, allow_uneven=True, seed=seed,
                backward=False, around_backward=self._around_backward,
            ).result  # fmt: skip

    def _around_backward(self, backward: Callable[[], None]) -> None:
        """Reduces what a backward of a manual step adds to the gradients."""
        if not self._reducer.of(self.deployment).communicates:
            backward()
            return
        stash = GradientStash(self.deployment.local_parameters())
        try:
            backward()
            self._reduce_gradients(1.0 / self.groups.dp_size)
        except BaseException:
            stash.restore()
            raise
        stash.close()
        stash.install(1.0)

    def _make_partial(self) -> None:
        """Gradients that stay from before are not counted again by the next sum of replicas."""
        if self._is_summed:
            self._reducer.of(self.deployment).divide_reduced()
            self._is_summed = False

    def _reduce_gradients(self, share: float = 1.0) -> None:
        """Sums the gradients of replicas and mirrored parameters. Collective over the world.

        Args:
            share: what they are multiplied by.
        """
        reducer = self._reducer.of(self.deployment)
        if reducer.communicates:
            with state.calls.collective("the reduction of gradients", "dp"):
                reducer.start(None, share=share)
                reducer.finish()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While a batch only accumulates, its gradients are not reduced."""
        self._block_sync = True
        try:
            yield
        finally:
            self._block_sync = False

    def _global_norms(self) -> AbstractContextManager[None]:
        """Where norms of gradients that the user's code computes are those of all stages."""
        axis = state.replica_axis
        return global_clip(
            lambda: self.ownership, self.deployment.norm_group,
            lambda what: state.calls.collective(what, axis), self._norm_places,
        )  # fmt: skip

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The optimizer's step; norms that hooks compute in it are global.

        The optimizer works on this rank's parameters as they are; the closure of a manual step is
        the step's code again, forward and backward.
        Afterwards units move to other stages, if it is time. Collective over the world then.
        """
        runtime = self.deployment.runtime
        run = None if runtime is None else runtime.active_run()
        around: AbstractContextManager[None] = nullcontext()
        if run is not None:
            around = outside = run.context.outside_outer_mode()
            closure = partial(_back_in_step, outside, closure)
        with self._global_norms(), around:
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)  # type: ignore[misc]
        if self._rebalancer is not None and self._rebalancer.is_due:
            self._rebalancer.run(self.optimizers)  # all gradients are summed here
        return result

    # ---- evaluation ---------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step forward. Collective over pp."""
        return self._evaluate("validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step forward. Collective over pp."""
        return self._evaluate("test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step forward. Collective over pp."""
        return self._evaluate("predict_step", (*args, *kwargs.values()))

    def _evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        call = state.calls.collective(name, state.replica_axis)
        with no_inference_mode(), call:
            args = self._same_batch(args)
            self._ensure_ready(name, self._first_piece(args))
            self._steps_evaluated += 1
            self.deployment.is_last_batch = False  # loops of evaluation end in other collectives
            seed = (*self._seed(_NUMBERS[name]), self._steps_evaluated)
            return self._stepper(name).run(
                name, args, microbatches=self.config.microbatches, allow_uneven=True, seed=seed,
                backward=False,
            ).result  # fmt: skip

    # ---- batches --------------------------------------------------------------------------------

    def _first_piece(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first microbatch, which the partition is planned with."""
        if self.deployment.is_placed:
            return args
        pieces = split_batch(args[0], self.config.microbatches, allow_uneven=True)
        return (pieces[0].value, *args[1:])

    def _same_batch(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Makes sure that the stages of a replica hold the same batch. Collective over pp."""
        self.deployment.same_batch.check(args[0])
        return args

    def _seed(self, kind: int) -> tuple[int, ...]:
        """What the random streams of a kind of step begin with."""
        return (self.deployment.seed, self.deployment.data_rank, kind)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch, and gives followers the leader's, before any hook sees it."""
        batch = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        prescaled = self.config.prescaled_batch
        ranks, control = self.groups.batch_sharers(prescaled)
        if len(ranks) == 1 or self.config.batch_source != "leader":
            return batch
        group = self.groups.mp if prescaled else self.groups.pp
        return broadcast_batch(batch, ranks[0], control, group, self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Gives the ranks of a replica the same batches."""
        return prepare_dataloader(
            dataloader,
            training=bool(self._trainer is not None and self._trainer.training),
            drop_last=self.config.drop_last and self.config.microbatches > 1,
            dp_rank=self.groups.data_rank(self.config.prescaled_batch),
            seed_workers=os.environ.get("PL_SEED_WORKERS") == "1",
        )

    def _stepper(self, name: str) -> Stepper:
        return Stepper(deployment=self.deployment, precision=self._precision_context(name))

    def _precision_context(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        kind = {"training_step": "train", "validation_step": "val"}.get(name, name.split("_")[0])
        context: Callable[[], AbstractContextManager[Any]] = getattr(
            self.precision_plugin, f"{kind}_step_context"
        )
        return context


def _back_in_step(outside: OutsideOuterMode, closure: Callable[[], Any]) -> Any:
    """Calls the closure of an optimizer that runs outside of the step's code."""
    with outside.undone():
        return closure()
