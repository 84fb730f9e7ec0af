"""Benchmarks of lightning_smp against its peers; each prints a table."""
