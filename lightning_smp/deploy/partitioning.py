"""From a whole model on every rank to one stage of it on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from lightning_smp.engine.control import Control
from lightning_smp.errors import PartitionError, UnsupportedError
from lightning_smp.partitioning import (
    DeviceModel,
    Partition,
    analyze,
    count_parameters,
    fake_batch,
    find_atoms,
    new_fake_mode,
    outer_parameters,
    plan_partition,
)
from lightning_smp.partitioning.atoms import is_boundary
from lightning_smp.partitioning.device import CPU
from lightning_smp.placed.compiling import UnitCompiler
from lightning_smp.placed.metrics import find_metrics, install_metrics
from lightning_smp.placed.runtime import Runtime
from lightning_smp.placed.units import UnitEntry
from lightning_smp.weights.ownership import Ownership, forget_foreign_state, materialize, release

__all__ = [
    "install_units",
    "ownership_of",
    "place_weights",
    "plan_model",
    "reassign_units",
    "sync_each",
]


def plan_model(
    module: nn.Module,
    call: Callable[[nn.Module, Any], Any],
    batch: Any,
    num_stages: int,
    control: Control,
    *,
    memory_weight: float,
    tied_parameters: Any,
    default_partition: int | None,
    manual: dict[str, int] | None,
    virtual_stages: int = 1,
    policy: Literal["contiguous", "tree"] = "contiguous",
    skip_tracing: bool = False,
    device: torch.device | None = None,
) -> Partition:
    """Decides where every unit lives. Collective over pp.

    Args:
        module: the LightningModule, whole.
        call: ``call(copy, batch)`` runs the user's step for one microbatch.
        batch: one microbatch.
        num_stages: number of stages.
        control: compares the ranks' decisions.
        memory_weight: between compute (0) and memory (1).
        tied_parameters: as in the configuration.
        default_partition: stage of modules that ``manual`` leaves out.
        manual: stages by module name; None splits automatically.
        virtual_stages: chunks of the model per stage.
        policy: rule of the automatic split.
        skip_tracing: split by parameter counts in module order, without a run on fake tensors.
        device: where the stages run.

    Raises:
        PartitionError: the ranks built different models, or there is nothing to divide.
    """
    atoms = find_atoms(module)
    if skip_tracing:
        analysis = count_parameters(module, atoms, reason="skip_tracing is set")
    else:
        mode = new_fake_mode()
        fake = fake_batch(batch, mode)
        on_cpu = device is not None and device.type == "cpu"
        analysis = analyze(
            module, lambda copy: call(copy, fake), atoms, mode=mode,
            device=CPU if on_cpu else DeviceModel(),
        )  # fmt: skip
    partition = plan_partition(
        module, analysis, atoms, num_stages, memory_weight=memory_weight,
        tied_parameters=tied_parameters, default_partition=default_partition, manual=manual,
        virtual_stages=virtual_stages, policy=policy,
    )  # fmt: skip
    marks = control.agree([partition.fingerprint(), _tree_mark(module)])
    if any(mark != marks[0] for mark in marks):
        raise PartitionError(
            "the stages built different models, or see batches of different shapes. The module's "
            "__init__, setup and configure_model must do the same on every rank."
        )
    return partition


def _tree_mark(module: nn.Module) -> list[Any]:
    return [[name, list(p.shape)] for name, p in module.named_parameters()]


def install_units(
    module: nn.Module, partition: Partition, runtime: Runtime, compiler: UnitCompiler | None = None
) -> Ownership:
    """Enters the units into the runtime and the module; returns who holds what."""
    floating = set(partition.floating)
    inside: set[int] = set()
    for atom in find_atoms(module):
        home = -1 if atom.name in floating else partition.stage_of[atom.name]
        cost = partition.costs[atom.name].forward_s if atom.name in partition.costs else 0.0
        entry = UnitEntry(runtime, atom.index, atom.name, atom.module, home, cost, compiler)
        runtime.units.append(entry)
        inside.update(id(inner) for inner in atom.module.modules())
    ownership = ownership_of(module, partition, runtime.rank)
    runtime.outer_modules = {
        name: inner
        for name, inner in module.named_modules()
        if id(inner) not in inside and not is_boundary(inner)
    }
    for entry in runtime.units:
        entry.install()
    install_metrics(runtime, module)
    _guard_state_dicts(module, ownership, runtime)
    return ownership


def ownership_of(module: nn.Module, partition: Partition, pp_rank: int) -> Ownership:
    """Who holds what in a partition, seen from one stage."""
    atoms = find_atoms(module)
    parameters: dict[str, set[int]] = {}
    buffers: dict[str, set[int]] = {}
    units = {name: s for name, s in partition.stage_of.items() if name not in partition.floating}
    for atom in atoms:
        name = atom.name
        if name not in units:
            continue
        for path, _ in atom.module.named_parameters(remove_duplicate=False):
            parameters.setdefault(f"{name}.{path}", set()).add(units[name])
        for path, _ in atom.module.named_buffers(remove_duplicate=False):
            buffers.setdefault(f"{name}.{path}", set()).add(units[name])
    everywhere = set(range(partition.num_stages))
    for name in outer_parameters(module, atoms):
        parameters[name] = everywhere
    return Ownership(
        module, parameters, pp_rank=pp_rank, pp_size=partition.num_stages, buffers=buffers,
        units=units,
    )  # fmt: skip


def reassign_units(
    module: nn.Module, partition: Partition, ownership: Ownership, runtime: Runtime
) -> None:
    """Tells the units that are in the module already where they live now, and what they cost."""
    for unit in runtime.units:
        if unit.stage >= 0:
            unit.stage = partition.stage_of[unit.name]
        unit.cost = partition.costs[unit.name].forward_s
    for hook in runtime.hooks:
        hook.remove()
    runtime.hooks.clear()
    _guard_state_dicts(module, ownership, runtime)


def _guard_state_dicts(module: nn.Module, ownership: Ownership, runtime: Runtime) -> None:
    """Refuses a state dict that would hold placeholders in the place of other stages' weights."""

    def guard(inner: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not runtime.gathers_state:
            raise UnsupportedError(
                f"state_dict() of {type(inner).__name__}: part of its weights are on other "
                "stages, so this rank alone cannot give them. Call "
                "`trainer.strategy.lightning_module_state_dict()` on every rank (rank 0 gets the "
                "whole), or trainer.save_checkpoint(path)."
            )

    for inner in module.modules():
        if not all(ownership.is_local(p) for p in inner.parameters() if p in ownership):
            runtime.hooks.append(inner.register_state_dict_pre_hook(guard))


def place_weights(
    module: nn.Module, ownership: Ownership, runtime: Runtime, optimizers: list[Any]
) -> None:
    """Keeps this stage's weights on the device and gives up the others."""
    release(module, ownership)
    materialize(module, ownership, runtime.device)
    table = runtime.table
    table.held.clear()
    for parameter in ownership.parameters():
        stages = ownership.stages_of(parameter)
        if len(stages) < ownership.pp_size:
            table.add(parameter, ownership.name_of(parameter), stages)
    for name, buffer in module.named_buffers():
        held = ownership.stages_of_name(name)
        if held is not None and len(held) < ownership.pp_size:
            table.add(buffer, name, held)
    for optimizer in optimizers:
        forget_foreign_state(optimizer, ownership)
    for metric in find_metrics(module):
        metric.to(runtime.device)


def sync_each(tensors: list[torch.Tensor], group: Any, source: int) -> None:
    """Gives every rank of ``group`` the numbers of one, placeholders left out. Collective."""
    for tensor in tensors:
        if _is_real(tensor):
            with torch.no_grad():
                torch.distributed.broadcast(tensor.detach(), source, group=group)


def _is_real(tensor: torch.Tensor) -> bool:
    return not (tensor.numel() > 1 and all(stride == 0 for stride in tensor.stride()))
