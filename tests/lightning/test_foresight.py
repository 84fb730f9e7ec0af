"""What of Lightning's closure can be foreseen: only what runs none of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, Timer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_smp.lightning.foresight import Foresight, foresee
from tests.lightning.contract import Model, loader


class Asks(Model):
    """Asks in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Foresight] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found.append(foresee(self.trainer, pl))
        return super().training_step(batch, batch_idx)


class Keeps(Asks):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


class Fetches(Asks):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


class Backs(Asks):
    def backward(self, loss: Any) -> None:
        loss.backward()


class Zeroes(Asks):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.zero_grad = lambda: None
        return optimizer


class Rounded(Precision):
    """Somebody's own precision."""


def _ask(model: Asks, *callbacks: pl.Callback, **options: Any) -> list[str]:
    """Per batch, what was foreseen: z(eroes), a(dds), u(ndisturbed)."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(model, loader(12))
    return [
        "z" * f.zeroes + "a" * f.adds + "u" * f.is_undisturbed or "-" for f in model.found
    ]  # fmt: skip


def _nothing(*args: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: _ask(Asks(), Timer()), "zu au zu"),
        (lambda: _ask(Asks(), plugins=MixedPrecision("bf16-mixed", "cpu")), "zu au zu"),
        (lambda: _ask(Asks(), LambdaCallback(on_after_backward=_nothing)), "zu au zu"),
        (lambda: _ask(Asks(), LambdaCallback(on_before_zero_grad=_nothing)), "- au -"),
        (lambda: _ask(Asks(), LambdaCallback(on_before_backward=_nothing)), "z - z"),
        (lambda: _ask(Keeps()), "- au -"),
        (lambda: _ask(Zeroes()), "- au -"),
        (lambda: _ask(Backs()), "z - z"),
        (lambda: _ask(Asks(), plugins=Rounded()), "z - z"),
        (lambda: _ask(Fetches()), "- - -"),
    ],
)
def test_only_free_hooks_are_foreseen(run: Callable[[], list[str]], expected: str) -> None:
    assert " ".join(run()) == expected


def test_a_loop_that_skips_backward_zeroes_nothing() -> None:
    model = Asks()

    class Skips(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.fit_loop._skip_backward = True

    assert _ask(model, Skips()) == ["-", "-", "-"]
    assert all(torch.equal(p, q) for p, q in zip(
        model.parameters(), Asks().parameters(), strict=True))  # fmt: skip
