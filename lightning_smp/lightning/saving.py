"""Checkpoints of the strategy: one ordinary Lightning file, whatever the layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lightning_smp.errors import CheckpointError
from lightning_smp.lightning.environment import Environment
from lightning_smp.process_state import state
from lightning_smp.weights.checkpoint import (
    gather_optimizer_state,
    gather_state_dict,
    load_full_state_dict,
    load_optimizer_state,
)
from lightning_smp.weights.collect import PipelineLinks

__all__ = ["Saving"]


class Saving(Environment):
    """Whole states on the writer, this stage's part of them on loading."""

    def _links(self) -> PipelineLinks:
        return PipelineLinks.over(self.groups, self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on global rank 0, empty elsewhere. Collective over the world."""
        self._require_all_ranks()
        if self._deployment is None or not self._deployment.holds_part:
            return dict(self.lightning_module.state_dict())
        call = state.calls.collective("lightning_module_state_dict", state.replica_axis)
        with call, self._deployment.gathering():
            return gather_state_dict(self.lightning_module, self.ownership, self._links())

    def _require_all_ranks(self) -> None:
        """Refuses to gather while an error is handled: the other ranks would never come."""
        interrupted = self._trainer is not None and self._trainer.state.status == "interrupted"
        if not interrupted or self.groups.world_size == 1:
            return
        error = sys.exc_info()[1]
        if error is not None:
            self.on_exception(error)  # Lightning will not come to it
        raise CheckpointError(
            "a checkpoint was asked for after an exception (OnExceptionCheckpoint or "
            "ModelCheckpoint(save_on_exception=True)): it needs all ranks, and the others may be "
            "waiting elsewhere. Save regularly with ModelCheckpoint(every_n_train_steps=...) "
            "and resume from the last file."
        )

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state on global rank 0, empty elsewhere. Collective over the world."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if not self.deployment.holds_part:
            return dict(optimizer.state_dict())
        with state.calls.collective("optimizer_state", state.replica_axis):
            return gather_optimizer_state(optimizer, self.ownership, self._links())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this stage's part of a whole state dict."""
        load_full_state_dict(
            self.lightning_module, checkpoint["state_dict"], self.ownership, strict=strict
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this stage's part of whole optimizer states."""
        states = checkpoint["optimizer_states"]
        for optimizer, given in zip(self.optimizers, states, strict=False):
            load_optimizer_state(optimizer, given, self.ownership)
        if self.deployment.is_split or self.groups.pp_size == 1:
            self._optimizers_to_device(self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Global rank 0 (rdp_rank 0) writes one ordinary file. Collective over the world."""
        filepath = self.broadcast(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Every rank reads the file that rank 0 chose. Collective over the world."""
        checkpoint_path = self.broadcast(checkpoint_path)
        return super().load_checkpoint(  # type: ignore[misc]
            checkpoint_path, weights_only=weights_only
        )
