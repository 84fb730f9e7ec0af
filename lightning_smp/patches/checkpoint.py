"""`smp.patches.checkpoint`: the module that clients import activation checkpointing from."""

from lightning_smp.script.activation import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
