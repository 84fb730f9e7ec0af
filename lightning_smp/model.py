"""`smp.model`: the module that clients look `DistributedModel` up in."""

from lightning_smp.script.model import DistributedModel

__all__ = ["DistributedModel"]
