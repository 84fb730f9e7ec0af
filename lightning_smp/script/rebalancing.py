"""Moving units between the steps of a script."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_smp.deploy.rebalancing import Rebalanced, Rebalancer
from lightning_smp.process_state import state

if TYPE_CHECKING:
    from lightning_smp.deploy.deployment import Deployment
    from lightning_smp.script.replicas import Replicas

__all__ = ["Rebalancing"]

_log = logging.getLogger(__name__)


class Rebalancing:
    """The part of `DistributedModel` that moves units by measured times."""

    deployment: Deployment
    replicas: Replicas
    _rebalancer: Rebalancer | None = None

    def _watch_norms(self) -> None:
        raise NotImplementedError

    def rebalance(self, after_steps: int = 5) -> None:
        """Measures the next training steps, then moves units so that stages take equally long.

        The move happens at the start of the training step that follows, once. From then on other
        parameters are local: ask `local_parameters` and the like again. All ranks must call it
        between the same steps. See docs/rebalance.md.

        Args:
            after_steps: how many steps; at least 2, since a step may record its program.

        Raises:
            ConfigError: this configuration cannot be rebalanced.
        """
        config: Any = dataclasses.replace(
            self.deployment.config, rebalance_after_steps=after_steps
        )  # checks the rules
        self._rebalancer = Rebalancer(self.deployment, config.rebalance_after_steps, _log.info)

    @property
    def rebalanced(self) -> Rebalanced | None:
        """What rebalancing has done; None before."""
        return None if self._rebalancer is None else self._rebalancer.result

    def rebalance_if_due(self) -> None:
        """Before a training step: moves units if it is time. Collective over the world then."""
        rebalancer, replicas = self._rebalancer, self.replicas
        if rebalancer is None or not rebalancer.is_due:
            return
        if replicas.is_accumulating or replicas.joining is not None:
            return  # gradients are not summed yet, or ranks without data would not come here
        optimizer = state.optimizer
        rebalancer.run([] if optimizer is None else [optimizer.optimizer])
        self._watch_norms()

    def unit_times(self) -> AbstractContextManager[None]:
        """Measures the units in the training step inside, if they are to be rebalanced."""
        return nullcontext() if self._rebalancer is None else self._rebalancer.measuring()
