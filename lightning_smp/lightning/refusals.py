"""What cannot give the numbers of one device with a split model, refused by name."""

from __future__ import annotations

from typing import Any

import torch

from lightning_smp.config import SMPConfig
from lightning_smp.errors import UnsupportedError

__all__ = ["check_trainer"]

_CALLBACKS = {
    "StochasticWeightAveraging": "it averages whole copies of the model",
    "WeightAveraging": "it averages whole copies of the model",
    "EMAWeightAveraging": "it averages whole copies of the model",
    "ModelPruning": "it rewrites weights that live on other stages",
    "BatchSizeFinder": "running out of memory on one stage would leave the others waiting",
}


def check_trainer(
    trainer: Any, module: Any, config: SMPConfig, optimizers: list[Any] | None = None
) -> None:
    """Raises UnsupportedError for a callback or optimizer that needs the whole model."""
    degrees = {
        key: degree
        for key in ("pipeline_parallel_degree", "tensor_parallel_degree")
        if (degree := getattr(config, key)) > 1
    }
    if getattr(trainer, "_val_check_time_interval", None) is not None and trainer.world_size > 1:
        raise UnsupportedError(
            f"a val_check_interval of {trainer._val_check_time_interval} s with "
            f"{trainer.world_size} processes: each rank reads its own clock, so they would not "
            "validate at the same batch. Give a number of batches or a fraction of an epoch."
        )
    if config.rebalance_after_steps and not module.automatic_optimization:
        raise UnsupportedError(
            f"rebalance_after_steps={config.rebalance_after_steps} with manual optimization, whose "
            "steps follow no program that could be measured. Use rebalance_after_steps=0."
        )
    for callback in trainer.callbacks if degrees else ():
        for kind in type(callback).__mro__:
            reason = _CALLBACKS.get(kind.__name__)
            if reason:
                raise UnsupportedError(
                    f"the callback {type(callback).__name__} cannot work with "
                    f"{' and '.join(f'{key}={degree}' for key, degree in degrees.items())}: "
                    f"{reason}, but no rank holds the whole model. Remove it, or apply it to a "
                    "checkpoint after the run."
                )
    if degrees:
        _check_registered(module, optimizers or [])
    for optimizer in optimizers or ():
        if isinstance(optimizer, torch.optim.LBFGS) and (degrees or config.microbatches > 1):
            raise UnsupportedError(
                "the optimizer LBFGS runs the step several times for one update and needs dot "
                "products over the whole model. Use another optimizer, or "
                "pipeline_parallel_degree=1, tensor_parallel_degree=1 and microbatches=1."
            )


def _check_registered(module: Any, optimizers: list[Any]) -> None:
    """What the module does not know has no stage: each rank would train a copy of its own."""
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.requires_grad and id(tensor) not in known:
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} trains a tensor of shape "
                        f"{tuple(tensor.shape)} that is no parameter of "
                        f"{type(module).__name__}, so that no stage holds it. Make it an "
                        "nn.Parameter, or its module an attribute (nn.ModuleList, not a list)."
                    )
