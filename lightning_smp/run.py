"""Runs a script written for SageMaker's library: `python -m lightning_smp.run script.py args`.

Several processes: `torchrun --nproc-per-node=4 -m lightning_smp.run script.py args`, or mpirun.
In the script `smdistributed.modelparallel` is this library, CUDA devices are the CPU where torch
finds no GPU, and the argument `--mp_parameters` that SageMaker appends is taken away.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Final

from lightning_smp.compat import install
from lightning_smp.errors import ConfigError
from lightning_smp.failure import ended_script
from lightning_smp.process_state import state

__all__ = ["main"]

_ARGUMENT: Final = "--mp_parameters"
_PARAMETERS: Final = "SM_HP_MP_PARAMETERS"
_FRAMEWORK: Final = "SM_FRAMEWORK_PARAMS"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script that the command line names, as `__main__`.

    Args:
        arguments: the script and its arguments; None takes them from the command line.

    Raises:
        ConfigError: no script was given, or `--mp_parameters` cannot be read.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0].startswith("-"):
        raise ConfigError(
            "lightning_smp.run needs a script: python -m lightning_smp.run script.py [arguments]."
        )
    script, arguments = given[0], prepare(given[1:], os.environ)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    install()
    state.end = ended_script()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        state.end = ended_script(end)
        raise


def prepare(arguments: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """Returns the arguments without `--mp_parameters`; enters what is missing in `environ`.

    The variables win over the argument. Where the parameters name `partitions`, clients that ask
    whether they run under SageMaker's launcher are told so.

    Raises:
        ConfigError: `--mp_parameters` cannot be read.
    """
    kept, text = _without_parameters(arguments)
    if text is not None and not environ.get(_PARAMETERS):
        environ[_PARAMETERS] = json.dumps(parse_parameters(text))
    if "partitions" in environ.get(_PARAMETERS, ""):
        environ.setdefault(_FRAMEWORK, json.dumps({"sagemaker_mpi_enabled": True}))
    return kept


def parse_parameters(text: str) -> dict[str, object]:
    """Reads `key=value,key=value`, or a JSON object.

    Raises:
        ConfigError: it is neither.
    """
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"{_ARGUMENT} is no JSON object ({error}): {text[:200]!r}.") from None
    found: dict[str, object] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(
                f"{_ARGUMENT} has {item!r}; it must be key=value,key=value. Use "
                f"{_ARGUMENT} partitions=2,microbatches=4, for example."
            )
        found[name.strip()] = _value(value.strip())
    return found


def _without_parameters(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    kept: list[str] = []
    text = None
    supply = iter(arguments)
    for argument in supply:
        if argument == _ARGUMENT:
            text = next(supply, "")
        elif argument.startswith(f"{_ARGUMENT}="):
            text = argument.partition("=")[2]
        else:
            kept.append(argument)
    return kept, text


def _value(text: str) -> object:
    """A number, truth value or None as Python or JSON writes it; else the text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    main()
