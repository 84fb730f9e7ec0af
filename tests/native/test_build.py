"""Building, refusing and finding the native libraries."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_smp.native import jit, loading, recipe
from lightning_smp.native.record import mismatch, read_record
from tests.native.built import backend_module

_ROOT = Path(__file__).parents[2]
_MARK = b"lightning_smp build record{"


def write_library(path: Path, **changes: str) -> Path:
    """Writes a file with a build record; it is no library."""
    record = {**recipe.built_for(), "sources": "0", **changes}
    text = "|".join(f"{name}={value}" for name, value in record.items())
    path.write_bytes(b"\x7fELF" + bytes(5000) + _MARK + text.encode() + b"}\0" + bytes(99))
    return path


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Environment without switches, and a cache of the test's own."""
    for name in ("LIGHTNING_SMP_NATIVE", "LIGHTNING_SMP_JIT", "LOCAL_RANK", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield monkeypatch
    loading.load_backend.cache_clear()


def test_record_of_the_built_library() -> None:
    path = Path(str(backend_module().__file__))
    assert mismatch(path) is None
    assert read_record(path) == {
        **recipe.built_for(),
        "sources": recipe.source_digest(_ROOT / "csrc"),
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.0.1"}, r"built for torch 2\.0\.1, not \d"),
        ({"cuda": "99.9"}, r"CUDA 99\.9, not "),
        ({"python": "cpython-27"}, r"Python cpython-27, not "),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_library_of_another_version_is_refused_by_name(
    changes: dict[str, str], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import re

    path = write_library(tmp_path / "_backend.so", **changes)
    found = loading.find_library(recipe.BACKEND, tmp_path)
    assert found.path is None
    assert re.search(words, found.reason)
    assert str(path) in found.reason
    assert "Install again" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_library_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_backend.so").write_bytes(b"\x7fELF")
    assert "torch unknown, not" in loading.find_library(recipe.BACKEND, tmp_path).reason


@pytest.mark.usefixtures("fresh")
def test_library_of_this_version_is_found(tmp_path: Path) -> None:
    path = write_library(tmp_path / "_backend.so")
    assert loading.find_library(recipe.BACKEND, tmp_path).path == path


def test_switch_turns_it_off(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_library(tmp_path / "_backend.so")
    fresh.setenv("LIGHTNING_SMP_NATIVE", "0")
    found = loading.find_library(recipe.BACKEND, tmp_path)
    assert (found.path, found.reason) == (None, "switched off by LIGHTNING_SMP_NATIVE=0")


@pytest.mark.usefixtures("fresh")
def test_reason_of_the_installation_is_told(tmp_path: Path) -> None:
    assert "nothing was built" in loading.find_library(recipe.BACKEND, tmp_path).reason
    report = {"_backend": "no C++ compiler"}
    (tmp_path / recipe.REPORT_NAME).write_text(json.dumps(report))
    assert loading.find_library(recipe.BACKEND, tmp_path).reason == "no C++ compiler"


def test_build_at_first_use_goes_into_a_private_cache(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a compiler that only writes a file: what is tested is all around it."""
    calls = tmp_path / "calls"
    fresh.setattr(jit.recipe, "__file__", str(tmp_path / "recipe.py"))
    (tmp_path / "recipe.py").write_text(
        "import pathlib, sys\n"
        f"open({str(calls)!r}, 'a').write(sys.argv[1] + '\\n')\n"
        "pathlib.Path(sys.argv[3], sys.argv[1] + '.cpython.so').write_text('built')\n"
    )
    fresh.setenv("LIGHTNING_SMP_JIT", "1")
    stale = write_library(tmp_path / "_backend.so", torch="2.0.1")
    path = loading.find_library(recipe.BACKEND, tmp_path).path
    assert path is not None
    assert path.read_text() == "built"
    assert stale.exists()
    assert path.is_relative_to(tmp_path / "cache" / "lightning_smp")
    for folder in (path.parent, path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    version = recipe.built_for()["torch"]
    digest = recipe.source_digest(_ROOT / "csrc")
    assert version in path.parent.name
    assert digest in path.parent.name
    assert sorted(p.name for p in path.parent.iterdir()) == ["_backend.lock", "_backend.so"]

    fresh.setenv("LOCAL_RANK", "1")  # finds what rank 0 has built
    assert loading.find_library(recipe.BACKEND, tmp_path).path == path
    assert calls.read_text() == "_backend\n"


def test_failed_build_at_first_use_is_told_to_every_rank(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh.setenv("LIGHTNING_SMP_JIT", "1")
    fresh.setenv("CXX", "no-such-compiler")
    for rank in ("0", "1"):
        fresh.setenv("LOCAL_RANK", rank)
        found = loading.find_library(recipe.BACKEND, tmp_path)
        assert found.path is None
        assert "no C++ compiler: 'no-such-compiler' was not found" in found.reason


def test_rank_that_waits_in_vain_says_so(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("LOCAL_RANK", "1")
    fresh.setattr(jit, "_WAIT_S", 0.05)
    with pytest.raises(jit.BuildError, match="local rank 0 did not build"):
        jit.cached_library(recipe.BACKEND)


def test_cache_of_another_user_is_refused(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "lightning_smp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(jit.BuildError, match="is not a folder of this user"):
        jit.cached_library(recipe.BACKEND)


def install(tmp_path: Path, **environ: str) -> tuple[Path, str]:
    """Installs a copy of the sources; returns where to, and what pip printed."""
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("lightning_smp", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "build.json", "__pycache__")
        shutil.copytree(_ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "lightning_smp_autoload.py"):
        shutil.copy(_ROOT / name, source / name)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "-v"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    result = subprocess.run(
        [*command, str(source)], check=False, capture_output=True, text=True, timeout=100,
        env={**os.environ, **environ},
    )  # fmt: skip
    return target / "lightning_smp" / "native", result.stdout + result.stderr


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"LIGHTNING_SMP_BUILD": "", "CXX": "no-such-compiler"}, "no C++ compiler"),
        ({"LIGHTNING_SMP_BUILD": "0"}, "LIGHTNING_SMP_BUILD=0"),
    ],
)
def test_installs_without_the_libraries(
    environ: dict[str, str], reason: str, tmp_path: Path
) -> None:
    installed, output = install(tmp_path, **environ)
    assert (installed / "recipe.py").is_file(), output
    assert not list(installed.glob("*.so"))
    assert reason in json.loads((installed / recipe.REPORT_NAME).read_text())["_backend"]
    assert (installed / "csrc" / "backend" / "gate.h").is_file()
    if "CXX" in environ:
        assert output.count("lightning_smp: _backend is not built: no C++ compiler") == 1


def test_installation_fails_where_the_library_was_demanded(tmp_path: Path) -> None:
    installed, output = install(tmp_path, LIGHTNING_SMP_BUILD="1", CXX="no-such-compiler")
    assert "LIGHTNING_SMP_BUILD=1, but _backend cannot be built: no C++ compiler" in output
    assert not installed.exists()


@pytest.mark.slow
def test_builds_and_loads_at_first_use(tmp_path: Path) -> None:
    """The compiler's own work: about a minute."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    code = (
        "from lightning_smp.native import loading\n"
        f"loading._HERE = __import__('pathlib').Path({str(tmp_path)!r})\n"
        f"found = loading.find_library('_backend', loading._HERE)\n"
        "print(found.reason or found.path)\n"
    )
    environ = {**os.environ, "LIGHTNING_SMP_JIT": "1", "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=_ROOT,
        env=environ, timeout=600,
    )  # fmt: skip
    path = Path(result.stdout.strip())
    assert path.is_relative_to(tmp_path), result.stdout
    assert mismatch(path) is None
