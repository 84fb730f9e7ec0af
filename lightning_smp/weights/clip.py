"""Norms of gradients that are spread over stages and tensor groups: one value, as on one device.

Each parameter is counted by its owner only (a split one by each rank of the tensor group), and
every rank scales what it holds by the same coefficient. Each rank contributes one number, in its
own place of a float64 row, so all ranks finish the norm from the same numbers in the same order.

Clipping by value is element-wise, hence right without any of this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad as torch_clip_grad
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from lightning_smp.errors import UnsupportedError
from lightning_smp.weights.ownership import Ownership

__all__ = ["clip_grad_norm", "global_clip", "grad_norm", "places_of", "total_norm"]

Calling: TypeAlias = Callable[[str], AbstractContextManager[object]]
Place: TypeAlias = tuple[ModuleType, str]
"""A module and the name of one of its globals."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@torch.no_grad()
def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    ownership: Ownership,
    group: dist.ProcessGroup | None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of `parameters` to a global norm of at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` on one device. Gradients of mirrored parameters must be
    summed between their copies before.

    Collective over `group`: every rank of the pipeline must call, with the same parameters, also
    ranks on which none of them has a gradient.

    Args:
        parameters: the parameters, foreign ones included, e.g. all of an optimizer.
        max_norm: the largest norm allowed.
        ownership: which stages hold which parameter.
        group: the ranks of this replica: its stages, and its tensor groups where modules are
            split; None if there is one rank.
        norm_type: order of the norm, above 0; may be inf.
        error_if_nonfinite: raise, on every rank, if the norm is inf or NaN.
        foreach: as in torch.

    Returns:
        The norm before clipping, equal on all ranks, in float32 (float64 if a parameter is).

    Raises:
        UnsupportedError: an order of the norm that is not positive.
        RuntimeError: as asked by `error_if_nonfinite`.
    """
    members = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if group is None:
        return clip_grad_norm_(members, max_norm, norm_type, error_if_nonfinite, foreach)
    counted = [p.grad for p in members if p.grad is not None and _counts(p, ownership)]
    device = members[0].device if members else torch.device("cpu")
    exchange = _exchange(_local_norm(counted, norm_type), norm_type, (), group, device)
    total = exchange.norm.to(_result_dtype(members))
    _check_finite(total, norm_type, error_if_nonfinite)
    clip_grads_with_norm_(members, max_norm, total, foreach)
    return total


@torch.no_grad()
def grad_norm(
    module: nn.Module,
    norm_type: float | str,
    ownership: Ownership,
    group: dist.ProcessGroup | None,
    *,
    group_separator: str = "/",
) -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient and of all together, equal on all ranks.

    As `lightning.pytorch.utilities.grad_norm` on one device, which by itself sees only the
    gradients of this rank's stage and is this function inside `global_clip`.

    Collective over `group`: every rank of the pipeline must call, with the same `module`.

    Args:
        module: the partitioned module or a part of it.
        norm_type: order of the norm, above 0, or "inf".
        ownership: which stages hold which parameter.
        group: the ranks of this replica: its stages, and its tensor groups where modules are
            split; None if there is one rank.
        group_separator: stands between the prefix and the parameter's name in the keys.

    Raises:
        UnsupportedError: an order of the norm that is not positive.
    """
    order = float(norm_type)
    named = list(module.named_parameters())
    if not named:
        return {}
    tp = ownership.tensor.tp
    row = torch.zeros(tp.size + 1, len(named), dtype=torch.float64, device=named[0][1].device)
    for place, (_, parameter) in enumerate(named):
        if parameter.grad is not None and ownership.counts_here(parameter):
            row[tp.rank, place] = _local_norm([parameter.grad], order)
            row[-1, place] = 1.0
    if group is not None:
        dist.all_reduce(row, group=group)
    together = torch.linalg.vector_norm(row[:-1], order, dim=0)  # of the parts of each parameter
    dtype = _result_dtype([parameter for _, parameter in named])
    prefix = f"grad_{order}_norm"
    norms = {
        f"{prefix}{group_separator}{name}": value.to(dtype)
        for (name, _), value, present in zip(named, together, row[-1].tolist(), strict=True)
        if present
    }
    if norms:
        norms[f"{prefix}_total"] = torch.linalg.vector_norm(together, order).to(dtype)
    return norms


def places_of(function: Callable[..., object]) -> list[Place]:
    """Return where a function is known in the modules that are loaded, imports by name included."""
    loaded = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    return [(m, name) for m in loaded for name, value in list(vars(m).items()) if value is function]


@contextmanager
def global_clip(
    find_ownership: Callable[[], Ownership],
    group: dist.ProcessGroup | None,
    calling: Calling = nullcontext,
    places: Sequence[Place] = (),
) -> Iterator[None]:
    """Make the user's own calls of torch's norm functions give the norm over all stages.

    Inside, `torch.nn.utils.clip_grad_norm_` and `get_total_norm` are collective over `group` when
    they get parameters of the module or gradients of them, also where the user imported the former
    by name. For other tensors they do as ever. Made for hooks that all ranks run, such as
    `on_before_optimizer_step` and `configure_gradient_clipping`.

    Args:
        find_ownership: says whose parameters they are, at each call: the first step splits the
            model, and rebalancing moves it.
        group: the ranks that hold them together; None changes nothing.
        calling: a context around what is collective, given its name.
        places: where Lightning's ``grad_norm`` is known; it becomes global and collective too.
    """
    if group is None:
        yield
        return
    norms = _GlobalNorms(find_ownership, group, calling)
    patches = [
        (torch.nn.utils, "clip_grad_norm_", norms.clip_grad_norm_),
        (torch.nn.utils, "get_total_norm", norms.get_total_norm),
        (torch_clip_grad, "clip_grad_norm_", norms.clip_grad_norm_),
        # What a clip_grad_norm_ that was imported by name looks up when it runs.
        (torch_clip_grad, "_get_total_norm", norms.get_total_norm),
        *((holder, name, norms.grad_norm) for holder, name in places),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in patches]
    try:
        for holder, name, function in patches:
            setattr(holder, name, function)
        yield
    finally:
        for holder, name, function in before:
            setattr(holder, name, function)


@dataclass(frozen=True)
class _GlobalNorms:
    """Stand-ins with the signatures of torch's functions."""

    find_ownership: Callable[[], Ownership]
    group: dist.ProcessGroup
    calling: Calling

    def grad_norm(
        self, module: nn.Module, norm_type: float | str, group_separator: str = "/"
    ) -> dict[str, Tensor]:
        ownership = self.find_ownership()
        known = [p in ownership for p in module.parameters()]
        if not all(known):  # a module of the user's own is on every rank
            if any(known):
                raise _mixed("grad_norm", "parameters")
            whole = Ownership.whole(module)
            return grad_norm(module, norm_type, whole, None, group_separator=group_separator)
        with self.calling("grad_norm()"):
            return grad_norm(
                module, norm_type, ownership, self.group, group_separator=group_separator
            )

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        members = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ownership = self.find_ownership()
        known = [p in ownership for p in members]
        if any(known) and not all(known):
            raise _mixed("clip_grad_norm_", "parameters")
        if not any(known):  # the list is the same on all ranks, so all decide the same
            grads = [p.grad for p in members if p.grad is not None]
            total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
            clip_grads_with_norm_(members, max_norm, total, foreach)
            return total
        with self.calling("clip_grad_norm_()"):
            return clip_grad_norm(
                members,
                max_norm,
                ownership,
                self.group,
                norm_type=norm_type,
                error_if_nonfinite=error_if_nonfinite,
                foreach=foreach,
            )

    @torch.no_grad()
    def get_total_norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if t.numel()]
        ownership = self.find_ownership()
        everyone = list(ownership.parameters())
        owner_of = {_place(p): p for p in everyone}
        owner_of |= {_place(p.grad): p for p in everyone if p.grad is not None}
        parameters = [owner_of.get(_place(tensor)) for tensor in given]
        counted = [
            tensor
            for tensor, parameter in zip(given, parameters, strict=True)
            if parameter is not None and ownership.counts_here(parameter)
        ]
        known = sum(parameter is not None for parameter in parameters)
        # A stage without gradients gets an empty list, which says nothing about its peers' lists.
        counts = (float(known), float(len(given) - known))
        local = _local_norm(counted, norm_type)
        device = everyone[0].device if everyone else torch.device("cpu")
        with self.calling("get_total_norm()"):
            exchange = _exchange(local, norm_type, counts, self.group, device)
        any_known, any_unknown = exchange.sums
        if any_unknown and any_known:
            raise _mixed("get_total_norm", "tensors")
        if any_unknown:
            return get_total_norm(given, norm_type, error_if_nonfinite, foreach)
        total = exchange.norm.to(_result_dtype(everyone))
        _check_finite(total, norm_type, error_if_nonfinite)
        return total


@torch.no_grad()
def total_norm(
    counted: Sequence[Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> float:
    """Return the 2-norm of tensors that are spread over the ranks of `group`.

    Collective over `group`.

    Args:
        counted: this rank's tensors; each is given by one rank only.
        group: None if there is one rank.
        device: where the group's messages lie.
    """
    local = _local_norm(counted, 2.0)
    return float(local if group is None else _exchange(local, 2.0, (), group, device).norm)


@dataclass(frozen=True)
class _Exchange:
    """What all ranks know after an exchange: the global norm and the sums of the extra numbers."""

    norm: Tensor
    sums: Sequence[float]


def _exchange(
    local: Tensor | float,
    norm_type: float,
    extra: Sequence[float],
    group: dist.ProcessGroup,
    device: torch.device,
) -> _Exchange:
    """Combine the norms of all ranks; sums `extra` on the way (read on the host only if given)."""
    size = dist.get_world_size(group)
    row = torch.zeros(size + len(extra), dtype=torch.float64, device=device)
    row[dist.get_group_rank(group, dist.get_rank())] = local
    if extra:
        row[size:] = torch.tensor(extra, dtype=torch.float64, device=device)
    dist.all_reduce(row, group=group)
    norm = torch.linalg.vector_norm(row[:size], float(norm_type))
    return _Exchange(norm, row[size:].tolist() if extra else ())


def _local_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor | float:
    """Return the norm of this rank's tensors together, accumulated in float32 at least."""
    order = float(norm_type)
    if not order > 0.0:
        raise UnsupportedError(
            f"A global gradient norm of order {norm_type!r} was asked for; over pipeline stages "
            f"the order must be above 0. Use norm_type=2.0, or inf for the largest element."
        )
    if not tensors:
        return 0.0
    low = [tensor for tensor in tensors if tensor.dtype in _LOW_PRECISION]
    norms = [torch.linalg.vector_norm(t, order, dtype=torch.float32).double() for t in low]
    if full := [tensor for tensor in tensors if tensor.dtype not in _LOW_PRECISION]:
        norms.append(get_total_norm(full, order).double())
    device = norms[0].device
    together: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), order)
    return together


def _counts(parameter: Tensor, ownership: Ownership) -> bool:
    return isinstance(parameter, nn.Parameter) and ownership.counts_here(parameter)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return what a tensor shares with its `detach()` and `data`."""
    return tensor.data_ptr(), tensor.numel()


def _result_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of the norm, which must not depend on who has gradients."""
    is_double = any(
        parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters
    )
    return torch.float64 if is_double else torch.float32


def _check_finite(total: Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients "
            "by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _mixed(function: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch.nn.utils.{function} was called with {what} of the partitioned module together with "
        f"others that do not belong to it; their common norm over pipeline stages is not defined. "
        f"Call it for each of the two separately."
    )
