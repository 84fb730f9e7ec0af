"""Placed execution: units, outer code, programs, the engine."""
