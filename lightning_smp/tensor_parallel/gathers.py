"""Says once where the user's code needs logits as a whole."""

from __future__ import annotations

import logging
import sys
import sysconfig
from types import FrameType
from typing import Any

from lightning_smp.placed.functions import function_name

__all__ = ["GatherReport"]

_log = logging.getLogger(__name__)


class GatherReport:
    """Remembers which uses have been reported; the copies of a module share one."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def note(self, name: str, func: Any) -> None:
        """Report that `func` gathers the logits of the head `name`, the first time at a line."""
        operation, line = function_name(func), _line_of_user()
        if (operation, line) in self._seen:
            return
        self._seen.add((operation, line))
        _log.warning(
            "%s needs all logits of %r at once, so they are gathered over the tensor-parallel "
            "ranks (%s). F.cross_entropy and what usually leads to it is computed without.",
            operation,
            name,
            line,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherReport:
        return self


def _line_of_user() -> str:
    """The innermost line outside of this package, torch and Python itself."""
    frame: FrameType | None = sys._getframe(1)
    outside = None
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        path = frame.f_code.co_filename
        if name.split(".")[0] not in ("torch", "lightning_smp") and not path.startswith(_STDLIB):
            outside = f"{path}:{frame.f_lineno}"
            break
        frame = frame.f_back
    return outside or "called from C++"


_STDLIB = (sysconfig.get_paths()["stdlib"] + "/contextlib", "<")
