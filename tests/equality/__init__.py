"""Equality of the smp strategy with one device: a zoo of modules and a harness to compare."""
