"""What a distributed optimizer does under the key `fp16`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from lightning_smp.errors import SMPError, UnsupportedError
from lightning_smp.process_state import state
from lightning_smp.script.half import LossScale, MasterWeights

__all__ = ["SCALE_KEY", "HalfOptimizer"]

SCALE_KEY: Final = "smp_loss_scale"
"""In a state dict: the state of the loss scale."""


class HalfOptimizer:
    """The part of a `DistributedOptimizer` about float16."""

    optimizer: torch.optim.Optimizer
    _scale: LossScale
    _masters: MasterWeights | None
    _scaled_backwards: int

    @property
    def loss_scale(self) -> float:
        """The factor of the loss under `fp16`; 1.0 without it."""
        return self._scale.value if self._is_half() else 1.0

    @property
    def overflow(self) -> bool:
        """Under `fp16`, whether the last step was skipped for gradients that overflowed."""
        return self._masters is not None and self._masters.overflow

    def scale_backward(self) -> float:
        """The factor of a backward that begins; notes that there was one."""
        self._scaled_backwards += 1
        return self.loss_scale

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Under `fp16`, clips the float32 gradients by their global norm, before `step`.

        Collective over the world.

        Returns:
            The norm before, equal on all ranks of a replica; infinity if gradients overflowed.

        Raises:
            UnsupportedError: without `fp16`, or another norm than 2.
            SMPError: no backward came before.
        """
        if not self._is_half() or float(norm_type) != 2.0:
            raise UnsupportedError(
                f"optimizer.clip_master_grads(norm_type={norm_type}) works with fp16=True and the "
                "2-norm. Use torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)."
            )
        return self._prepared().clip(max_norm)

    def follow_parameters(self) -> None:
        """The model has loaded other weights: float32 copies take them over."""
        if self._masters is not None:
            self._masters.follow()

    def _check_parameters(self) -> None:
        raise NotImplementedError

    def _step_half(self) -> None:
        masters = self._prepared()
        if not masters.overflow:
            self.optimizer.step()
            masters.publish()
        masters.release()
        self._scale.update(overflow=masters.overflow)
        self._scaled_backwards = 0

    def _prepared(self) -> MasterWeights:
        if not self._scaled_backwards:
            raise SMPError(
                "fp16=True: the optimizer is to step, but model.backward(loss) was not called "
                "since its last step; loss.backward() does not scale the loss. Call "
                "model.backward(loss)."
            )
        masters = self._float_copies()
        masters.prepare(self._scale.value)
        return masters

    def _float_copies(self) -> MasterWeights:
        model = state.model
        assert model is not None
        if self._masters is None:
            self._check_parameters()  # the groups hold copies afterwards
            self._masters = MasterWeights(self.optimizer, model.deployment)
        return self._masters

    def _is_half(self) -> bool:
        cfg = state.cfg
        return cfg is not None and cfg.fp16 and state.model is not None

    @contextmanager
    def _as_on_one_device(self) -> Iterator[dict[str, Any]]:
        """For saving; gives what is saved beside the optimizer's own state."""
        model = state.model
        if not self._is_half() or model is None or not model.partitioned:
            yield {}
            return
        with self._float_copies().hidden():
            yield {SCALE_KEY: self._scale.state()}

    def _load_half(self, full_state: Mapping[str, Any]) -> None:
        if SCALE_KEY in full_state:
            self._scale.restore(list(full_state[SCALE_KEY]))
        self._float_copies().load({k: v for k, v in full_state.items() if k != SCALE_KEY})
