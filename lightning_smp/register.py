"""The strategy class of each Lightning namespace.

`lightning.pytorch` and `pytorch_lightning` are two copies of one code base: a strategy derived from
one is refused by the other's Trainer, so each namespace has a class of its own.
"""

import importlib
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_smp.autoload import NAMESPACES
from lightning_smp.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

    from lightning_smp.lightning.strategy import StrategyCore

    class SMPStrategy(StrategyCore, ParallelStrategy):
        """What a type checker sees of the class that is built at run time."""


__all__ = ["SMPStrategy", "strategy_class"]

# Where the class of a namespace is found by name (pickle, LightningCLI, YAML).
_HOME_MODULE = {
    "lightning.pytorch": "lightning_smp",
    "pytorch_lightning": "lightning_smp.pytorch_lightning",
}


def strategy_class(namespace: str | None = None) -> "type[SMPStrategy]":
    """Returns the strategy class for Trainers of `namespace`.

    Args:
        namespace: "lightning.pytorch" or "pytorch_lightning"; by default the first one installed.

    Raises:
        ConfigError: the namespace is unknown or not installed.
    """
    if namespace is None:
        namespace = _default_namespace()
    if namespace not in NAMESPACES:
        raise ConfigError(
            f"strategy_class({namespace!r}): no such Lightning namespace; "
            f"pass one of {', '.join(map(repr, NAMESPACES))}"
        )
    if not _is_installed(namespace):
        raise ConfigError(
            f"strategy_class({namespace!r}): the package is not installed; "
            f"run `pip install {namespace.partition('.')[0]}`"
        )
    return _build(namespace)


@cache
def _build(namespace: str) -> "type[SMPStrategy]":
    from lightning_smp.lightning.strategy import make_strategy_class

    cls: type[SMPStrategy] = make_strategy_class(importlib.import_module(namespace))
    cls.__module__ = _home_module(namespace)
    cls.__name__ = cls.__qualname__ = "SMPStrategy"
    return cls


def _home_module(namespace: str) -> str:
    return _HOME_MODULE["lightning.pytorch" if namespace == _default_namespace() else namespace]


def _default_namespace() -> str:
    installed = [namespace for namespace in NAMESPACES if _is_installed(namespace)]
    return installed[0] if installed else NAMESPACES[0]


def _is_installed(namespace: str) -> bool:
    return namespace in sys.modules or find_spec(namespace.partition(".")[0]) is not None


def _warn_if_other_is_in_use(namespace: str) -> None:
    if namespace in sys.modules or "pytorch_lightning" not in sys.modules:
        return
    warnings.warn(
        "lightning_smp.SMPStrategy belongs to lightning.pytorch, but this program has imported "
        'pytorch_lightning, whose Trainer refuses it ("invalid strategy name"). Use '
        'Trainer(strategy="smp"), or `from lightning_smp.pytorch_lightning import SMPStrategy`.',
        stacklevel=4,  # the line that asked lightning_smp for the name
    )


def __getattr__(name: str) -> object:
    """Builds `SMPStrategy`, the default namespace's class, at its first use (PEP 562)."""
    if name != "SMPStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _warn_if_other_is_in_use(_default_namespace())
    return strategy_class()
