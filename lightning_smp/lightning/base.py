"""What the parts of the strategy share: the state of a run, and Lightning's own modules."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.deploy.reducing import KeptReducer
from lightning_smp.errors import ConfigError
from lightning_smp.weights.ownership import Ownership

if TYPE_CHECKING:
    from lightning_smp.config import SMPConfig
    from lightning_smp.deploy.deployment import Deployment
    from lightning_smp.deploy.rebalancing import Rebalanced, Rebalancer
    from lightning_smp.failure import FailureWatch
    from lightning_smp.groups import Groups
    from lightning_smp.lightning.handoff import KnownGradient

__all__ = ["StrategyState"]


class StrategyState:
    """The attributes that the strategy's parts work on.

    Attributes:
        config: the configuration.
        lightning_module: the user's module.
        parallel_devices: devices of this node's processes.
    """

    config: SMPConfig
    lightning_module: Any
    model: Any
    accelerator: Any
    cluster_environment: Any
    precision_plugin: Any
    checkpoint_io: Any
    optimizers: list[Any]
    parallel_devices: list[torch.device] | None
    local_rank: int
    node_rank: int
    global_rank: int
    is_global_zero: bool
    _pl: ModuleType
    _fabric: ModuleType

    def _start(self, config: SMPConfig, backend: str | None) -> None:
        """The state before a run."""
        if config.fp16:
            raise ConfigError(
                "fp16 = True: it is for scripts, where smp.DistributedOptimizer scales the loss. "
                'In a LightningModule use Trainer(precision="16-mixed").'
            )
        if config.ddp_port is not None:
            raise ConfigError(
                f"ddp_port = {config.ddp_port}: it is for scripts. Under a Trainer the launcher "
                "chooses the port: remove it, or set the environment variable MASTER_PORT."
            )
        self.config = config
        self._backend = backend
        self._num_nodes = 1
        self._layer_sync: Any = None
        self._trainer: Any = None
        self._groups: Groups | None = None
        self._deployment: Deployment | None = None
        self._rebalancer: Rebalancer | None = None
        self._watch: FailureWatch | None = None
        self._block_sync = False
        self._weighted: bool | None = None
        self._gradient: KnownGradient | None = None
        self._reducer = KeptReducer()
        self._is_summed = True  # whether the gradients there are those of all replicas
        self._steps_evaluated = 0
        self._norm_places: list[tuple[ModuleType, str]] = []

    @property
    def groups(self) -> Groups:
        """The process groups of this run.

        Raises:
            ConfigError: the trainer has not started.
        """
        if self._groups is None:
            raise ConfigError(
                "the process groups were asked for before the trainer started; they exist from "
                "`setup` on."
            )
        return self._groups

    @property
    def deployment(self) -> Deployment:
        """The module over the ranks; exists from `setup` on."""
        assert self._deployment is not None
        return self._deployment

    @property
    def rebalanced(self) -> Rebalanced | None:
        """What `rebalance_after_steps` has done; None before."""
        return None if self._rebalancer is None else self._rebalancer.result

    @property
    def ownership(self) -> Ownership:
        """Which stage holds which parameter."""
        if self._deployment is None:
            return Ownership.whole(self.lightning_module)
        return self._deployment.ownership

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    def _optimizers_to_device(self, device: torch.device) -> None:
        move = self._import_fabric("utilities.optimizer")._optimizer_to_device
        for optimizer in self.optimizers:
            move(optimizer, device)

    def _import(self, name: str) -> Any:
        return importlib.import_module(f"{self._pl.__name__}.{name}")

    def _import_fabric(self, name: str) -> Any:
        return importlib.import_module(f"{self._fabric.__name__}.{name}")
