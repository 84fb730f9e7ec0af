"""`SMPStrategy` for programs that import `pytorch_lightning` instead of `lightning.pytorch`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_smp.register import SMPStrategy

__all__ = ["SMPStrategy"]


def __getattr__(name: str) -> object:
    """Builds the class at its first use (PEP 562)."""
    if name != "SMPStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_smp.register import strategy_class

    return strategy_class("pytorch_lightning")
