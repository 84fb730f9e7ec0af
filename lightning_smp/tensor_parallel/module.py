"""The base of modules that are split over a tensor group, and what is known of their parameters.

A split parameter is a plain local tensor; its module's record says which part of the full tensor it
is. There are three kinds of parameters:

* "split": each rank of the group holds a part;
* "scaled": whole on every rank, but its gradient comes from the samples of the whole group;
* "plain": all others; the gradient comes from this rank's own samples.

Gradients of split and scaled parameters are reduced over RDP, of plain ones over DP.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_smp.deferred import become, deferring, is_deferred, take_part, value_of
from lightning_smp.errors import ConfigError
from lightning_smp.process_state import state
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.record import Sharding

__all__ = [
    "DistributedModule",
    "Kind",
    "distributed_modules",
    "is_distributed_parameter",
    "is_scaled_batch_parameter",
    "number_modules",
    "parameter_kinds",
    "scaled_batch_names",
    "shardings_of",
]

Kind: TypeAlias = Literal["plain", "split", "scaled"]


class DistributedModule(nn.Module):
    """Base of all modules that are split over a tensor group.

    Attributes:
        tp: this rank's place in the group.
        shardings: by local name (dotted for parameters and buffers of submodules), how each split
            tensor is split.
        scaled_batch_parameters: local names of parameters that are whole but see the samples of
            the whole group.
        ordinal: position among the distributed modules of a model, equal on all ranks.
    """

    tp: TensorParallel
    shardings: dict[str, Sharding]
    scaled_batch_parameters: set[str]
    ordinal: int

    _constructed_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remembers the arguments, for a module that was made before the run started."""
        self = super().__new__(cls)
        self.__dict__["_constructed_with"] = (args, kwargs)
        return self

    def __init__(self, *, tp: TensorParallel | None = None) -> None:
        """Starts a module without parameters.

        Args:
            tp: the tensor group; by default that of the run.
        """
        nn.Module.__init__(self)  # not a sibling's, of layers that are distributed by inheritance
        self.tp = state.tensor_parallel if tp is None else tp
        self.shardings = {}
        self.scaled_batch_parameters = set()
        self.ordinal = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; what it exchanges is noted under its name."""
        trail = state.calls.trail
        outer, trail.at = trail.at, self.ordinal
        try:
            return super().__call__(*args, **kwargs)
        finally:
            trail.at = outer

    def add_split_parameter(
        self, name: str, sharding: Sharding, *, dtype: Any = None, device: Any = None
    ) -> nn.Parameter:
        """Register an uninitialised parameter of which this rank holds its part."""
        local = torch.empty(sharding.local_shape(self.tp.rank), dtype=dtype, device=device)
        parameter = nn.Parameter(local)
        self.register_parameter(name, parameter)
        self.shardings[name] = sharding
        return parameter

    def fill(self, name: str, fill: Callable[[Tensor], object]) -> None:
        """Initialise a parameter as this rank's part of the full tensor that `fill` fills.

        With equal seeds the ranks hold what one device would; the generators go on alike.
        """
        parameter, sharding = _held(self, name), self.shardings.get(name)
        with torch.no_grad():
            if sharding is None or self.tp.size == 1:
                fill(parameter)
                return
            part = sharding.part(self.tp.rank)
            with deferring():
                full = parameter.new_empty(sharding.shape)
                fill(full)
            if is_deferred(parameter):
                become(parameter, take_part(full, part))
            else:
                parameter.copy_(value_of(full, part=part))

    def draws(self, device: torch.device, *, sliced: bool) -> AbstractContextManager[None]:
        """Run the body on a random stream for sliced values, or for those all ranks have alike."""
        return self.tp.draws(self.ordinal, device, sliced=sliced)

    def made_for(self, tp: TensorParallel) -> DistributedModule:
        """Return a module like this one, constructed anew, for another tensor group."""
        args, kwargs = self._constructed_with
        takes_group = "tp" in inspect.signature(type(self)).parameters
        return type(self)(*args, **{**kwargs, **({"tp": tp} if takes_group else {})})

    def to_original(self, full: dict[str, Any]) -> dict[str, Any]:
        """Translate full tensors by local name to the names and shapes of the original module."""
        return full

    def from_original(self, original: dict[str, Any]) -> dict[str, Any]:
        """Translate the original module's state dict to full tensors by local name."""
        return original

    def load_full(self, original: Mapping[str, Any]) -> None:
        """Take this rank's part of an original module's state dict; not a collective.

        Raises:
            RuntimeError: torch's, for missing and unexpected keys.
        """
        full = self.from_original(dict(original))
        parts: dict[str, Any] = dict(full)
        for name, sharding in shardings_of(self).items():
            value = full.get(name)
            if isinstance(value, Tensor) and tuple(value.shape) == sharding.shape:
                parts[name] = take_part(value, sharding.part(self.tp.rank))
        is_deferring = any(is_deferred(p) for p in self.parameters())
        if not is_deferring:
            parts = {k: value_of(v) if is_deferred(v) else v for k, v in parts.items()}
        self.load_state_dict(parts, assign=is_deferring)


def distributed_modules(model: nn.Module) -> Iterator[tuple[str, DistributedModule]]:
    """Yield (dotted name, module) of every distributed module of a model."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedModule):
            yield name, module


def number_modules(model: nn.Module) -> None:
    """Give the distributed modules of a model their ordinals, by module order."""
    for ordinal, (_, module) in enumerate(distributed_modules(model)):
        module.ordinal = ordinal


def shardings_of(model: nn.Module) -> dict[str, Sharding]:
    """Return the record of each split parameter and buffer, by every dotted name it has."""
    by_tensor: dict[int, Sharding] = {}
    for _, module in distributed_modules(model):
        for name, sharding in module.shardings.items():
            held = _held(module, name)
            known = by_tensor.setdefault(id(held), sharding)
            if known != sharding:
                raise ConfigError(
                    f"{name!r} of a {type(module).__name__} of shape {tuple(held.shape)} is shared "
                    "by modules that split it differently. Split both in the same way, or neither."
                )
    return {name: by_tensor[id(t)] for name, t in _named_tensors(model) if id(t) in by_tensor}


def scaled_batch_names(model: nn.Module) -> set[str]:
    """Return the dotted names of parameters that are whole but see the whole group's samples."""
    scaled = {
        id(_held(module, name))
        for _, module in distributed_modules(model)
        for name in module.scaled_batch_parameters
    }
    return {name for name, t in _named_tensors(model) if id(t) in scaled}


def parameter_kinds(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """Return the kind of every parameter, in the model's order."""
    split, scaled = shardings_of(model), scaled_batch_names(model)
    return {
        parameter: "split" if name in split else "scaled" if name in scaled else "plain"
        for name, parameter in model.named_parameters()
    }


def is_distributed_parameter(model: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of `model` is split over the tensor group."""
    return parameter_kinds(model).get(parameter) == "split"


def is_scaled_batch_parameter(model: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of `model` gets its gradient from the whole group's samples.

    That holds for split parameters as well as for whole ones in a distributed module's work.
    """
    return parameter_kinds(model).get(parameter, "plain") != "plain"


def _held(module: nn.Module, name: str) -> Tensor:
    path, _, local = name.rpartition(".")
    held: Tensor = getattr(module.get_submodule(path), local)
    return held


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
