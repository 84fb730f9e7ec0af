"""Tests of lightning_smp; sub-folders mirror the package."""
