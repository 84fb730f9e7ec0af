"""A model deployed over the ranks of a job: partition, weights, engine, runs of steps."""
