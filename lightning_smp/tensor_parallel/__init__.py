"""Tensor parallelism: one module's weights and work split over the ranks of a tensor group."""
