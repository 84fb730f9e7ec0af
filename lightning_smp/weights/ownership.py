"""Which stages hold a parameter or buffer for real, and turning the others into placeholders.

Every rank keeps every parameter and buffer *object*, in the same order and under the same names.
Where a tensor is foreign it holds one element, expanded to the full shape: dtype, device and shape
are right, the memory is not there. This module knows tensors only; it never communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

import torch
from torch import Tensor, nn

from lightning_smp.deferred import attribute_tensors, become, realize
from lightning_smp.errors import PartitionError
from lightning_smp.weights.tensor_split import TensorSplit

__all__ = [
    "Ownership",
    "forget_foreign_state",
    "give_data",
    "make_whole",
    "materialize",
    "named_buffers",
    "placeholder_like",
    "release",
]


class Ownership:
    """The stages on which each parameter and buffer of a module is real, seen from one stage.

    A tensor on several stages is *mirrored*: its copies are equal, and the gradients of the copies
    are summed before the update. What no mapping names is outer and real on every stage.

    Attributes:
        pp_rank: this rank's stage.
        pp_size: number of stages.
        tensor: which parameters are split over a tensor group.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Iterable[int]],
        *,
        pp_rank: int,
        pp_size: int,
        buffers: Mapping[str, Iterable[int]] | None = None,
        units: Mapping[str, int] | None = None,
    ) -> None:
        """Reads the names of `module`; it may still be whole.

        Args:
            module: the module whose parameters and buffers are owned.
            parameters: parameter name to stages. A parameter shared under several names is real
                on the stages of all names given for it.
            pp_rank: this rank's stage.
            pp_size: number of stages.
            buffers: buffer name to stages, likewise.
            units: unit (module name) to stage; says where state that is neither parameter nor
                buffer is true (a unit's `get_extra_state`).

        Raises:
            PartitionError: a name that the module does not have, or a stage out of range.
        """
        self.pp_rank: Final = pp_rank
        self.pp_size: Final = pp_size
        self.tensor: Final = TensorSplit.of(module)
        self._units = {name: (stage,) for name, stage in (units or {}).items()}
        named_parameters = list(module.named_parameters(remove_duplicate=False))
        named_buffers = list(module.named_buffers(remove_duplicate=False))
        _require_known("parameter", parameters, [name for name, _ in named_parameters])
        _require_known("buffer", buffers or {}, [name for name, _ in named_buffers])
        _require_known("unit", self._units, [name for name, _ in module.named_modules()])
        for name, stages in (*parameters.items(), *(buffers or {}).items(), *self._units.items()):
            _require_range(name, stages, pp_size)

        everywhere = tuple(range(pp_size))
        by_parameter = _union(named_parameters, parameters)
        by_buffer = _union(named_buffers, buffers or {})
        self._parameters: dict[nn.Parameter, tuple[int, ...]] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._by_name: dict[str, tuple[int, ...]] = {}
        for name, parameter in named_parameters:
            stages = by_parameter.get(id(parameter), everywhere)
            self._parameters[parameter] = self._by_name[name] = stages
            self._names.setdefault(parameter, name)
        self._local = [p for p, stages in self._parameters.items() if pp_rank in stages]
        # Buffers are known by name only: modules may replace the object at any time.
        for name, buffer in named_buffers:
            self._by_name[name] = by_buffer.get(id(buffer), everywhere)

    @classmethod
    def whole(cls, module: nn.Module) -> Ownership:
        """Return the ownership of a module that is not partitioned: everything is local."""
        return cls(module, {}, pp_rank=0, pp_size=1)

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter) and parameter in self._parameters

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter once, in the order of the module, the same on all ranks."""
        return iter(self._parameters)

    def local_parameters(self) -> list[nn.Parameter]:
        """Return those that are real on this rank, in the order of the module."""
        return list(self._local)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the first name of a parameter, for messages."""
        return self._names.get(parameter, f"parameter of shape {tuple(parameter.shape)}")

    def stages_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the stages, in ascending order, on which the parameter is real.

        Raises:
            PartitionError: the module did not have this parameter when it was partitioned.
        """
        try:
            return self._parameters[parameter]
        except KeyError:
            raise PartitionError(
                f"A parameter of shape {tuple(parameter.shape)} was used, but the partitioned "
                f"module does not hold it. Parameters must exist before the first step: register "
                f"it in __init__, configure_model or setup."
            ) from None

    def owner(self, parameter: nn.Parameter) -> int:
        """Return the lowest stage on which the parameter is real."""
        return self.stages_of(parameter)[0]

    def is_local(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is real on this rank."""
        return self.pp_rank in self.stages_of(parameter)

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank adds the parameter to a sum over all stages (and tp ranks).

        One rank of a replica does, or, where the parameter is split, each with its part.
        """
        return self.owner(parameter) == self.pp_rank and self.tensor.counts_here(parameter)

    def stages_of_name(self, name: str) -> tuple[int, ...] | None:
        """Return the stages of a parameter or buffer by name, None if there is none such."""
        return self._by_name.get(name)

    def stages_of_entry(self, key: str) -> tuple[int, ...]:
        """Return the stages on which the state dict entry `key` is true.

        An entry that is no parameter or buffer belongs to the innermost unit around it; outside
        units it is true everywhere.
        """
        if (stages := self._by_name.get(key)) is not None:
            return stages
        while key:
            key = key.rpartition(".")[0]
            if (stages := self._units.get(key)) is not None:
                return stages
        return tuple(range(self.pp_size))


def release(module: nn.Module, ownership: Ownership, device: torch.device | None = None) -> None:
    """Replace the foreign parameters and buffers of `module` by placeholders.

    Parameters keep their identity, `requires_grad` and Python attributes; gradients of foreign
    ones are dropped. May be called again, e.g. after `module.to(...)`, which would otherwise give
    placeholders real memory.

    Args:
        module: the module that `ownership` was made from.
        ownership: who holds what.
        device: device that placeholders report; by default the one that they report now.
    """
    for parameter in ownership.parameters():
        if not ownership.is_local(parameter):
            parameter.grad = None
            give_data(parameter, placeholder_like(parameter, device))
    replaced: dict[int, Tensor] = {}
    for owner, local_name, name, buffer in named_buffers(module):
        if ownership.pp_rank in (ownership.stages_of_name(name) or (ownership.pp_rank,)):
            continue
        if id(buffer) not in replaced:
            replaced[id(buffer)] = placeholder_like(buffer, device)
        owner._buffers[local_name] = replaced[id(buffer)]


def materialize(module: nn.Module, ownership: Ownership, device: torch.device) -> None:
    """Move the local parameters and buffers of `module` to `device`, and let others report it.

    Unlike `module.to(device)` this gives placeholders no memory. Deferred ones get their values,
    one after the other, so that the host holds one at a time.

    Raises:
        PartitionError: a local parameter is on the meta device, so it has no values to move.
    """
    realize(_local_tensors(module, ownership), device)
    for parameter in ownership.parameters():
        if not ownership.is_local(parameter):
            continue
        if parameter.is_meta:
            raise PartitionError(
                f"Parameter {ownership.name_of(parameter)!r} belongs to stage {ownership.pp_rank} "
                f"but is on the meta device, without values. Initialise it first, e.g. by loading "
                f"a checkpoint with assign=True or by building the module under "
                f"smp.delay_param_initialization."
            )
        parameter.data = parameter.data.to(device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(device)
    moved: dict[int, Tensor] = {}
    for owner, local_name, name, buffer in named_buffers(module):
        if ownership.pp_rank not in (ownership.stages_of_name(name) or (ownership.pp_rank,)):
            continue
        if id(buffer) not in moved:
            moved[id(buffer)] = buffer.to(device)
        owner._buffers[local_name] = moved[id(buffer)]
    release(module, ownership, device)


def _local_tensors(module: nn.Module, ownership: Ownership) -> Iterator[Tensor]:
    """Yield the parameters, buffers and other tensors of this stage's modules."""
    for parameter in ownership.parameters():
        if ownership.is_local(parameter):
            yield parameter
    for _, _, name, buffer in named_buffers(module):
        if ownership.pp_rank in (ownership.stages_of_name(name) or (ownership.pp_rank,)):
            yield buffer
    for inner in module.modules():
        if all(ownership.is_local(p) for p in inner.parameters() if p in ownership):
            yield from attribute_tensors(inner)


def make_whole(module: nn.Module, ownership: Ownership) -> None:
    """Moves `module` to the host and gives its placeholders memory there, without values yet."""
    host = torch.device("cpu")
    materialize(module, ownership, host)
    for parameter in ownership.parameters():
        if not ownership.is_local(parameter):
            give_data(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=host))
    for owner, local_name, name, buffer in named_buffers(module):
        if ownership.pp_rank not in (ownership.stages_of_name(name) or (ownership.pp_rank,)):
            owner._buffers[local_name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=host)


def forget_foreign_state(optimizer: torch.optim.Optimizer, ownership: Ownership) -> None:
    """Drop what `optimizer` keeps for parameters that are real elsewhere; groups stay whole."""
    for parameter in ownership.parameters():
        if not ownership.is_local(parameter):
            optimizer.state.pop(parameter, None)


def placeholder_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the same shape and dtype that holds a single poison element.

    The element is NaN, or the lowest integer, so that a use that slips through shows at once.
    In-place writes to it are refused by torch (its elements share memory).
    """
    dtype = tensor.dtype
    element = torch.empty((), dtype=dtype, device=tensor.device if device is None else device)
    if dtype.is_floating_point or dtype.is_complex:
        element.fill_(float("nan"))
    elif dtype is torch.bool:
        element.fill_(False)
    else:
        element.fill_(torch.iinfo(dtype).min or torch.iinfo(dtype).max)
    return element.expand(tensor.shape)


def give_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Give `parameter` new data while every reference to the object stays valid."""
    if parameter.is_meta == data.is_meta:
        parameter.data = data
        return
    # Meta and real tensors differ in their implementation: the whole tensor is exchanged.
    become(parameter, data)


def named_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Yield (holder, name in the holder, full name, buffer), shared ones under every name."""
    for prefix, holder in module.named_modules(remove_duplicate=False):
        for name, buffer in list(holder._buffers.items()):
            if buffer is not None:
                yield holder, name, f"{prefix}.{name}" if prefix else name, buffer


def _union(
    named: Sequence[tuple[str, Tensor]], stages_by_name: Mapping[str, Iterable[int]]
) -> dict[int, tuple[int, ...]]:
    """Return tensor id to the stages of all its names."""
    union: dict[int, set[int]] = {}
    for name, tensor in named:
        if name in stages_by_name:
            union.setdefault(id(tensor), set()).update(stages_by_name[name])
    return {key: tuple(sorted(stages)) for key, stages in union.items()}


def _require_known(kind: str, given: Iterable[str], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        close = get_close_matches(unknown[0], known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PartitionError(
            f"Stages were given for {kind} {unknown[0]!r}"
            f"{f' and {len(unknown) - 1} more' if unknown[1:] else ''}, "
            f"which the module does not have.{hint}"
        )


def _require_range(name: str, stages: Iterable[int], pp_size: int) -> None:
    stages = tuple(stages)
    if not stages or not all(0 <= stage < pp_size for stage in stages):
        raise PartitionError(
            f"{name!r} was given the stages {stages}; it needs at least one, each from 0 to "
            f"{pp_size - 1} (the pipeline has {pp_size})."
        )
