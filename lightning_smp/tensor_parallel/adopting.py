"""Turns a module in place into one that is split over a tensor group.

The object stays: its names, hooks, parameters (which then hold this rank's part, so that ties and
optimizers stay right) and whoever refers to it. Only its class changes, to one that is made of the
distributed behaviour and the original class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_smp.deferred import become, is_deferred, take_part
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["adopt", "is_split"]

M = TypeVar("M", bound=DistributedModule)


def adopt(
    module: nn.Module,
    behaviour: type[M],
    tp: TensorParallel,
    shardings: Mapping[str, Sharding],
    attributes: Mapping[str, Any],
    *,
    scaled: Iterable[str] = (),
) -> M:
    """Make `module` a distributed one, and keep only this rank's part of its parameters.

    Args:
        module: the module.
        behaviour: what it becomes; its `forward` calls the module's own as ``super().forward``.
        tp: the tensor group.
        shardings: how each split parameter or buffer of the module is split, by local name. One
            that holds its part already, because another module shares it, is left as it is.
        attributes: attributes of the behaviour, and of the module that must fit the part.
        scaled: local names of whole parameters that see the samples of the whole group.
    """
    for name, sharding in shardings.items():
        _keep_part(module, name, sharding, tp.rank)
    module.__class__ = _combined(behaviour, type(module))  # type: ignore[arg-type]
    assert isinstance(module, behaviour)
    module.tp, module.shardings = tp, dict(shardings)
    module.scaled_batch_parameters, module.ordinal = set(scaled), 0
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def is_split(model: nn.Module, tp: TensorParallel) -> bool:
    """Whether modules of a model have been adopted for a group of this size."""
    return any(
        isinstance(module, DistributedModule)
        and module.tp.size == tp.size
        and "_adopted" in vars(type(module))
        for module in model.modules()
    )


@cache
def _combined(behaviour: type[DistributedModule], original: type[nn.Module]) -> Any:
    return type(
        f"{behaviour.__name__}{original.__name__}",
        (behaviour, original),
        {"__module__": behaviour.__module__, "__doc__": behaviour.__doc__, "_adopted": original},
    )


def _keep_part(module: nn.Module, name: str, sharding: Sharding, rank: int) -> None:
    tensor: Tensor = getattr(module, name)
    if tuple(tensor.shape) == sharding.local_shape(rank) != sharding.shape:
        return

    if is_deferred(tensor):
        become(tensor, take_part(tensor, sharding.part(rank)))
    else:
        tensor.data = sharding.shard(tensor.data, rank)
    tensor.grad = None
