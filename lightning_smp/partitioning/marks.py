"""Stages given by hand in code: marks on modules, and the assignment they amount to. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

from torch import nn

from lightning_smp.partitioning.atoms import Atom

__all__ = ["mark_created", "mark_tree", "marked_stages"]

_MARK: Final = "_smp_stage"


@contextmanager
def mark_created(stage: int) -> Iterator[None]:
    """Marks every module that this thread creates in the body, copies of modules included.

    Contexts nest: the innermost is the last to mark.
    """
    thread = threading.get_ident()

    def marking(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            if threading.get_ident() == thread:
                vars(module)[_MARK] = stage
            return result

        return method

    # Every module passes through one of these two: the second when it is copied.
    created, copied = nn.Module.__init__, nn.Module.__setstate__
    nn.Module.__init__ = marking(created)  # type: ignore[method-assign]
    nn.Module.__setstate__ = marking(copied)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = created  # type: ignore[method-assign]
        nn.Module.__setstate__ = copied  # type: ignore[method-assign]


def mark_tree(module: nn.Module, stage: int) -> None:
    """Marks a module and everything that is below it now."""
    for inner in module.modules():
        vars(inner)[_MARK] = stage


def marked_stages(root: nn.Module, atoms: tuple[Atom, ...], default: int | None) -> dict[str, int]:
    """Returns the stage by module name that the marks of a tree amount to.

    A module without a mark does not inherit its parent's: it goes to the default stage, unless all
    that is inside it is marked, or it is inside an atom, which is never divided.

    Args:
        root: The module tree.
        atoms: Its atoms.
        default: Stage of what has no mark.
    """
    stages: dict[str, int] = {
        name: vars(module)[_MARK] for name, module in root.named_modules() if _MARK in vars(module)
    }
    for atom in atoms:
        inside = any(name.startswith(f"{atom.name}.") for name in stages)
        if atom.name not in stages and not inside and not atom.is_stateless and default is not None:
            stages[atom.name] = default
    return stages
