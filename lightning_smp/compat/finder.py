"""The finder behind `import smdistributed.modelparallel.torch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import torch
from typing_extensions import override

from lightning_smp.autoload import PostImportFinder
from lightning_smp.compat import cuda_on_cpu, huggingface
from lightning_smp.errors import SMPError

__all__ = ["VERSION", "install", "remove"]

VERSION: Final = "1.15.0"
"""The release whose documentation this library follows; clients compare it."""

_ROOT: Final = "smdistributed"
_API: Final = f"{_ROOT}.modelparallel.torch"
_HOMES: Final[dict[str, tuple[str, ...]]] = {
    _ROOT: (),
    f"{_ROOT}.modelparallel": (),
    f"{_ROOT}.modelparallel.backend": (),
    f"{_ROOT}.modelparallel.backend.exceptions": ("lightning_smp.errors",),
    f"{_ROOT}.modelparallel.test": (),
    f"{_ROOT}.modelparallel.test.torch": (),
    f"{_ROOT}.modelparallel.test.torch.utils": ("lightning_smp.compat.test_utils",),
    _API: ("lightning_smp",),
    f"{_API}.exceptions": ("lightning_smp.errors",),
}
"""Where the names of a module come from. Further modules below the API have our module's names."""


def install(*, cpu_devices: bool | None = None) -> None:
    """Makes `smdistributed.modelparallel` importable in this process. Safe to call twice.

    Args:
        cpu_devices: let devices that a script spells "cuda" be the CPU; None: where torch finds no
            GPU. This patches torch for the whole process.

    Raises:
        SMPError: another package of that name is imported already.
    """
    loaded = sys.modules.get(_ROOT)
    if loaded is not None and not isinstance(loaded, _Alias):
        raise SMPError(
            "another package named smdistributed is imported in this process already. Call "
            "lightning_smp.compat.install() before the first import of it."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path[:0] = [_Finder(), _ClientFinder(huggingface.PATCHES)]
    for name, patch in huggingface.PATCHES.items():
        if name in sys.modules:
            patch()
    if not torch.cuda.is_available() if cpu_devices is None else cpu_devices:
        cuda_on_cpu.install()


def remove() -> None:
    """Undoes `install`; modules that were imported meanwhile keep working, patches included."""
    ours = (_Finder, _ClientFinder)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ours)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Alias)]:
        del sys.modules[name]
    cuda_on_cpu.remove()


class _Alias(ModuleType):
    """A module that has no names but those of its homes."""

    def __getattr__(self, name: str) -> Any:
        for home in _homes_of(self.__name__) or ():
            module = _import_if_there(home)
            if module is not None and hasattr(module, name):
                value = self.__dict__[name] = getattr(module, name)
                return value
        raise AttributeError(
            f"{self.__name__} (that is lightning_smp in this process) has no name {name!r}; "
            f"docs/smp-compat.md lists what there is"
        )

    @override
    def __dir__(self) -> list[str]:
        homes = [_import_if_there(home) for home in _homes_of(self.__name__) or ()]
        return sorted({*super().__dir__(), *(name for home in homes for name in dir(home))})


class _Finder(MetaPathFinder, Loader):
    """Finds and loads the modules of the import contract."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != _ROOT or _homes_of(fullname) is None:
            return None
        return ModuleSpec(fullname, self, origin="lightning_smp", is_package=True)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, "Another name of lightning_smp; see lightning_smp.compat.")

    @override
    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in (_ROOT, f"{_ROOT}.modelparallel"):
            module.__dict__["__version__"] = VERSION


class _ClientFinder(PostImportFinder):
    """Lets clients that know SMP by name be patched when they are imported."""


def _homes_of(name: str) -> tuple[str, ...] | None:
    """Modules that the names of module `name` come from; None if there is no such module."""
    if name in _HOMES:
        return _HOMES[name]
    if not name.startswith(f"{_API}."):
        return None
    home = f"lightning_smp{name[len(_API) :]}"
    try:
        return None if find_spec(home) is None else (home,)
    except ModuleNotFoundError:  # not even its parent exists
        return None


def _import_if_there(name: str) -> ModuleType | None:
    return None if find_spec(name) is None else import_module(name)
