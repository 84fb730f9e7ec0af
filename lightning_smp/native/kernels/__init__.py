"""Operators with a CUDA kernel in the built extension and a reference in plain torch elsewhere."""
