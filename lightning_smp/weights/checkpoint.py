"""Full state dicts from a partitioned module or optimizer, and back: the files of one device.

Gathering brings everything to global rank 0, stage by stage; loading takes only what is real here.
The files themselves are the business of Lightning's checkpoint plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_smp.errors import CheckpointError
from lightning_smp.weights.collect import PipelineLinks, collect
from lightning_smp.weights.ownership import Ownership
from lightning_smp.weights.tensor_join import (
    cut_optimizer_state,
    cut_state,
    join_parts,
    optimizer_parts,
    state_parts,
    to_original,
)

__all__ = [
    "gather_optimizer_state",
    "gather_state_dict",
    "load_full_state_dict",
    "load_optimizer_state",
]


def gather_state_dict(
    module: nn.Module, ownership: Ownership, links: PipelineLinks
) -> dict[str, Any]:
    """Return the full state dict of `module`, on the CPU, on the writer; {} on other ranks.

    Keys and their order are those of `module.state_dict()`, which is called on every rank, hooks
    and extra state included; entries that live on another stage are replaced by that stage's.

    Collective over the writer's replica (its pipeline, and the tensor groups of its stages): all
    its ranks must call; call it on every rank.

    Raises:
        CheckpointError: on the writer, an entry whose value is known to no rank as a whole.
        CommunicationError: a stage has an entry of a type that cannot travel.
    """
    local = module.state_dict()
    joined = join_parts(state_parts(module, local, ownership), links.over_tensor_group())
    if links.writer_stage is None:
        return {}
    source = _EntrySource(module, ownership, links)
    if links.pp_rank != links.writer_stage:
        mine = {
            key: joined.get(key, value)
            for key, value in local.items()
            if source(key, value) == links.pp_rank
        }
        collect(mine, links)
        return {}
    expected = {key for key, value in local.items() if source(key, value) != links.pp_rank}
    received = collect(cast("dict[str, object]", {}), links)
    if absent := sorted(expected - set(received)):
        raise CheckpointError(
            f"state_dict() has the entries {absent[:10]} on the writer, but the stages that own "
            f"them have not. Hooks on state_dict must add and remove the same keys on every rank."
        )
    if links.group is not None:
        _require_whole(local, expected, source)
    to_cpu = _CpuCopies()
    for key in local:
        mine_or_joined = joined.get(key, local[key])
        local[key] = received.pop(key) if key in expected else to_cpu(mine_or_joined)
    local.update(received)  # what only its owner has, e.g. a buffer registered in a forward
    to_original(module, local, ownership)
    return local


def load_full_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], ownership: Ownership, *, strict: bool = True
) -> Any:
    """Load a full state dict into a module that may be partitioned; not a collective.

    As `module.load_state_dict`, with its hooks and error texts. Of foreign entries keys and shapes
    are checked; their values are not read (a memory-mapped file stays untouched there).

    Args:
        module: the module that `ownership` was made from.
        state_dict: all entries, with the keys of the module on one device.
        ownership: which stages hold which parameter.
        strict: whether missing and unexpected keys are errors.

    Returns:
        The missing and unexpected keys, as `module.load_state_dict` does.

    Raises:
        RuntimeError: torch's, for keys (if strict) and shapes.
    """
    parts = cut_state(module, state_dict, ownership)
    with _ignoring_foreign(module, ownership):
        return module.load_state_dict(parts, strict=strict)


def gather_optimizer_state(
    optimizer: torch.optim.Optimizer, ownership: Ownership, links: PipelineLinks
) -> dict[str, Any]:
    """Return the full state of `optimizer`, on the CPU, on the writer; {} on other ranks.

    In torch's layout: "state" by the parameter's place in the groups, "param_groups". Parameters
    that never had a gradient have no state, as on one device.

    Collective over the writer's replica (its pipeline, and the tensor groups of its stages): all
    its ranks must call; call it on every rank.

    Args:
        optimizer: torch's own object (not Lightning's wrapper); groups hold all parameters.
        ownership: which stages hold which parameter.
        links: how to reach the writer.

    Raises:
        PartitionError: a parameter that the partitioned module does not hold.
        CommunicationError: a stage has a value of a type that cannot travel.
    """
    local = optimizer.state_dict()
    parameter_at = _parameters_by_place(optimizer, local["param_groups"])
    parts = optimizer_parts(local["state"], parameter_at, ownership)
    joined = join_parts(parts, links.over_tensor_group())
    if links.writer_stage is None:
        return {}
    for (place, name), tensor in joined.items():
        local["state"][place] = {**local["state"][place], name: tensor}
    source = {
        place: links.source_of(ownership.stages_of(parameter))
        for place, parameter in parameter_at.items()
    }
    # Keys that are no places belong to the whole optimizer, equal on all ranks: the writer's.
    mine = {
        place: state
        for place, state in local["state"].items()
        if source.get(place, links.writer_stage) == links.pp_rank
    }
    received = collect(_flat(mine), links)
    if links.pp_rank != links.writer_stage:
        return {}
    to_cpu = _CpuCopies()
    full = {**{place: to_cpu(state) for place, state in mine.items()}, **_nested(received)}
    places = [place for place in parameter_at if place in full]
    state = {place: full.pop(place) for place in places} | full
    return {key: state if key == "state" else to_cpu(value) for key, value in local.items()}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, full_state: Mapping[str, Any], ownership: Ownership
) -> None:
    """Load the state of the parameters that are real here; not a collective.

    As `optimizer.load_state_dict`, with its hooks, casts and checks of the groups.

    Args:
        optimizer: torch's own object (not Lightning's wrapper); groups hold all parameters.
        full_state: in torch's layout, for all parameters.
        ownership: which stages hold which parameter.

    Raises:
        ValueError: torch's, if the groups differ in number or size.
        PartitionError: a parameter that the partitioned module does not hold.
    """
    parameter_at = _parameters_by_place(optimizer, full_state["param_groups"])
    foreign = {place for place, p in parameter_at.items() if not ownership.is_local(p)}
    state = {place: value for place, value in full_state["state"].items() if place not in foreign}
    state = cut_optimizer_state(state, parameter_at, ownership)
    optimizer.load_state_dict({**full_state, "state": state})


class _EntrySource:
    """The stage from which the writer takes a state dict entry; all ranks find the same.

    An entry is known by its name, or, where a hook renamed it, by the memory that it shares with a
    parameter or buffer; the rest (extra state) follows the unit around its key.
    """

    def __init__(self, module: nn.Module, ownership: Ownership, links: PipelineLinks) -> None:
        self._ownership = ownership
        self._links = links
        self._by_memory: dict[int, tuple[int, ...]] = {}
        named = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in named:
            stages = ownership.stages_of_name(name)
            if stages is not None and tensor.untyped_storage().data_ptr():
                self._by_memory[tensor.untyped_storage().data_ptr()] = stages

    def __call__(self, key: str, value: object) -> int:
        stages = self._stages(key, value) or self._ownership.stages_of_entry(key)
        return self._links.source_of(stages)

    def is_derived(self, key: str, value: object) -> bool:
        """Whether a hook computed this entry: neither its name nor its memory is known."""
        if key.rpartition(".")[2] == "_extra_state":
            return False
        return isinstance(value, Tensor) and self._stages(key, value) is None

    def _stages(self, key: str, value: object) -> tuple[int, ...] | None:
        stages = self._ownership.stages_of_name(key)
        if stages is None and isinstance(value, Tensor) and value.layout is torch.strided:
            return self._by_memory.get(value.untyped_storage().data_ptr())
        return stages


def _require_whole(local: Mapping[str, object], received: set[str], source: _EntrySource) -> None:
    """Refuse entries that a hook computed on the writer from values that are not there."""
    for key, value in local.items():
        if key in received or not source.is_derived(key, value):
            continue
        assert isinstance(value, Tensor)
        if value.dtype.is_floating_point and value.isnan().any():
            raise CheckpointError(
                f"A hook on state_dict() computed the entry {key!r} and it has NaN values, as it "
                f"does when it uses parameters of another stage. Compute it after loading, or keep "
                f"the modules that it needs together on one stage (smp.set_partition)."
            )


def _parameters_by_place(
    optimizer: torch.optim.Optimizer, packed_groups: list[dict[str, Any]]
) -> dict[int, nn.Parameter]:
    """Return the key in the packed state of each parameter, in order.

    Groups that differ in size give what they share; torch refuses them at loading.
    """
    return {
        place: parameter
        for group, packed in zip(optimizer.param_groups, packed_groups, strict=False)
        for parameter, place in zip(group["params"], packed["params"], strict=False)
    }


def _flat(state: Mapping[Any, Any]) -> dict[tuple[Any, ...], object]:
    """Return {(place,): None, (place, name): value}, so that tensors are entries by themselves."""
    flat: dict[tuple[Any, ...], object] = {}
    for place, values in state.items():
        flat[(place,)] = None
        flat.update({(place, name): value for name, value in values.items()})
    return flat


def _nested(flat: Mapping[tuple[Any, ...], object]) -> dict[Any, dict[Any, object]]:
    nested: dict[Any, dict[Any, object]] = {}
    for (place, *name), value in flat.items():
        values = nested.setdefault(place, {})
        if name:
            values[name[0]] = value
    return nested


class _CpuCopies:
    """Copies trees of dicts, lists and tuples with their tensors on the CPU.

    Tensors that share their memory share it afterwards, so that tied weights are written once.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            copied = copy(value)  # whatever kind of dict it is
            copied.update({key: self(item) for key, item in value.items()})
            return copied
        if type(value) in (list, tuple):
            return type(value)(self(item) for item in value)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" or tensor.layout is not torch.strided:
            return tensor.cpu()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        # The original is kept too: its address must not be used again meanwhile.
        return self._copies.setdefault(key, (tensor, tensor.cpu()))[1]


class _KeepsPlaceholder(Tensor):
    """What a foreign tensor is while a full state dict is loaded: copies into it do nothing."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], _KeepsPlaceholder):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class _KeepsParameterPlaceholder(_KeepsPlaceholder, nn.Parameter):
    """The same for parameters, which modules tell by their class."""


@contextmanager
def _ignoring_foreign(module: nn.Module, ownership: Ownership) -> Iterator[None]:
    """Let foreign parameters and buffers of `module` ignore copies into them.

    The class of the object is changed, not the module's code: so it works for every
    `_load_from_state_dict` and for keys renamed by hooks.
    """
    foreign: dict[int, Tensor] = {}
    for parameter in ownership.parameters():
        if not ownership.is_local(parameter):
            foreign[id(parameter)] = parameter
    for name, buffer in module.named_buffers():
        if ownership.pp_rank not in (ownership.stages_of_name(name) or (ownership.pp_rank,)):
            foreign[id(buffer)] = buffer
    before = [(tensor, tensor.__class__) for tensor in foreign.values()]
    try:
        for tensor, kind in before:
            tensor.__class__ = (
                _KeepsParameterPlaceholder if issubclass(kind, nn.Parameter) else _KeepsPlaceholder
            )
        yield
    finally:
        for tensor, kind in before:
            tensor.__class__ = kind
