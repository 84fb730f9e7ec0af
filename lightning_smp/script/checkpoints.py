"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lightning_smp.errors import CheckpointError, ConfigError, SMPError
from lightning_smp.process_state import state
from lightning_smp.script.checkpoint_files import CheckpointFolder, tag_of
from lightning_smp.script.meeting import meeting
from lightning_smp.script.partial import PARTIAL_KEY, merge
from lightning_smp.script.resharding import RECORDS_KEY, join_ranks, records_of
from lightning_smp.script.saving import file_suffix, read_file, whole_file
from lightning_smp.tensor_parallel.record import Sharding
from lightning_smp.wire import all_gather_objects

__all__ = ["resume_from_checkpoint", "save_checkpoint"]

_log = logging.getLogger(__name__)
_SAFETENSORS: Final = {"pytorch_model.bin": "model.safetensors"}
"""What newer Hugging Face releases write where older ones wrote the former."""


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Writes a checkpoint; the files are complete when it returns, or the former ones still there.

    Collective over world: every rank calls with the same arguments. The ranks with rdp_rank 0
    write.

    Args:
        path: folder, seen by all ranks; made if needed.
        tag: name of the checkpoint, "step_100" for example.
        partial: each stage writes its part of model and optimizer; else global rank 0 writes the
            whole model, without the optimizer.
        model: the `DistributedModel`.
        optimizer: the `DistributedOptimizer`; without it only the model is saved.
        user_content: anything that `torch.save` takes; `resume_from_checkpoint` gives it back.
            What is not tensors and plain data needs `weights_only=False` there.
        translate_if_full: use the names of the original Hugging Face model where they differ.
        num_kept_partial_checkpoints: number of partial checkpoints to keep; the oldest go. None
            keeps all.

    Raises:
        CheckpointError: on every rank, if one could not write.
        ConfigError: an argument that cannot be meant.
    """
    tag = tag_of(tag)
    if model is None and optimizer is None:
        raise ConfigError(
            "smp.save_checkpoint was given neither a model nor an optimizer. Pass "
            "model=<the DistributedModel>."
        )
    if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
        raise ConfigError(
            f"num_kept_partial_checkpoints={num_kept_partial_checkpoints}: at least the new "
            f"checkpoint is kept. Use 1 or more, or None to keep all."
        )
    folder = CheckpointFolder(path)
    with meeting("smp.save_checkpoint()", "world"):
        if partial:
            parts = {"model": model, "optimizer": optimizer}
            _save_partial(folder, tag, parts, user_content, num_kept_partial_checkpoints)
        else:
            _save_full(folder, tag, model, user_content, translate_if_full)


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    *,
    load_optimizer_states: bool | None = None,
    weights_only: bool = True,
) -> Any:
    """Gives back the user content at once; model and optimizer take their states at the partition.

    Not a collective, but every rank calls, after `DistributedModel` and `DistributedOptimizer` and
    best before the first step. A partial checkpoint loads into any layout: of split tensors a
    rank reads what it holds now.

    Args:
        path: the folder that was given to `save_checkpoint`.
        tag: name of the checkpoint; None takes the newest.
        partial: what kind of checkpoint it is. A full one has no optimizer.
        strict: whether missing and unexpected keys are errors.
        load_optimizer: whether to load the optimizer's state.
        load_sharded_optimizer_state: only means something with sharded data parallelism.
        translate_function: for a full checkpoint: makes the model's names of the file's.
        load_optimizer_states: former name of `load_optimizer`.
        weights_only: only tensors and plain data; False runs the code that the files name, so it
            is for files that you trust.

    Returns:
        The user content; an empty dict if none was saved.

    Raises:
        CheckpointError: a file is missing or cannot be read.
        SMPError: there is no `DistributedModel` yet, or no `DistributedOptimizer` for a state.
    """
    del load_sharded_optimizer_state
    folder = CheckpointFolder(path)
    tag = folder.newest(partial=partial) if tag is None else tag_of(tag)
    model = state.model
    if model is None:
        raise SMPError(
            "smp.resume_from_checkpoint was called before smp.DistributedModel; it loads into the "
            "wrapped model. Call it after wrapping."
        )
    with_optimizer = load_optimizer if load_optimizer_states is None else load_optimizer_states
    if not partial:
        return _resume_full(folder, tag, model, strict, translate_function, weights_only)
    checkpoint = folder.partial(tag)
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"There is no partial checkpoint {str(checkpoint)!r}. Pass the tag of one, or "
            f"partial=False for a full one."
        )
    split = model.deployment.ownership.tensor.shardings
    parts = _read_parts(checkpoint, "model", split, weights_only)
    if parts is not None:
        model.load_state_dict(parts, strict=strict)
    if with_optimizer:
        _resume_optimizer(checkpoint, weights_only)
    return _read_user_content(checkpoint / "user_content.pt", weights_only)


def _save_partial(
    folder: CheckpointFolder,
    tag: str,
    parts: Mapping[str, Any],
    user_content: Any,
    keep: int | None,
) -> None:
    groups = state.groups
    leads = state.local_rank == 0
    leaders = _together(lambda: folder.begin(tag) if leads else None)
    target = folder.unfinished(tag)

    def write() -> None:
        if groups.rdp_rank == 0:
            for name, holder in parts.items():
                if holder is not None:
                    part = holder.local_state_dict()
                    _write(target / f"{name}{file_suffix(groups)}.pt", part)
        if leads:
            layout = {
                "pp_size": groups.pp_size, "tp_size": groups.tp_size, "rdp_size": groups.rdp_size,
                "parts": [name for name, holder in parts.items() if holder is not None],
            }  # fmt: skip
            _write(target / "layout.pt", layout)
            if user_content is not None:
                _write_user_content(target / "user_content.pt", user_content)

    _together(write)
    for leader in leaders:  # one after the other, as several nodes may see one folder

        def finish(leader: int = leader) -> None:
            if groups.rank == leader:
                folder.commit(tag)
                folder.set_newest(tag, partial=True)
                if keep is not None:
                    folder.prune(keep)

        _together(finish)


def _save_full(
    folder: CheckpointFolder, tag: str, model: Any, user_content: Any, translate: bool
) -> None:
    if model is None:
        raise ConfigError(
            "smp.save_checkpoint(partial=False) saves the model only, and was given none. Pass "
            "model=<the DistributedModel>, or partial=True to save an optimizer."
        )
    states = model.state_dict(gather_to_rank0=True)

    def write() -> None:
        if state.groups.rank != 0:
            return
        folder.path.mkdir(parents=True, exist_ok=True)
        whole = states
        for smp_to_hf, _ in state.module_manager.translate_functions if translate else ():
            whole = smp_to_hf(whole)
        if not translate:
            whole[PARTIAL_KEY] = False  # its names are the wrapped model's
        _write(folder.full(tag), whole)
        if user_content is not None:
            _write_user_content(folder.full_user_content(tag), user_content)
        folder.set_newest(tag, partial=False)

    _together(write)


def _resume_full(
    folder: CheckpointFolder,
    tag: str,
    model: Any,
    strict: bool,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None,
    weights_only: bool,
) -> Any:
    states = _read_full(folder.full(tag), weights_only)
    if translate_function is not None:
        states = {**translate_function(states), PARTIAL_KEY: False}
    _name_tied(model.get_module(), states)
    model.load_state_dict(states, strict=strict)
    return _read_user_content(folder.full_user_content(tag), weights_only)


def _read_full(file: Path, weights_only: bool) -> dict[str, Any]:
    other = file.with_name(_SAFETENSORS.get(file.name, file.name))
    if not file.exists() and other.exists():
        from safetensors.torch import load_file

        return dict(load_file(other, device="cpu"))
    return dict(_read(file, weights_only))


def _name_tied(module: nn.Module, states: dict[str, Any]) -> None:
    """Enters shared weights under all names: files that hold tensors once have one of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        known = next((name for name in tied if name in states), None)
        if known is not None:
            states.update({name: states[known] for name in tied if name not in states})


def _read_parts(
    checkpoint: Path, name: str, split: Mapping[Any, Sharding], weights_only: bool
) -> Any:
    """The parts of all stages as one; the tensors stay in the files until they are read.

    Args:
        checkpoint: the folder.
        name: "model" or "optimizer".
        split: how its tensors are split over the present tensor group.
        weights_only: as in `resume_from_checkpoint`.
    """
    layout = _read(checkpoint / "layout.pt", weights_only=True)
    if name not in layout["parts"]:
        return None
    groups, tp_size = state.groups, layout["tp_size"]

    def read(tp_rank: int) -> Any:
        ending = "" if tp_size == 1 else f"_{tp_rank}"
        files = [checkpoint / f"{name}_{stage}{ending}.pt" for stage in range(layout["pp_size"])]
        return merge([_read(file, weights_only) for file in files])

    own = read(groups.tp_rank if tp_size == groups.tp_size else 0)
    is_split_alike = tp_size == groups.tp_size and own.get(RECORDS_KEY) == records_of(split)
    if tp_size == 1 or is_split_alike:
        return own
    if RECORDS_KEY not in own:
        raise CheckpointError(
            f"{str(checkpoint)!r} was saved with tensor_parallel_degree={tp_size} and without "
            f"records of what was split, and this run has {groups.tp_size}: the parts cannot be "
            "merged. Save it anew with this version, or a full checkpoint (partial=False), in a "
            "run of the former degree."
        )
    return join_ranks([read(rank) for rank in range(tp_size)], split, groups.tp_rank)


def _resume_optimizer(checkpoint: Path, weights_only: bool) -> None:
    if state.optimizer is None and "optimizer" in _read(checkpoint / "layout.pt", True)["parts"]:
        raise SMPError(
            "smp.resume_from_checkpoint was called before smp.DistributedOptimizer, and the "
            "checkpoint has the state of one. Call it after wrapping, or pass "
            "load_optimizer=False."
        )
    if state.optimizer is None:
        return
    split = state.optimizer.split_places()
    parts = _read_parts(checkpoint, "optimizer", split, weights_only)
    if parts is not None:
        state.optimizer.load_state_dict(parts)


def _together(action: Callable[[], None]) -> list[int]:
    """Runs `action` on every rank; returns the first rank of each node. Collective over world.

    Raises:
        CheckpointError: on every rank, if the action failed on one.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # told to the others, who would wait for this rank
        failure = error
    groups = state.groups
    mine = [state.local_rank, None if failure is None else f"{type(failure).__name__}: {failure}"]
    said: list[Any] = all_gather_objects(mine, groups.world_control)
    failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text is not None]
    if failures:
        raise CheckpointError(
            f"The checkpoint could not be written ({'; '.join(failures[:3])}). The former one is "
            f"still there."
        ) from failure
    return [rank for rank, (local_rank, _) in enumerate(said) if local_rank == 0]


def _write(file: Path, obj: Any) -> None:
    with whole_file(str(file)) as temporary:
        torch.save(obj, temporary)


def _write_user_content(file: Path, content: Any) -> None:
    data = io.BytesIO()
    torch.save(content, data)
    data.seek(0)
    try:
        torch.load(data, weights_only=True)
    except Exception:
        _log.warning(
            "user_content holds more than tensors and plain data, so smp.resume_from_checkpoint "
            "will need weights_only=False. Save numbers, strings, lists, dicts and tensors only."
        )
    with whole_file(str(file)) as temporary:
        Path(temporary).write_bytes(data.getbuffer())


def _read(file: Path, weights_only: bool) -> Any:
    return read_file(str(file), map_location="cpu", mmap=True, weights_only=weights_only)


def _read_user_content(file: Path, weights_only: bool) -> Any:
    if not file.exists():
        return {}
    return read_file(str(file), map_location="cpu", weights_only=weights_only)
