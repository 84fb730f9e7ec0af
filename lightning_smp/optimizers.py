"""FusedAdam, FusedLAMB and FusedNovoGrad: the optimizers of `smp.optimizers`, in plain torch.

Written from the papers; the names and arguments are those that scripts use. Norms that span the
model are taken over all ranks that hold a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.process_state import state as smp_state
from lightning_smp.weights.clip import clip_grad_norm

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]


class _Moments(Optimizer):
    """What the three have in common: a step count per group, and arguments that are checked."""

    def __init__(self, params: Any, amsgrad: bool, set_grad_none: bool, **defaults: Any) -> None:
        if amsgrad:
            raise UnsupportedError(
                f"{type(self).__name__} has no amsgrad variant. Use "
                f"torch.optim.AdamW(..., amsgrad=True)."
            )
        for name in ("lr", "eps", "weight_decay"):
            if defaults[name] < 0:
                raise ConfigError(f"{name}={defaults[name]}: it must be at least 0.")
        if not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ConfigError(f"betas={defaults['betas']}: each must be in [0, 1).")
        super().__init__(params, defaults)
        self._set_grad_none = set_grad_none

    @override
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients; by default as `set_grad_none` says."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have gradients.

        Args:
            closure: computes the loss again; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._prepare()
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        return loss

    def _prepare(self) -> None:
        """Called before the first update of a step."""

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class FusedAdam(_Moments):
    """Adam (Kingma and Ba, arXiv 1412.6980), or AdamW (Loshchilov and Hutter, arXiv 1711.05101).

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        adam_w_mode: decay the weights themselves; else add the decay to the gradient.
        weight_decay: factor of the weights.
        amsgrad: refused.
        set_grad_none: whether `zero_grad` drops the gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params, amsgrad, set_grad_none, lr=lr, bias_correction=bias_correction, betas=betas,
            eps=eps, adam_w_mode=adam_w_mode, weight_decay=weight_decay,
        )  # fmt: skip

    @override
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        direction = _adam_direction(self.state[parameter], parameter, gradient, group, 1.0)
        parameter.add_(direction, alpha=-group["lr"])


class FusedLAMB(_Moments):
    """LAMB (You et al., arXiv 1904.00962): Adam with a step length per tensor.

    The gradients are first scaled down to a global norm of `max_grad_norm`, over all stages.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: factor of the weights.
        amsgrad: refused.
        adam_w_mode: decay the weights themselves; else add the decay to the gradient.
        grad_averaging: the gradient enters the first moment with 1 - beta; else with 1.
        set_grad_none: whether `zero_grad` drops the gradients.
        max_grad_norm: largest norm of all gradients together; 0 for any.
        use_nvlamb: adapt the step length of tensors without weight decay as well.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        super().__init__(
            params, amsgrad, set_grad_none, lr=lr, bias_correction=bias_correction, betas=betas,
            eps=eps, weight_decay=weight_decay, adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging, max_grad_norm=max_grad_norm,
        )  # fmt: skip
        self._use_nvlamb = use_nvlamb

    @override
    def _prepare(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        _refuse_split(self, parameters)
        limit, model = self.defaults["max_grad_norm"], smp_state.model
        if limit <= 0:
            return
        if model is None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
            return
        groups = smp_state.groups
        pipeline = groups.pp if groups.pp_size > 1 else None
        clip_grad_norm(parameters, limit, model.deployment.ownership, pipeline)

    @override
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        share = 1 - group["betas"][0] if group["grad_averaging"] else 1.0
        direction = _adam_direction(
            self.state[parameter], parameter, gradient, group, share / (1 - group["betas"][0])
        )
        length = group["lr"]
        if self._use_nvlamb or group["weight_decay"] != 0:
            weights, update = _length(parameter), _length(direction)
            usable = (weights > 0) & (update > 0)
            ratio = torch.where(usable, weights / update, torch.ones_like(weights))
            direction = direction * ratio.to(direction.dtype)
        parameter.add_(direction, alpha=-length)


FusedLamb = FusedLAMB
"""The documentation's spelling."""


class FusedNovoGrad(_Moments):
    """NovoGrad (Ginsburg et al., arXiv 1905.11286): the second moment is one number per tensor.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: divide the first moment by 1 - beta1^t, and, with `init_zero`, the second
            by 1 - beta2^t.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: factor of the weights.
        amsgrad: refused.
        reg_inside_moment: add the decay to the scaled gradient, as in the paper; else to the step.
        grad_averaging: the gradient enters the first moment with 1 - beta1; else with 1.
        norm_type: 2.
        init_zero: start the second moment with 0; else with the first gradient's, as in the paper.
        set_grad_none: whether `zero_grad` drops the gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type != 2:
            raise UnsupportedError(
                f"norm_type={norm_type}: only the 2-norm is there. Leave it out."
            )
        super().__init__(
            params, amsgrad, set_grad_none, lr=lr, bias_correction=bias_correction, betas=betas,
            eps=eps, weight_decay=weight_decay, reg_inside_moment=reg_inside_moment,
            grad_averaging=grad_averaging, init_zero=init_zero,
        )  # fmt: skip

    @override
    def _prepare(self) -> None:
        _refuse_split(self, [p for group in self.param_groups for p in group["params"]])

    @override
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        held = self.state[parameter]
        beta1, beta2 = group["betas"]
        square = _length(gradient) ** 2
        if "exp_avg_sq" not in held:
            held["exp_avg"] = torch.zeros_like(parameter)
            held["exp_avg_sq"] = (1 - beta2) * square if group["init_zero"] else square
        else:
            held["exp_avg_sq"] = beta2 * held["exp_avg_sq"] + (1 - beta2) * square
        first, second = _corrections(group)
        second_moment = held["exp_avg_sq"] / (second if group["init_zero"] else 1.0)
        scaled = gradient / (second_moment.sqrt() + group["eps"]).to(gradient.dtype)
        decay = group["weight_decay"]
        if group["reg_inside_moment"]:
            scaled = scaled.add(parameter, alpha=decay)
        held["exp_avg"].mul_(beta1).add_(scaled, alpha=1 - beta1 if group["grad_averaging"] else 1)
        direction = held["exp_avg"] / first
        if not group["reg_inside_moment"]:
            direction = direction.add(parameter, alpha=decay)
        parameter.add_(direction, alpha=-group["lr"])


def _adam_direction(
    held: dict[str, Any], parameter: Tensor, gradient: Tensor, group: dict[str, Any], gain: float
) -> Tensor:
    """Returns Adam's update without the learning rate; `gain` multiplies the first moment's input.

    Equations of algorithm 2 of arXiv 1711.05101.
    """
    beta1, beta2 = group["betas"]
    if not held:
        held["exp_avg"] = torch.zeros_like(parameter)
        held["exp_avg_sq"] = torch.zeros_like(parameter)
    if not group["adam_w_mode"]:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    held["exp_avg"].mul_(beta1).add_(gradient, alpha=(1 - beta1) * gain)
    held["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = _corrections(group)
    root = held["exp_avg_sq"].sqrt().div_(math.sqrt(second)).add_(group["eps"])
    direction: Tensor = held["exp_avg"].div(first).div_(root)
    if group["adam_w_mode"]:
        direction.add_(parameter, alpha=group["weight_decay"])
    return direction


def _length(tensor: Tensor) -> Tensor:
    """The 2-norm, in float32 or better."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return length


def _refuse_split(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Refuses weights of which this rank knows a slice only: a tensor's norm needs all of it."""
    model = smp_state.model
    if model is None or smp_state.groups.tp_size == 1:
        return
    if any(map(model.is_distributed_parameter, parameters)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} takes the norm of each weight, and with "
            f"tensor_parallel_degree={smp_state.groups.tp_size} some are split over ranks. Use "
            f"FusedAdam or torch.optim.AdamW, which work on each element."
        )


def _corrections(group: dict[str, Any]) -> tuple[float, float]:
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
