"""What Lightning does between a step and the end of its backward, where that can be foreseen.

Lightning's closure is: the step, ``on_before_zero_grad`` and ``optimizer_zero_grad`` (at the first
batch of an accumulation), ``on_before_backward``, backward. Each may be the user's code, which may
read, keep or change gradients and the loss. Where none of it is, gradients need not wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

__all__ = ["Foresight", "foresee"]


@dataclass(frozen=True, slots=True)
class Foresight:
    """What is sure to follow a step.

    Attributes:
        zeroes: all gradients of the optimizer are dropped next, and nobody sees them before.
        adds: nothing but the backward of the loss follows, which adds to the gradients there.
        is_undisturbed: only Lightning's own code runs until the end of that backward.
    """

    zeroes: bool
    adds: bool
    is_undisturbed: bool


def foresee(trainer: Any, pl: ModuleType) -> Foresight:
    """Tells it for the step that is about to run, of automatic optimization.

    Args:
        trainer: is in its training loop.
        pl: the Lightning package that it is of.
    """
    epoch_loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    loop = epoch_loop.automatic_optimization
    is_own_loop = type(loop).__module__ == f"{pl.__name__}.loops.optimization.automatic"
    # A step that fetches its batches itself has no number that the loop would go by.
    takes_iterator = type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"
    if not is_own_loop or loop._skip_backward or takes_iterator:
        return Foresight(zeroes=False, adds=False, is_undisturbed=False)
    # As in `_make_zero_grad_fn` of that loop.
    is_first = epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
    zeroing = _is_free(trainer, pl, "on_before_zero_grad") and _zeroes(trainer, pl)
    backward = (
        _is_free(trainer, pl, "on_before_backward")
        and _is_of(module, "backward", pl.LightningModule)
        and type(trainer.precision_plugin).__module__.startswith(pl.__name__)
    )
    return Foresight(
        zeroes=is_first and zeroing,
        adds=not is_first and backward,
        is_undisturbed=backward and (zeroing or not is_first),
    )


def _zeroes(trainer: Any, pl: ModuleType) -> bool:
    """Whether zeroing drops the gradients of all parameters of the optimizer."""
    return _is_of(trainer.lightning_module, "optimizer_zero_grad", pl.LightningModule) and _is_of(
        trainer.optimizers[0], "zero_grad", torch.optim.Optimizer
    )


def _is_free(trainer: Any, pl: ModuleType, hook: str) -> bool:
    """Whether nobody has code in a hook."""
    return _is_of(trainer.lightning_module, hook, pl.LightningModule) and all(
        _is_of(callback, hook, pl.Callback) for callback in trainer.callbacks
    )


def _is_of(owner: Any, name: str, base: type) -> bool:
    """Whether an object's method is the one of its base class, on the instance too."""
    return getattr(getattr(owner, name), "__func__", None) is getattr(base, name)
