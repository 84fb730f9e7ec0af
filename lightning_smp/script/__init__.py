"""The `smp` API for scripts: SageMaker's names over the engine of the Lightning strategy."""
