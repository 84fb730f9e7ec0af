"""Moves parameters, gradients, optimizer state, buffers and attributes of units to other stages.

First every stage says what it would send, as templates; it refuses what cannot move, before
anything has moved. Then the tensors travel one after the
other in an order that all stages know, so that a stage receives only what is being sent. What has
arrived replaces the placeholder, and what has left becomes one: at no time does a stage hold more
than its old part and what it gets, less what it has given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_smp.placed.structure import iter_tensors
from lightning_smp.program import TensorSpec
from lightning_smp.weights.ownership import Ownership, give_data, named_buffers, placeholder_like
from lightning_smp.weights.packing import Shape, is_plain, pack, shapes, unpack

__all__ = ["Links", "Migration"]

Units = Mapping[str, tuple[int, int]]
"""By name of a unit that moves: its old stage and its new one."""

_OF_MODULES = frozenset(nn.Module().__dict__) | {"forward"}
"""Attributes that every module has."""


class Links(Protocol):
    """What moves tensors between the stages."""

    def send(self, tensor: Tensor, stage: int, *, copy: bool) -> None:
        """Sends to a stage, without waiting."""

    def receive(self, stage: int, spec: TensorSpec) -> Tensor:
        """The next tensor from a stage."""

    def finish(self) -> None:
        """Waits for all that was sent."""


@dataclass(frozen=True, slots=True)
class _Item:
    """Something that goes from one stage to another as a whole."""

    key: Any
    source: int
    target: int


class Migration:
    """One change of ownership, seen from one stage.

    Args:
        module: the module.
        old: who holds what now.
        new: who shall.
        units: the units that move.
        optimizers: hold state by parameter; torch's own objects.
    """

    def __init__(
        self, module: nn.Module, old: Ownership, new: Ownership, units: Units,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        self._module = module
        self._old = old
        self._new = new
        self._optimizers = optimizers
        self._parameters = list(old.parameters())
        self._items = [*self._of_parameters(), *self._of_buffers(), *_of_units(units)]
        self._out: dict[int, list[Tensor]] = {}
        self.moved_bytes = 0

    @property
    def mark(self) -> str:
        """What moves where, in short; equal on all ranks that may move it together."""
        return hashlib.sha256(repr(self._items).encode()).hexdigest()

    # ---- what moves -----------------------------------------------------------------------------

    def _of_parameters(self) -> Iterator[_Item]:
        for place, parameter in enumerate(self._parameters):
            stages = self._old.stages_of(parameter)
            for target in sorted(set(self._new.stages_of(parameter)) - set(stages)):
                yield _Item(("p", place), stages[0], target)

    def _of_buffers(self) -> Iterator[_Item]:
        """Those of one pair of stages together, so that shared ones stay shared."""
        pairs: dict[tuple[int, int], list[str]] = {}
        for _, _, name, _ in named_buffers(self._module):
            stages = self._old.stages_of_name(name) or ()
            for target in sorted(set(self._new.stages_of_name(name) or ()) - set(stages)):
                pairs.setdefault((stages[0], target), []).append(name)
        for (source, target), names in sorted(pairs.items()):
            yield _Item(("b", tuple(names)), source, target)

    # ---- the two parts --------------------------------------------------------------------------

    def offer(self) -> list[Any]:
        """What this stage sends, as plain data for `run` on all stages. Local.

        Raises:
            UnsupportedError: something of it cannot move.
        """
        templates = []
        for number, item in enumerate(self._items):
            if item.source == self._old.pp_rank:
                tensors: list[Tensor] = []
                value, what = self._value(item.key)
                templates.append([number, pack(value, tensors, what)])
                self._out[number] = tensors
        return templates

    def run(self, offers: Sequence[Any], links: Links, device: torch.device) -> None:
        """Moves everything. Collective over pp.

        Args:
            offers: those of all stages, by stage.
            links: moves tensors.
            device: the run's.
        """
        templates = {number: template for offer in offers for number, template in offer}
        here = self._old.pp_rank
        for number, item in enumerate(self._items):
            template = templates[number]
            if item.source == here:
                for tensor in self._out.pop(number):
                    if tensor.numel():
                        links.send(tensor.to(device), item.target, copy=False)
                links.finish()
                self._give_up(item.key)
            elif item.target == here:
                tensors = [_receive(s, item.source, links, device) for s in shapes(template)]
                self._take(item.key, unpack(template, tensors))
            self.moved_bytes += sum(_size(shape) for shape in shapes(template))

    # ---- one item -------------------------------------------------------------------------------

    def _value(self, key: Any) -> tuple[Any, str]:
        kind, what = key
        if kind == "p":
            parameter = self._parameters[what]
            name = self._old.name_of(parameter)
            states = [optimizer.state.get(parameter) for optimizer in self._optimizers]
            return [parameter.detach(), parameter.grad, states], f"parameter {name!r}"
        if kind == "b":
            held = {name: buffer for _, _, name, buffer in named_buffers(self._module)}
            unique = {id(held[name]): held[name] for name in what}
            places = {key: place for place, key in enumerate(unique)}
            return [list(unique.values()), [places[id(held[name])] for name in what]], "a buffer"
        unit = self._module.get_submodule(what)
        found = [
            [path, _attributes(inner), _extra_state(inner)] for path, inner in unit.named_modules()
        ]
        return found, f"unit {what!r}"

    def _take(self, key: Any, value: Any) -> None:
        kind, what = key
        if kind == "p":
            parameter = self._parameters[what]
            data, gradient, states = value
            give_data(parameter, data)
            parameter.grad = gradient
            for optimizer, state in zip(self._optimizers, states, strict=True):
                if state is not None:
                    optimizer.state[parameter] = state
        elif kind == "b":
            tensors, places = value
            given = {name: tensors[place] for name, place in zip(what, places, strict=True)}
            for holder, local_name, name, _ in named_buffers(self._module):
                if name in given:
                    holder._buffers[local_name] = given[name]
        else:
            unit = self._module.get_submodule(what)
            for path, attributes, extra in value:
                inner = unit.get_submodule(path)
                inner.__dict__.update(attributes)
                if extra is not None:
                    inner.set_extra_state(extra[0])

    def _give_up(self, key: Any) -> None:
        """Frees a parameter that has left for good; `release` does the rest."""
        kind, what = key
        if kind != "p" or self._new.is_local(self._parameters[what]):
            return
        parameter = self._parameters[what]
        parameter.grad = None
        give_data(parameter, placeholder_like(parameter))
        for optimizer in self._optimizers:
            optimizer.state.pop(parameter, None)


def _of_units(units: Units) -> Iterator[_Item]:
    for name, (source, target) in units.items():
        yield _Item(("u", name), source, target)


def _attributes(inner: nn.Module) -> dict[str, Any]:
    """What a module keeps in plain attributes: counters, running values, flags."""
    held = {id(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
    return {
        name: value
        for name, value in inner.__dict__.items()
        if name not in _OF_MODULES and is_plain(value)
        and not any(isinstance(t, nn.Parameter) or id(t) in held for t in iter_tensors(value))
    }  # fmt: skip


def _extra_state(inner: nn.Module) -> list[Any] | None:
    if type(inner).get_extra_state is nn.Module.get_extra_state:
        return None
    return [inner.get_extra_state()]


def _receive(shape: Shape, source: int, links: Links, device: torch.device) -> Tensor:
    place = torch.device("cpu") if shape.on_host else device
    if 0 in shape.shape:
        return torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=place)
    spec = TensorSpec(shape.shape, shape.stride, shape.dtype, True, False)
    tensor = links.receive(source, spec).to(place)
    if tensor.stride() == shape.stride:
        return tensor
    laid_out = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=place)
    return laid_out.copy_(tensor)


def _size(shape: Shape) -> int:
    return torch.Size(shape.shape).numel() * shape.dtype.itemsize
