"""Proof of equality: a module trained on one device and under a layout, compared."""

from lightning_smp.verifying.launch import verify
from lightning_smp.verifying.report import Report

__all__ = ["Report", "verify"]
