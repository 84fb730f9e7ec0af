"""Optimizers that update a split parameter otherwise than the whole one are refused.

Each rank of a tensor group gives the optimizer its part of a split parameter. That is one device's
update if each element's depends on its own gradients only (SGD, Adam); norms of a parameter,
factored moments and matrix products (LAMB, Adafactor, Muon, LBFGS) see a part. No list of names
would know everybody's optimizers, so a new one with the same options takes a few steps on a small
tensor, and on the two parts of it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smp.errors import UnsupportedError
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["check_split_updates", "is_elementwise"]

_LOG = logging.getLogger(__name__)
_SIZE = 6
_STEPS = 3


def check_split_updates(
    optimizers: Iterable[Optimizer],
    split: Mapping[nn.Parameter, Sharding],
    name_of: Callable[[nn.Parameter], str],
) -> None:
    """Checks that split parameters are updated as whole ones would be. Not a collective.

    Args:
        optimizers: of this run.
        split: the parameters that are split, and how.
        name_of: a parameter's name, for messages.

    Raises:
        UnsupportedError: an update of an element depends on other elements.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups if split else ():
            known: dict[tuple[int, int], bool | None] = {}
            for parameter in group["params"]:
                sharding = split.get(parameter)
                if sharding is None:
                    continue
                key = (parameter.ndim, sharding.dim)
                if key not in known:
                    known[key] = is_elementwise(optimizer, group, parameter, sharding.dim)
                    _judge(known[key], optimizer, name_of(parameter), len(sharding.ranges))


def _judge(answer: bool | None, optimizer: Optimizer, name: str, degree: int) -> None:
    kind = type(optimizer).__name__
    if answer is None:
        _LOG.warning(
            "it could not be tried whether the optimizer %s updates each element of a parameter "
            "on its own, as it must under tensor parallelism, where %s is split.", kind, name,
        )  # fmt: skip
    elif not answer:
        raise UnsupportedError(
            f"the optimizer {kind} updates elements of a parameter by others of it (as norms, "
            f"factored moments and matrix products do), but with tensor_parallel_degree={degree} "
            f"each rank holds a part of {name}. Use an optimizer that works element by element "
            "(SGD, Adam, AdamW), give this one only parameters that are whole, or use "
            "tensor_parallel_degree=1."
        )


def is_elementwise(
    optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, dim: int
) -> bool | None:
    """Whether updates of the parts of a tensor are those of the whole; None if it cannot be tried.

    Args:
        optimizer: of the kind in question; it is left as it is.
        group: the one of its groups whose options count.
        like: a parameter of that number of dimensions, on the device in question.
        dim: the dimension along which the tensor is cut.
    """
    device = torch.device("cpu") if like.is_meta else like.device
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        start, *gradients = torch.randn(_STEPS + 1, *[_SIZE] * like.ndim).to(device, dtype)
        # Parts of different lengths and norms, so that whatever looks at all of them shows.
        gradients = [g * torch.linspace(0.1, 9.0, g.numel()).view_as(g).to(g) for g in gradients]
        cuts = [[_SIZE], [_SIZE // 2 - 1, _SIZE // 2 + 1]]
        try:
            whole, parts = (
                [
                    _updated(optimizer, group, value, [g.split(cut, dim)[part] for g in gradients])
                    for part, value in enumerate(start.split(cut, dim))
                ]
                for cut in cuts
            )
        except Exception:
            return None
    moved, expected = torch.cat(parts, dim) - start, whole[0] - start
    allowed = 1e-3 * float(expected.abs().max())
    return torch.allclose(moved, expected, rtol=1e-3, atol=allowed * 1e-3)


def _updated(
    optimizer: Optimizer, group: Mapping[str, Any], value: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    """The value after a step of a new optimizer with each of the gradients."""
    parameter = nn.Parameter(value.clone())
    options = {key: option for key, option in group.items() if key not in ("params", "param_names")}
    if "lr" in options and options["lr"] is not None:
        options["lr"] = float(options["lr"]) or 0.1  # a schedule may begin with 0
    arguments = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in arguments}
    new = type(optimizer)([{**options, "params": [parameter]}], **defaults)
    for gradient in gradients:

        def closure(gradient: Tensor = gradient) -> Tensor:
            parameter.grad = gradient.clone()
            return parameter.new_zeros(())

        closure()
        new.step(closure)
    return parameter.detach()
