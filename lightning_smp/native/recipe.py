"""What the native libraries are made of, and how they are built.

Used by `setup.py`, which loads this file by its path before the package is installed, and by the
build at first use, which runs it as a program. So it imports nothing of the package, and torch and
setuptools only where something is built.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

__all__ = [
    "BACKEND",
    "KERNELS",
    "REPORT_NAME",
    "built_for",
    "setup_arguments",
    "source_digest",
    "source_files",
]

BACKEND: Final = "_backend"
KERNELS: Final = "_kernels"
REPORT_NAME: Final = "build.json"

_PACKAGE: Final = "lightning_smp.native"
_FOLDER: Final = Path(*_PACKAGE.split("."))
_SUFFIXES: Final = (".cpp", ".cu", ".cuh", ".h")
_PATTERNS: Final = {
    BACKEND: ("build_record.cpp", "backend/unity.cpp"),
    KERNELS: ("build_record.cpp", "binding/*.cpp", "kernels/*.cpp", "kernels/*.cu"),
}
_SWITCH: Final = "LIGHTNING_SMP_BUILD"
_ARCHITECTURES: Final = "8.0;9.0+PTX"


def setup_arguments(root: Path) -> dict[str, Any]:
    """Return what `setup.py` in folder `root` passes to setuptools besides pyproject.toml."""
    if _before_anything() is not None:  # without extensions: the wheel fits every Python
        return {"cmdclass": {"build_py": _build_py(root)}}
    return {
        "ext_modules": [_named(library, root / "csrc") for library in _PATTERNS],
        "cmdclass": {"build_py": _build_py(root), "build_ext": _build_ext(root / "csrc")},
    }


def source_files(csrc: Path) -> list[Path]:
    """Return the sources and headers below `csrc`, sorted."""
    return sorted(path for path in csrc.rglob("*") if path.suffix in _SUFFIXES)


def source_digest(csrc: Path) -> str:
    """Return a short digest of all sources, their names included."""
    digest = hashlib.sha256()
    for path in source_files(csrc):
        digest.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def built_for() -> dict[str, str]:
    """Return what a library must have been built for to be loaded by this process."""
    import torch

    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "python": sys.implementation.cache_tag or sys.implementation.name,
    }


def _before_anything() -> str | None:
    """Why nothing at all is built here; None where it may be."""
    if os.environ.get(_SWITCH) == "0":
        return f"{_SWITCH}=0 was set when the package was installed"
    if importlib.util.find_spec("torch") is None:
        return (
            "torch was not importable when the package was installed: install torch, then "
            "`pip install --no-build-isolation lightning_smp`"
        )
    return None


def _obstacle(library: str, csrc: Path) -> str | None:
    """Why `library` cannot be built by this interpreter on this machine; None where it can."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} was not found (CXX names another)"
    if library == KERNELS:
        import torch

        if not list(csrc.glob("kernels/*.cu")):
            return "its sources are not there"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} has no CUDA"
        if _cuda_home() is None:
            return "nvcc was not found (CUDA_HOME names the toolkit's folder)"
    return None


def _cuda_home() -> str | None:
    """The CUDA toolkit: torch's own guess from a link to nvcc on the PATH is wrong."""
    nvcc = shutil.which("nvcc")
    guesses = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    guesses += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    for guess in [*guesses, "/usr/local/cuda"]:
        if guess and Path(guess, "include", "cuda_runtime.h").is_file():
            return guess
    return None


def _sources(library: str, csrc: Path) -> list[str]:
    return sorted(str(path) for pattern in _PATTERNS[library] for path in csrc.glob(pattern))


def _named(library: str, csrc: Path) -> Any:
    """An extension that names its sources; `_complete` adds what needs torch."""
    from setuptools import Extension

    return Extension(f"{_PACKAGE}.{library}", _relative(_sources(library, csrc)))


def _complete(library: str, csrc: Path) -> Any:
    """The extension with everything that the compiler needs."""
    if library == KERNELS:
        os.environ["CUDA_HOME"] = _cuda_home() or ""  # before the next import, which reads it
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", _ARCHITECTURES)
    from torch.utils import cpp_extension

    record = {**built_for(), "sources": source_digest(csrc)}
    macros = [(f"SMP_BUILT_{name.upper()}", value) for name, value in record.items()]
    make = cpp_extension.CUDAExtension if library == KERNELS else cpp_extension.CppExtension
    return make(
        f"{_PACKAGE}.{library}",
        _relative(_sources(library, csrc)),
        include_dirs=[str(csrc.resolve())],
        define_macros=macros,
        extra_compile_args={"cxx": ["-O2", "-g0"], "nvcc": ["-O3"]},
    )


def _relative(paths: list[str]) -> list[str]:
    """Relative to the current folder where they are below it, as setuptools demands."""
    here = os.getcwd() + os.sep
    return [path.removeprefix(here) for path in paths]


def _build_py(root: Path) -> type:
    from setuptools.command.build_py import build_py

    class BuildPy(build_py):
        """Puts the sources into the package, for the build at first use, and a first report."""

        def run(self) -> None:
            super().run()
            if not self.editable_mode:
                csrc = root / "csrc"
                for path in source_files(csrc):
                    target = Path(self.build_lib, _FOLDER, "csrc", path.relative_to(csrc))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
            reason = _before_anything()
            if reason is not None:
                report = dict.fromkeys(_PATTERNS, reason)
                _write_report(Path() if self.editable_mode else Path(self.build_lib), report)

    return BuildPy


def _build_ext(csrc: Path, *, is_optional: bool = os.environ.get(_SWITCH) != "1") -> type:
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        """Builds each library by a command of its own; one that fails is left out and reported."""

        extensions: list[Any]

        def run(self) -> None:
            os.environ.setdefault("MAX_JOBS", str(min(os.cpu_count() or 1, 8)))
            report = {extension.name.rpartition(".")[2]: "" for extension in self.extensions}
            for library in report:
                report[library] = self._failure(library)
                if report[library]:
                    self.warn(f"lightning_smp: {library} is not built: {report[library]}")
            self.extensions = [e for e in self.extensions if not report[e.name.rpartition(".")[2]]]
            in_place = self.inplace or self.editable_mode
            _write_report(Path() if in_place else Path(self.build_lib), report)

        def _failure(self, library: str) -> str:
            """Build; return why there is no library, or nothing."""
            reason = _obstacle(library, csrc)
            if reason is not None:
                # Strict or not: what no machine of this kind can build is not asked for.
                if library == BACKEND and not is_optional:
                    raise RuntimeError(f"{_SWITCH}=1, but {library} cannot be built: {reason}")
                return reason
            try:
                self._build(library)
            except (Exception, SystemExit) as error:
                if not is_optional:
                    raise
                what = (str(error).strip() or repr(error)).splitlines()[-1]
                return f"the build failed: {what} (`pip install -v` shows the output)"
            return ""

        def _build(self, library: str) -> None:
            extension = _complete(library, csrc)
            from setuptools import Distribution
            from torch.utils.cpp_extension import BuildExtension

            command = BuildExtension(Distribution({"ext_modules": [extension]}))
            for name in ("build_lib", "build_temp", "inplace", "debug", "editable_mode"):
                setattr(command, name, getattr(self, name))
            command.ensure_finalized()
            command.run()

    return BuildExt


def _write_report(root: Path, report: dict[str, str]) -> None:
    """Leave for `python -m lightning_smp info` what was built, or why not."""
    path = root / _FOLDER / REPORT_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _main(library: str, csrc: Path, folder: Path) -> None:
    """Build `library` below `folder`; for a process of its own, because builds print."""
    from setuptools import Distribution

    reason = _obstacle(library, csrc)
    if reason is not None:
        sys.exit(reason)
    distribution = Distribution({"name": "lightning_smp", "ext_modules": [_named(library, csrc)]})
    command = _build_ext(csrc, is_optional=False)(distribution)
    command.build_lib, command.build_temp = str(folder), str(folder / "temporary")
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
