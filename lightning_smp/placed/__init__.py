"""Placed execution: the step runs on every rank, its values have a home."""
