"""Builds a native library at its first use, into a cache of this user (LIGHTNING_SMP_JIT=1).

Note: many ranks, one build. The first process on the node (local rank 0) builds, under a lock that
the kernel releases if it dies, to a temporary name, and renames the finished file: so whoever sees
the file sees all of it. The others only wait for the file, or for the note that there is none.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lightning_smp.errors import SMPError
from lightning_smp.native import recipe

__all__ = ["BuildError", "cached_library", "source_folder"]

_WAIT_S: Final = 600.0
_POLL_S: Final = 0.1
# The note of a failed build counts for the other ranks of the run that failed, not for later runs.
_NOTE_VALID_S: Final = 60.0


class BuildError(SMPError):
    """A native library could not be built; the message says why."""


def source_folder() -> Path | None:
    """Return the folder of the C++ sources: of the checkout, or of the installed package."""
    here = Path(__file__).parent
    for folder in (here.parents[1] / "csrc", here / "csrc"):
        if (folder / "build_record.cpp").is_file():
            return folder
    return None


def cached_library(library: str) -> Path:
    """Return the path of `library`, built now unless this user's cache has it.

    Does not communicate; ranks other than local rank 0 wait until it has built.

    Raises:
        BuildError: it cannot be built here, or local rank 0 did not within ten minutes.
    """
    csrc = source_folder()
    if csrc is None:
        raise BuildError("the C++ sources are not installed beside the package")
    folder = _private_folder(_cache_root() / _key(csrc))
    target, note = folder / f"{library}.so", folder / f"{library}.failed"
    if not target.is_file():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _build(library, csrc, target, note)
        else:
            _await(target, note)
    return target


def _key(csrc: Path) -> str:
    parts = [*recipe.built_for().values(), recipe.source_digest(csrc)]
    return re.sub(r"[^\w.+-]", "_", "-".join(parts))


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _private_folder(Path(base) / "lightning_smp")


def _private_folder(path: Path) -> Path:
    """Make `path` for this user alone; what another could have written must not be loaded."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise BuildError(f"the cache folder {path} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def _build(library: str, csrc: Path, target: Path, note: Path) -> None:
    with _locked(target.with_suffix(".lock")):
        if target.is_file():  # by another run, while this one waited for the lock
            return
        note.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            command = [sys.executable, recipe.__file__, library, str(csrc), scratch]
            result = subprocess.run(  # noqa: S603 - this package's own file, no user input
                command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
            built = [path for path in Path(scratch).rglob(f"{library}*.so") if path.is_file()]
            if result.returncode == 0 and built:
                built[0].replace(target)
                return
            output = (result.stdout + result.stderr).strip()
            note.write_text(output[-2000:], encoding="utf-8")
    raise BuildError(f"the build of {library} failed: {output[-2000:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _await(target: Path, note: Path) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    started_s = time.time() - _NOTE_VALID_S
    while not target.is_file():
        if note.is_file() and note.stat().st_mtime > started_s:
            raise BuildError(f"local rank 0 could not build it: {note.read_text('utf-8')}")
        if time.monotonic() > deadline_s:
            raise BuildError(f"local rank 0 did not build {target} within {_WAIT_S:.0f} s")
        time.sleep(_POLL_S)
