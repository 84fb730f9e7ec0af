"""For what a native library was built: read from its file before it is loaded.

One built for another torch can load without complaint and then call wrong virtual functions.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Final

from lightning_smp.native.recipe import built_for

__all__ = ["mismatch", "read_record"]

_RECORD: Final = re.compile(rb"lightning_smp build record\{([^{}\0]*)\}")
_WORDS: Final = {"torch": "torch", "cuda": "CUDA", "python": "Python"}


def read_record(path: Path) -> dict[str, str]:
    """Return the build record in the library `path`; empty where it has none."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return {}
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _RECORD.search(content)
            text = found.group(1).decode() if found else ""
    return dict(item.split("=", 1) for item in text.split("|") if "=" in item)


def mismatch(path: Path) -> str | None:
    """Return why the library `path` must not be loaded here, naming both sides; None if it may."""
    record = read_record(path)
    different = [
        f"{_WORDS[name]} {record.get(name, 'unknown')}, not {here}"
        for name, here in built_for().items()
        if record.get(name) != here
    ]
    if not different:
        return None
    return (
        f"{path} was built for {'; '.join(different)}. It is not loaded. Install again with "
        f"`pip install --no-build-isolation --force-reinstall --no-deps`, or set "
        f"LIGHTNING_SMP_JIT=1."
    )
