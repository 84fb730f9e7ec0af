"""The key `fp16`: float16 parameters, float32 master weights, and a scale of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.deploy.deployment import Deployment
from lightning_smp.errors import ConfigError
from lightning_smp.process_state import state
from lightning_smp.weights.clip import total_norm

__all__ = ["LossScale", "MasterWeights", "make_loss_scale", "to_float", "to_half"]

_MASTER: Final = "smp_master"
"""Name of a parameter's master weights in an optimizer's saved state."""


def to_half(tensor: Tensor) -> Tensor:
    """A float32 input of a float16 model as float16; other types stay."""
    return tensor.half() if tensor.dtype is torch.float32 else tensor


def to_float(tensor: Tensor) -> Tensor:
    """A float16 output as float32, for the loss; other types stay."""
    return tensor.float() if tensor.dtype is torch.float16 else tensor


@dataclass(kw_only=True)
class LossScale:
    """A factor of the loss that adapts to overflows.

    After an overflow it is divided by ``scale_factor``; after ``scale_window`` steps without one it
    is multiplied. With a ``delayed_shift`` above 1 so many overflows are needed before it shrinks;
    they need not follow each other unless ``consecutive_hysteresis``.

    Attributes:
        init_scale: the factor at first, and at present.
        scale_factor: see above.
        scale_window: see above.
        min_scale: the factor never gets smaller.
        delayed_shift: see above.
        consecutive_hysteresis: see above.
        is_dynamic: False keeps the factor.
    """

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False
    is_dynamic: bool = True
    _patience: int = field(init=False)
    _good_steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._patience = self.delayed_shift

    @property
    def value(self) -> float:
        """The present factor."""
        return self.init_scale

    def update(self, *, overflow: bool) -> None:
        """A step is over."""
        if not self.is_dynamic:
            return
        if overflow:
            self._good_steps = 0
            if self._patience > 1:
                self._patience -= 1
            else:
                self.init_scale = max(self.init_scale / self.scale_factor, self.min_scale)
            return
        self._good_steps += 1
        if self.consecutive_hysteresis:
            self._patience = self.delayed_shift
        if self._good_steps % self.scale_window == 0:
            self._patience = self.delayed_shift
            self.init_scale *= self.scale_factor

    def state(self) -> list[float]:
        """What a checkpoint keeps."""
        return [self.init_scale, float(self._patience), float(self._good_steps)]

    def restore(self, state: list[float]) -> None:
        """Goes on from `state`."""
        self.init_scale = state[0]
        self._patience, self._good_steps = int(state[1]), int(state[2])


def make_loss_scale(
    static: float | None, options: Mapping[str, Any], *, is_dynamic: bool
) -> LossScale:
    """The loss scale that the arguments of a `DistributedOptimizer` describe.

    Raises:
        ConfigError: unknown options, or neither a static nor a dynamic scale.
    """
    known = {name for name in LossScale.__dataclass_fields__ if name[0] != "_"} - {"is_dynamic"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"smp.DistributedOptimizer was given {unknown}; the options of a dynamic loss scale "
            f"are {sorted(known)}."
        )
    if is_dynamic:
        return LossScale(**options)
    if static is None:
        raise ConfigError(
            "smp.DistributedOptimizer(static_loss_scale=None) without a dynamic loss scale; give "
            "one of static_loss_scale=1.0 and dynamic_loss_scale=True."
        )
    return LossScale(init_scale=float(static), is_dynamic=False)


class MasterWeights:
    """Float32 copies of an optimizer's float16 parameters, which it updates instead of them.

    Args:
        optimizer: the wrapped optimizer; its groups hold the copies from now on. Parameters that
            are not real here, or no float16, stay themselves.
        deployment: the model over the ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, deployment: Deployment) -> None:
        self._optimizer = optimizer
        self._deployment = deployment
        ownership = deployment.ownership
        self._master_of: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype is torch.float16 and ownership.is_local(parameter):
                    copied = parameter.detach().float().clone()
                    self._master_of[parameter] = nn.Parameter(copied)
        self._exchange(self._master_of)
        self._is_prepared = False
        self.overflow = False

    def prepare(self, scale: float) -> None:
        """Moves the gradients to the copies, divided by the loss scale. Collective over world."""
        if self._is_prepared:
            return
        self._is_prepared = True
        bad = torch.zeros((), device=self._deployment.device)
        for parameter, master in self._pairs():
            gradient = parameter.grad
            if parameter is master:
                if gradient is not None:
                    gradient.div_(scale)
            else:
                master.grad = None if gradient is None else gradient.float().div_(scale)
                gradient = master.grad
            if gradient is not None:
                bad += (~torch.isfinite(gradient)).any()
        if self._deployment.groups.world_size > 1:
            with state.calls.collective("the check for overflow", "world"):
                dist.all_reduce(bad, group=self._deployment.groups.world)
        self.overflow = bool(bad)

    def clip(self, max_norm: float) -> float:
        """Scales the copies' gradients to a global norm; returns the norm before, or infinity."""
        if self.overflow:
            return math.inf
        deployment = self._deployment
        counted = [
            master.grad
            for parameter, master in self._pairs()
            if master.grad is not None and deployment.ownership.counts_here(parameter)
        ]
        with state.calls.collective("clip_master_grads()", state.replica_axis):
            norm = total_norm(counted, deployment.norm_group, deployment.device)
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            for _, master in self._pairs():
                if master.grad is not None:
                    master.grad.mul_(factor)
        return norm

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears the float16 parameters' gradients, which the optimizer does not know."""
        for parameter in self._master_of:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer's step: gives the parameters the copies' values."""
        for parameter, master in self._master_of.items():
            parameter.copy_(master)
        self.release()

    def release(self) -> None:
        """The step is over, or was skipped."""
        for master in self._master_of.values():
            master.grad = None
        self._is_prepared = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, the optimizer holds the model's parameters, and the copies as part of its state.

        For saving: its state dicts are then those of an optimizer on one device.
        """
        state = self._optimizer.state
        for parameter, master in self._master_of.items():
            state[parameter] = {**state.pop(master, {}), _MASTER: master.detach()}
        self._exchange({master: parameter for parameter, master in self._master_of.items()})
        try:
            yield
        finally:
            self._exchange(self._master_of)
            for parameter, master in self._master_of.items():
                held = state.pop(parameter)
                del held[_MASTER]
                if held:
                    state[master] = held

    @torch.no_grad()
    def load(self, full_state: Mapping[str, Any]) -> None:
        """Loads the state of the parameters that are real here, and their copies.

        Where it has no copies, these follow the parameters.
        """
        self.follow()
        pairs = list(self._pairs())
        places = [place for group in full_state["param_groups"] for place in group["params"]]
        pair_at = dict(zip(places, pairs, strict=False))
        state = {}
        for place, values in full_state["state"].items():
            parameter, master = pair_at.get(place, (None, None))
            if parameter is not None and not self._deployment.ownership.is_local(parameter):
                continue
            kept = {name: value for name, value in values.items() if name != _MASTER}
            if master is not None and _MASTER in values:
                master.copy_(values[_MASTER])
                parameter.copy_(master)
            if kept:
                state[place] = kept
        self._optimizer.load_state_dict({**full_state, "state": state})

    @torch.no_grad()
    def follow(self) -> None:
        """The parameters have got other values, by a load: the copies take them over."""
        for parameter, master in self._master_of.items():
            master.copy_(parameter)

    def _exchange(self, table: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [table.get(parameter, parameter) for parameter in group["params"]]

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter of the optimizer with what it updates."""
        parameter_of = {id(master): parameter for parameter, master in self._master_of.items()}
        for group in self._optimizer.param_groups:
            for held in group["params"]:
                yield parameter_of.get(id(held), held), held
