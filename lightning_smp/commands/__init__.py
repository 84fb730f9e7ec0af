"""The commands of `python -m lightning_smp`: one module each, with `main(arguments) -> int`."""
