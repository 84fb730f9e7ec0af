"""`python -m lightning_smp COMMAND ...`."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

__all__ = ["main"]

# Name, and what it does. Each is a module of lightning_smp.commands, imported when it is called.
_COMMANDS: Final = {
    "plan": "degrees, partition, schedule and memory of a run, without GPUs",
    "verify": "whether a layout trains your module as one device does",
    "info": "what is built and used on this machine, and why not",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first of `arguments` names; returns the exit status."""
    name = arguments[0] if arguments else "--help"
    if name in _COMMANDS:
        run = import_module(f"lightning_smp.commands.{name}").main
        return int(run(list(arguments[1:])))
    is_help = name in ("-h", "--help")
    lines = [] if is_help else [f"python -m lightning_smp: there is no command {name!r}."]
    lines += ["usage: python -m lightning_smp COMMAND ...", ""]
    lines += [f"  {command:8} {what}" for command, what in _COMMANDS.items()]
    (sys.stdout if is_help else sys.stderr).write("\n".join(lines) + "\n")
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
