"""`smp.save` and `smp.load`: one file for the whole, or one for each rank of a replica.

A file appears under its name only when it is complete, so several writers and a crash do no harm.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape, glob
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch

from lightning_smp.errors import CheckpointError, ConfigError
from lightning_smp.groups import Groups
from lightning_smp.process_state import state
from lightning_smp.script.partial import Layout, layout_of, merge, tagged, untagged
from lightning_smp.script.resharding import has_records, join_ranks

__all__ = ["file_suffix", "load", "read_file", "save", "whole_file"]

_log = logging.getLogger(__name__)
_NEWEST_PROTOCOL = 3


def save(
    obj: object,
    f: str,
    partial: bool = True,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Saves an object as `torch.save` does.

    Not a collective. Several ranks may be told to write the same file: one does.

    Args:
        obj: any object; `load` reads tensors and plain data by default.
        f: path. With `partial` each rank of the replica with rdp_rank 0 writes its own file,
            `f_{pp_rank}`, or `f_{pp_rank}_{tp_rank}` under tensor parallelism; else global rank 0
            writes `f`. The other ranks write nothing.
        partial: whether `obj` is this rank's part.
        pickle_module: as in torch; None is Python's pickle.
        pickle_protocol: as in torch, but at most 3: what is newer could only be loaded as code.
        v3: with `partial`, all replicas write: `f_{pp_rank}_{tp_rank}_{rdp_rank}`.

    Raises:
        ConfigError: `f` is not a string.
    """
    path = _require_path("save", f)
    groups = state.groups
    if not _writes(groups, partial=partial, v3=v3):
        _log.info("smp.save(%r): rank %d leaves it to another rank.", path, groups.rank)
        return
    if partial:
        path += file_suffix(groups, v3=v3)
        obj = tagged(obj, _layout(groups))
    options = {} if pickle_module is None else {"pickle_module": pickle_module}
    with whole_file(path) as temporary:
        torch.save(obj, temporary, pickle_protocol=_readable(pickle_protocol), **options)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = None,
    partial: bool = True,
    back_compat: bool = False,
    weights_only: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Loads what `save` wrote, or any file of `torch.save`.

    Not a collective; every rank that needs the object calls.

    Args:
        f: the path that was given to `save`.
        map_location: as in torch.
        pickle_module: as in torch; needs `weights_only=False`.
        partial: as in `save`. Partial state dicts of another layout come back whole on every
            rank, with `_smp_is_partial` False.
        back_compat: accepted; the file names of all generations are tried in any case.
        weights_only: only tensors and plain data; False runs the code that a file names, so it
            is for files that you trust.
        pickle_load_args: as in torch.

    Raises:
        CheckpointError: there is no such file, it holds more than tensors and plain data, or it is
            a part of another layout that cannot be merged.
        ConfigError: `f` is not a string.
    """
    del back_compat
    path = _require_path("load", f)
    options = {**pickle_load_args, "map_location": map_location, "weights_only": weights_only}
    if pickle_module is not None and pickle_module.__name__ != "pickle":
        options["pickle_module"] = pickle_module
    if not partial:
        return read_file(path, **options)
    groups = state.groups
    own = _own_file(path, groups)
    if own is None:
        layout = _layout_of_others(path, options)
    else:
        found = read_file(own, **options)
        layout = layout_of(found) or _layout(groups)
        if layout == _layout(groups):
            return untagged(found)
    return _load_other_layout(path, layout, groups, options)


def read_file(path: str, *, weights_only: bool = True, **options: Any) -> Any:
    """`torch.load` with errors that say what to do.

    Raises:
        CheckpointError: there is no such file, it holds more than tensors and plain data, or it is
            damaged.
    """
    if options.get("mmap") and not is_zipfile(path):
        options["mmap"] = False  # torch maps files of its present format only
    try:
        return torch.load(path, weights_only=weights_only, **options)
    except FileNotFoundError:
        near = [os.path.basename(name) for name in sorted(glob(f"{escape(path)}_*"))[:5]]
        hint = f" There are {near}: load them with partial=True." if near else ""
        raise CheckpointError(f"There is no file {path!r}.{hint}") from None
    except Exception as error:
        if _is_refusal(path, error):
            raise CheckpointError(
                f"{path!r} holds more than tensors and plain data, which loading could run as code "
                f"({_first_line(error)}). If you trust the file, pass weights_only=False; to load "
                f"it safely, save numbers, strings, lists, dicts and tensors only."
            ) from error
        if _is_about_the_file(error, weights_only=weights_only):
            raise CheckpointError(
                f"{path!r} cannot be read ({_short(error)}): it is damaged, or torch.save did not "
                f"write it. Load another checkpoint, or get this file again from where it is whole."
            ) from error
        raise


@contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Gives a name to write to; the file gets the name `path` when the body is through.

    A crash leaves the former file, if there was one, as it was.
    """
    temporary = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def file_suffix(groups: Groups, *, v3: bool = False) -> str:
    """What the name of this rank's partial file ends with."""
    if v3:
        return f"_{groups.pp_rank}_{groups.tp_rank}_{groups.rdp_rank}"
    return _suffix(groups.pp_rank, groups.tp_rank, groups.tp_size)


def _writes(groups: Groups, *, partial: bool, v3: bool) -> bool:
    if partial:
        return v3 or groups.rdp_rank == 0
    return groups.rank == 0


def _readable(protocol: int) -> int:
    if protocol > _NEWEST_PROTOCOL:
        _log.warning(
            "smp.save(pickle_protocol=%d): torch reads protocols up to %d without running code, "
            "so %d is written.", protocol, _NEWEST_PROTOCOL, _NEWEST_PROTOCOL,
        )  # fmt: skip
    return min(protocol, _NEWEST_PROTOCOL)


def _layout(groups: Groups) -> Layout:
    return groups.pp_size, groups.tp_size, groups.rdp_size


def _suffix(pp_rank: int, tp_rank: int, tp_size: int) -> str:
    return f"_{pp_rank}" if tp_size == 1 else f"_{pp_rank}_{tp_rank}"


def _own_file(path: str, groups: Groups) -> str | None:
    """This rank's file, under the names of all generations; None if there is none."""
    pp_rank, tp_rank = groups.pp_rank, groups.tp_rank
    names = (
        f"_{pp_rank}_{tp_rank}_{groups.rdp_rank}",
        f"_{pp_rank}_{tp_rank}",
        f"_{groups.mp_rank}",
    )
    preferred = _suffix(pp_rank, tp_rank, groups.tp_size)
    for name in (preferred, *names):
        if os.path.exists(path + name):
            return path + name
    return None


def _layout_of_others(path: str, options: dict[str, Any]) -> Layout:
    """The layout that other ranks' files tell, where this rank has no file."""
    for name in sorted(glob(f"{escape(path)}_*")):
        if re.fullmatch(r"_\d+(_\d+){0,2}", name[len(path) :]):
            layout = layout_of(read_file(name, **options))
            if layout is not None:
                return layout
    groups = state.groups
    raise CheckpointError(
        f"smp.load({path!r}, partial=True): there is no file for this rank, "
        f"{path + file_suffix(groups)!r}. Was it saved with partial=False?"
    )


def _load_other_layout(path: str, layout: Layout, groups: Groups, options: dict[str, Any]) -> Any:
    pp_size, tp_size, _ = layout
    options = {**options, "map_location": options["map_location"] or "cpu"}

    def read(tp_rank: int) -> Any:
        names = [path + _suffix(stage, tp_rank, tp_size) for stage in range(pp_size)]
        return merge([read_file(name, **options) for name in names])

    if tp_size == groups.tp_size:
        return read(groups.tp_rank)
    parts = [read(rank) for rank in range(tp_size)]
    if tp_size > 1 and not has_records(parts[0]):
        raise CheckpointError(
            f"{path!r} was saved with tensor_parallel_degree={tp_size} and without records of what "
            f"was split, and this run has {groups.tp_size}: the parts cannot be merged. Save what "
            "local_state_dict() gives, or save and load with partial=False."
        )
    return join_ranks(parts)


def _require_path(name: str, f: object) -> str:
    if isinstance(f, str):
        return f
    raise ConfigError(
        f"smp.{name} was given a {type(f).__name__} as file; it must be a string, because ranks "
        f"add their numbers to it. Pass str(path)."
    )


def _is_refusal(path: str, error: Exception) -> bool:
    """Whether a sound file holds what `weights_only` does not let through."""
    text = str(error)
    return "weights_only" in text.lower() and ("GLOBAL" in text or is_zipfile(path))


def _is_about_the_file(error: Exception, *, weights_only: bool) -> bool:
    """Otherwise it is for memory that is full, or of the user's code that the file names."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return False
    return weights_only or isinstance(error, (UnpicklingError, EOFError, OSError, RuntimeError))


def _short(error: Exception) -> str:
    """What torch says, unless it advises to run a damaged file's code."""
    name, line = type(error).__name__, _first_line(error).partition(". ")[0]
    return name if "weights_only" in line or not line else f"{name}: {line}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line]
    return (lines or str(error).splitlines() or [""])[0][:300]
