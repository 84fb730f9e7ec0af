"""What a verification runs, as the file that its processes read."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_smp.errors import ConfigError

__all__ = ["Job", "find", "path_of"]

_FILE = "job.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One verification.

    Attributes:
        module: "package.module:name" of what makes the LightningModule.
        data: the same for what makes its training data, or "" for the module's own loader.
        config: SMP configuration keys of the layout.
        world_size: processes of the layout.
        steps: training steps.
        seed: of all random generators.
        double: whether floating-point parameters and batches are turned to float64.
        accelerator: as in Lightning.
        path: places where modules are imported from.
    """

    module: str
    data: str
    config: dict[str, Any]
    world_size: int
    steps: int
    seed: int
    double: bool
    accelerator: str
    path: list[str] = field(default_factory=lambda: list(sys.path))

    def write(self, folder: Path) -> None:
        """Writes the job into a folder."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        """The job of a folder."""
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))


def find(path: str) -> Callable[[], Any]:
    """The object named "package.module:name".

    Raises:
        ConfigError: there is none, or it cannot be called.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{path!r} names nothing to verify; write it as package.module:name.")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{path!r} cannot be imported ({error}). It must be importable from the folder where "
            "the command runs."
        ) from error
    if not callable(found):
        raise ConfigError(f"{path!r} is a {type(found).__name__}; it must be a class or function.")
    return found  # type: ignore[no-any-return]


def path_of(made: Callable[[], Any] | str | None) -> str:
    """The "package.module:name" by which other processes find a class or function.

    Raises:
        ConfigError: they could not: it is local, a lambda, or of the script itself.
    """
    if made is None or isinstance(made, str):
        return made or ""
    module, name = getattr(made, "__module__", ""), getattr(made, "__qualname__", "")
    if module in ("", "__main__") or not name or "<" in name:
        raise ConfigError(
            f"{made!r} cannot be found by the processes that verify() starts. Put it at the top "
            "level of a module that can be imported (not the script itself), without arguments."
        )
    return f"{module}:{name}"
