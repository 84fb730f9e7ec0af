"""The strategy's steps: a batch in, losses, logs and gradients out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_smp.batch import batch_digest, split_batch
from lightning_smp.errors import UnsupportedError
from lightning_smp.lightning.batch_broadcast import broadcast_batch
from lightning_smp.lightning.clip import global_clip
from lightning_smp.lightning.data import check_same_batch, prepare_dataloader
from lightning_smp.lightning.handoff import GradientStash, hand_off
from lightning_smp.lightning.saving import Saving
from lightning_smp.lightning.stepper import StepOutput, Stepper
from lightning_smp.weights.gradients import GradientReducer
from lightning_smp.weights.sharing import WeightAgreement

__all__ = ["Steps"]

_CHECKED_STEPS = 10
_CHECK_EVERY = 100
_NUMBERS = {"training_step": 0, "validation_step": 1, "test_step": 2, "predict_step": 3}


class Steps(Saving):
    """Runs the user's steps and hands their gradients to Lightning."""

    def _ensure_ready(self, name: str, args: tuple[Any, ...]) -> None:
        raise NotImplementedError

    # ---- training ---------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step, forward and backward. Collective over the world."""
        args = self._same_batch((*args, *kwargs.values()))
        self._ensure_ready("training_step", self._first_piece(args))
        seed = (self._seed, self.groups.dp_rank, 0, self._trainer.fit_loop.total_batch_idx)
        if not self.lightning_module.automatic_optimization:
            return self._manual_step(args, seed)
        accumulate = self._trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        expected = (1.0 if scaler is None else scaler.get_scale()) / accumulate
        stash = GradientStash(self._local_parameters())
        reducer = self._early_reducer(accumulate)
        try:
            output = self._stepper("training_step").run(
                "training_step", args, microbatches=self.config.microbatches,
                allow_uneven=not self.config.drop_last, seed=seed,
                backward=not self._trainer.fit_loop._skip_backward, loss_scale=expected,
                on_final=None if reducer is None else reducer.ready,
            )  # fmt: skip
            if reducer is not None:
                reducer.finish(output.weight)
        except BaseException:
            stash.restore()
            raise
        stash.close()
        if output.loss is None:
            if self.groups.world_size == 1:
                return output.result
            # Lightning refuses None in several processes, where one of them alone might give it.
            # A loss without gradients does the same: nothing is updated.
            output = replace(output, loss=torch.zeros((), device=self.root_device))
        return self._with_hand_off(output, stash, expected, reduced=reducer is not None)

    def _early_reducer(self, accumulate: int) -> _EarlyReducer | None:
        """Reduces gradients while the rest of the backward runs, where that is possible.

        Not while batches accumulate, since only their sum is reduced, and not where steps return a
        ``loss_weight`` (which the first step tells), since gradients are then weighted by sums that
        are known at the end.
        """
        if accumulate > 1 or self._weighted is not False:
            return None
        reducer = self._reducer()
        return _EarlyReducer(reducer) if reducer.communicates else None

    def _with_hand_off(
        self, output: StepOutput, stash: GradientStash, expected: float, *, reduced: bool
    ) -> Any:
        """The step's result with a loss whose backward installs the step's gradients."""
        assert output.loss is not None
        share = 1.0
        if output.weighted and reduced:
            raise UnsupportedError(
                "training_step returned `loss_weight` in this step but not in the first one. "
                "Return it in every step, or never."
            )
        self._weighted = output.weighted
        sharing = self._sharing
        assert sharing is not None
        if sharing.dp_group is not None and not reduced:
            share = WeightAgreement(
                output.weight, sharing.dp_group, len(sharing.dp_ranks), self.root_device
            ).share()

        def install(gradient: torch.Tensor) -> None:
            stash.install(output.scale * share * float(gradient) / expected)
            if not self._block_sync and not reduced:
                self._reduce_gradients()

        loss = hand_off(output.loss, install)
        if isinstance(output.result, Mapping):
            return {**output.result, "loss": loss}
        return loss

    def _manual_step(self, args: tuple[Any, ...], seed: tuple[int, ...]) -> Any:
        if self.config.microbatches > 1:
            raise UnsupportedError(
                f"manual optimization with microbatches={self.config.microbatches}: the step calls "
                "backward and optimizer.step itself, so it cannot be cut into microbatches. Set "
                "microbatches=1."
            )
        return self._stepper("training_step").run(
            "training_step", args, microbatches=1, allow_uneven=True, seed=seed,
            backward=False, around_backward=self._around_backward,
        ).result  # fmt: skip

    def _around_backward(self, backward: Callable[[], None]) -> None:
        """Reduces what a backward of a manual step adds to the gradients."""
        stash = GradientStash(self._local_parameters())
        try:
            backward()
            if self.groups.dp_size > 1:
                for parameter in self._local_parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(self.groups.dp_size)
            self._reduce_gradients()
        except BaseException:
            stash.restore()
            raise
        stash.close()
        stash.install(1.0)

    def _reducer(self) -> GradientReducer:
        assert self._sharing is not None
        size = int(self.config.bucket_cap_mb * 2**20)
        return GradientReducer(self.ownership, self._sharing, bucket_bytes=size)

    def _reduce_gradients(self) -> None:
        """Sums the gradients of replicas and mirrored parameters. Collective over the world."""
        reducer = self._reducer()
        if reducer.communicates:
            reducer.start(None)
            reducer.finish()

    def _local_parameters(self) -> list[nn.Parameter]:
        ownership = self.ownership
        return [p for p in ownership.parameters() if ownership.is_local(p)]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While a batch only accumulates, its gradients are not reduced."""
        self._block_sync = True
        try:
            yield
        finally:
            self._block_sync = False

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step; norms that hooks compute in it are global."""
        group = self.groups.pp if self.groups.pp_size > 1 else None
        run = None if self._runtime is None else self._runtime.active_run()
        outside = nullcontext() if run is None else run.context.outside_outer_mode()
        with global_clip(self.ownership, group), outside:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

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
        args = self._same_batch(args)
        with _no_inference_mode():
            self._ensure_ready(name, self._first_piece(args))
            self._steps_evaluated += 1
            seed = (self._seed, self.groups.dp_rank, _NUMBERS[name], self._steps_evaluated)
            return self._stepper(name).run(
                name, args, microbatches=self.config.microbatches, allow_uneven=True, seed=seed,
                backward=False,
            ).result  # fmt: skip

    # ---- batches --------------------------------------------------------------------------------

    def _first_piece(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first microbatch, which the partition is planned with."""
        if self._ownership is not None:
            return args
        pieces = split_batch(args[0], self.config.microbatches, allow_uneven=True)
        return (pieces[0].value, *args[1:])

    def _same_batch(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Makes sure that the stages of a replica hold the same batch. Collective over pp."""
        groups = self.groups
        if groups.pp_size == 1:
            return args
        ranks = groups.topology.group("pp", groups.rank)
        step = self._steps_checked
        self._steps_checked += 1
        if step < _CHECKED_STEPS or step % _CHECK_EVERY == 0:
            check_same_batch(batch_digest(args[0]), groups.control, ranks, step)
        return args

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch, and gives followers the leader's, before any hook sees it."""
        batch = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        groups = self.groups
        if groups.pp_size == 1 or self.config.batch_source != "leader":
            return batch
        leader = groups.topology.group("pp", groups.rank)[0]
        return broadcast_batch(batch, leader, groups.control, groups.pp, self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Gives the ranks of a replica the same batches."""
        return prepare_dataloader(
            dataloader,
            training=bool(self._trainer is not None and self._trainer.training),
            drop_last=self.config.drop_last and self.config.microbatches > 1,
            dp_rank=self.groups.dp_rank,
            seed_workers=os.environ.get("PL_SEED_WORKERS") == "1",
        )

    def _stepper(self, name: str) -> Stepper:
        return Stepper(
            module=self.lightning_module, engine=self._engine, seeding=self._seeding,
            precision=self._precision_context(name),
        )  # fmt: skip

    def _precision_context(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        kind = {"training_step": "train", "validation_step": "val"}.get(name, name.split("_")[0])
        context: Callable[[], AbstractContextManager[Any]] = getattr(
            self.precision_plugin, f"{kind}_step_context"
        )
        return context


class _EarlyReducer:
    """Reduces while backward goes on; begins when the first gradient is final."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._started = False

    def ready(self, parameters: list[nn.Parameter], weight: float) -> None:
        """The gradients of these parameters are final; ``weight`` is the replica's samples."""
        if not self._started:
            self._reducer.start(weight)
            self._started = True
        for parameter in parameters:
            self._reducer.ready(parameter)

    def finish(self, weight: float) -> None:
        """Reduces what is left and waits."""
        self.ready([], weight)
        self._reducer.finish()


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Inference tensors have no version counters, which in-place changes are seen by."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
