"""What a distributed model tells about parameters that are split over tensor-parallel ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import Tensor, nn

from lightning_smp.config import SMPConfig
from lightning_smp.deploy.deployment import Deployment
from lightning_smp.deploy.distributing import distribute_model
from lightning_smp.process_state import state
from lightning_smp.tensor_parallel.module import distributed_modules

__all__ = ["TensorParts", "replace_modules"]

_log = logging.getLogger(__name__)


def replace_modules(module: nn.Module, config: SMPConfig) -> nn.Module:
    """The module with those that are to be distributed replaced; itself at degree 1.

    Collective over tp.
    """
    say = _log.info if state.groups.rank == 0 else _log.debug
    return distribute_model(module, config, state.groups, say)


class TensorParts:
    """The methods about distributed modules. At tensor-parallel degree 1 there are none."""

    module: nn.Module
    deployment: Deployment

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules that are split over the ranks of the tensor group."""
        return (module for _, module in distributed_modules(self.module) if module.tp.size > 1)

    def is_distributed_parameter(self, param: Tensor) -> bool:
        """Whether a parameter is split over the ranks of the tensor group."""
        return param in self.deployment.ownership.tensor.by_parameter

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Whether a buffer is split over the ranks of the tensor group."""
        split = self.deployment.ownership.tensor.shardings
        return any(found is buffer and name in split for name, found in self.module.named_buffers())

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether a parameter sees the samples of the whole tensor group."""
        return self.deployment.ownership.tensor.sees_group(param)

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Whether a buffer belongs to a module that sees the samples of the whole group."""
        return any(
            found is buffer for module in self.distributed_modules() for found in module.buffers()
        )

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters whose gradients are reduced over the dp group."""
        named = self.module.named_parameters(prefix="module")
        return ((name, p) for name, p in named if not self.is_scaled_batch_parameter(p))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters whose gradients are reduced over the rdp group."""
        named = self.module.named_parameters(prefix="module")
        return ((name, p) for name, p in named if self.is_scaled_batch_parameter(p))
