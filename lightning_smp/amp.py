"""A gradient scaler whose verdict, step or skip, is the same on every rank.

torch's scaler looks at the gradients of its own process. With stages on different ranks one could
skip a step that the others take, and a rank without gradients could not step at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_smp.process_state import state

__all__ = ["AgreedGradScaler", "GradScaler", "make_scaler"]


class AgreedGradScaler(torch.amp.GradScaler):
    """A `GradScaler` that skips a step if any rank of a group found an inf or NaN gradient.

    Its state dict is that of the plain scaler, so checkpoints are exchangeable.

    Collective over `group`: `unscale_`, or `step` where `unscale_` was not called before, must be
    called by every rank, for its optimizers in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """Makes a scaler.

        Args:
            group: all ranks that must agree, stages and replicas; None if there is one.
            device: this rank's device.
            init_scale: as in torch, like the rest.
            growth_factor: factor after `growth_interval` steps without inf or NaN.
            backoff_factor: factor after a step with inf or NaN.
            growth_interval: number of steps.
            enabled: False makes it do nothing.
        """
        super().__init__(
            device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._group = group
        self._rank_device = device

    @override
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # Both ways to a verdict pass here: unscale_, and step for fused optimizers.
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        verdict = torch.zeros((), dtype=torch.float32, device=self._rank_device)
        for value in found.values():
            verdict += value.to(self._rank_device)
        if self._group is not None:
            with state.calls.collective("the check for inf and NaN", "world"):
                dist.all_reduce(verdict, dist.ReduceOp.MAX, group=self._group)
        return {self._rank_device: verdict}

    @override
    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        # A rank that never scaled a loss takes part all the same.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(self._rank_device)
        return super()._check_scale_growth_tracker(funcname)


class GradScaler(AgreedGradScaler):
    """`smp.amp.GradScaler`: torch's scaler for scripts; all ranks of the job take the same verdict.

    ``scale`` is called in the step, ``step`` and ``update`` outside of it, by every rank.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """Makes a scaler; the arguments are torch's.

        Raises:
            SMPError: `smp.init` was not called.
        """
        groups = state.groups
        super().__init__(
            groups.world if groups.world_size > 1 else None,
            state.device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    @override
    def scale(self, outputs: Any) -> Any:
        # The analysis must not make the scale itself a tensor without numbers.
        return outputs if state.tracing else super().scale(outputs)


def make_scaler(
    scaler: torch.amp.GradScaler, group: dist.ProcessGroup | None, device: torch.device
) -> AgreedGradScaler:
    """Return an agreeing scaler with the hyper-parameters and state of `scaler`.

    Not a collective; but each rank of `group` must use one.

    Args:
        scaler: what it replaces, e.g. `MixedPrecision.scaler`.
        group: all ranks that must agree, stages and replicas; None if there is one.
        device: this rank's device.
    """
    if not scaler.is_enabled():
        return AgreedGradScaler(group, device, enabled=False)
    agreed = AgreedGradScaler(group, device)
    agreed.load_state_dict(scaler.state_dict())
    return agreed
