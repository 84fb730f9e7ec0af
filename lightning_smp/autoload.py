"""Registers "smp" in each Lightning namespace: now if it is imported, else once it will be.

Imports neither torch nor lightning: it runs inside `import torch`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["NAMESPACES", "STRATEGY_NAME", "PostImportFinder", "arm"]

# Two copies of one code base with unrelated classes; the `lightning` wheel installs both.
NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
STRATEGY_NAME = "smp"


def arm() -> None:
    """Registers the strategy in every namespace that is imported, or as soon as it is.

    Repeated calls change nothing.
    """
    waiting = {
        f"{namespace}.strategies": partial(_register_if_imported, namespace)
        for namespace in NAMESPACES
        if not _register_if_imported(namespace)
    }
    is_armed = any(type(finder) is PostImportFinder for finder in sys.meta_path)
    if waiting and not is_armed:
        sys.meta_path.insert(0, PostImportFinder(waiting))


class PostImportFinder:
    """Lets the other finders find certain modules, and calls a function after each has run.

    Args:
        waiting: functions by full name of the module.
    """

    def __init__(self, waiting: Mapping[str, Callable[[], object]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a waiting module with the other finders (see `importlib.abc.MetaPathFinder`)."""
        after = self._waiting.get(fullname)
        if after is None:
            return None
        spec = self._find_with_others(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _call_after_exec(spec.loader, after)
        return spec

    def _find_with_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


def _call_after_exec(loader: Any, after: Callable[[], object]) -> None:
    """Makes this one loader call a function when it has executed its module."""
    run_module = loader.exec_module

    def exec_and_call(module: ModuleType) -> None:
        del loader.exec_module  # back to the class's own method: the loader stays as it was
        run_module(module)
        after()

    # An attribute of the instance, not a wrapper: the module's loader keeps its type and abilities.
    loader.exec_module = exec_and_call


def _register_if_imported(namespace: str) -> bool:
    strategies = sys.modules.get(f"{namespace}.strategies")
    registry = getattr(strategies, "StrategyRegistry", None)
    if registry is None:
        return False
    if STRATEGY_NAME not in registry:
        registry.register(
            STRATEGY_NAME,
            partial(_create_strategy, namespace),
            description="Pipeline, tensor and data parallelism for an unmodified module",
        )
    return True


def _create_strategy(namespace: str, **arguments: Any) -> object:
    from lightning_smp.register import strategy_class

    return strategy_class(namespace)(**arguments)
