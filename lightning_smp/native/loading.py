"""Finds and loads the native libraries, once per process; says why where there is none."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from lightning_smp.native.jit import BuildError, cached_library
from lightning_smp.native.recipe import BACKEND, KERNELS, REPORT_NAME
from lightning_smp.native.record import mismatch
from lightning_smp.native.switches import is_jit_on, is_native_on

__all__ = ["Loaded", "find_library", "load_backend", "load_kernels"]

_log = logging.getLogger(__name__)
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Loaded:
    """A native library, or why there is none.

    Attributes:
        path: of the loaded library; None where none is.
        reason: why none is loaded; empty where one is.
        module: its Python module, if it is one.
    """

    path: Path | None = None
    reason: str = ""
    module: ModuleType | None = None


@cache
def load_backend() -> Loaded:
    """Load the throttled backend; after the first call the answer is remembered."""
    found = find_library(BACKEND)
    if found.path is None:
        return found
    name = f"lightning_smp.native.{BACKEND}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(found.path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return _missing(f"{found.path} does not load: {error}")
    return Loaded(found.path, module=module)


@cache
def load_kernels() -> Loaded:
    """Load the CUDA kernels into torch's operators; after the first call remembered."""
    import torch

    found = find_library(KERNELS)
    if found.path is not None:
        try:
            torch.ops.load_library(found.path)
        except OSError as error:
            return _missing(f"{found.path} does not load: {error}")
    return found


def find_library(library: str, folder: Path = _HERE) -> Loaded:
    """Return the library that may be loaded here: built at installation, or else at first use.

    One that was built for another torch, CUDA or Python is refused, with a warning.

    Args:
        library: `BACKEND` or `KERNELS`.
        folder: where installed libraries are.
    """
    if not is_native_on():
        return Loaded(reason="switched off by LIGHTNING_SMP_NATIVE=0")
    path = _installed(library, folder)
    refusal = mismatch(path) if path is not None else None
    if path is not None and refusal is None:
        return Loaded(path)
    if is_jit_on():
        try:
            return Loaded(cached_library(library))
        except BuildError as error:
            return _missing(str(error))
    if refusal is not None:
        return _missing(refusal)
    return Loaded(reason=_why_not_built(library, folder))


def _missing(reason: str) -> Loaded:
    _log.warning("%s", reason)
    return Loaded(reason=reason)


def _installed(library: str, folder: Path) -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{library}{suffix}"
        if path.is_file():
            return path
    return None


def _why_not_built(library: str, folder: Path) -> str:
    """What the installation noted."""
    try:
        report = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "nothing was built: the package runs from its sources; see docs/native.md"
    return str(report.get(library) or "the library that was built is gone")
