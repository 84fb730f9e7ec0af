"""`smp.partition` and `smp.set_partition`: stages by hand, where `auto_partition` is off."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.manual import check_stage
from lightning_smp.partitioning.marks import mark_created, mark_tree
from lightning_smp.placed.units import entry_of
from lightning_smp.process_state import state

__all__ = ["partition", "set_partition"]


def partition(index: int) -> AbstractContextManager[None]:
    """Assigns every module that is created in the body to a stage.

    Contexts nest, the innermost wins. Modules that no context and no `set_partition` covers go to
    `default_partition`. With `auto_partition=True` assignments are ignored.

    Args:
        index: stage, from 0 to the number of stages - 1. A range that is not known yet is checked
            at the first step.

    Raises:
        PartitionError: `index` is no such number.
    """
    _check(index, "the index of smp.partition")
    return mark_created(index)


def set_partition(module: nn.Module, index: int) -> None:
    """Assigns a module, and all that is below it now, to a stage; before the first step.

    Args:
        module: an existing module, part of a wrapped model or not.
        index: as in `partition`.

    Raises:
        PartitionError: `index` is no stage, or the model is split already.
    """
    _check(index, f"the stage given to {type(module).__name__} by smp.set_partition")
    if _is_placed(module):
        raise PartitionError(
            f"smp.set_partition: {type(module).__name__} is asked to be on stage {index}, but the "
            "model is split already. Assign modules before the first step."
        )
    mark_tree(module, index)


def _check(index: int, what: str) -> None:
    cfg = state.cfg
    if cfg is not None and not cfg.auto_partition:
        check_stage(index, cfg.pipeline_parallel_degree, what)
    elif isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise PartitionError(
            f"{what} is {index!r}. It must be an integer from 0 to the number of stages - 1."
        )


def _is_placed(module: nn.Module) -> bool:
    if any(entry_of(inner) is not None for inner in module.modules()):
        return True
    model = state.model
    return (
        model is not None
        and model.deployment.is_split
        and any(module is m for m in model.modules())
    )
