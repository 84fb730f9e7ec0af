"""Where configuration values come from, and which one wins."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

from lightning_smp.config.keys import Support
from lightning_smp.config.problems import Problem, config_error, shown
from lightning_smp.config.rules import cross_problems
from lightning_smp.config.schema import KEYS, SMPConfig

__all__ = ["UNSET", "Unset", "resolve_config"]

_log = logging.getLogger(__name__)
_VARIABLES: Final = ("SMP_CONFIG", "SM_HP_MP_PARAMETERS")
_ALIASES: Final = {alias: name for name, key in KEYS.items() for alias in key.aliases}


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(slots=True)
class _Collected:
    """Values gathered from the sources so far, where each came from, and what was wrong."""

    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def resolve_config(
    config: SMPConfig | Mapping[str, object] | None = None,
    arguments: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    environment_wins: bool = False,
) -> SMPConfig:
    """Return the configuration made of all sources; a later source wins, key by key.

    The order: defaults; the environment variable SMP_CONFIG, or else SM_HP_MP_PARAMETERS (a
    JSON object, or the path of a JSON file); `config`; `arguments`.

    Args:
        config: a dict of keys, or a configuration, of which the values other than the defaults
            count.
        arguments: explicit arguments; those that are None or `UNSET` do not count.
        environ: environment variables.
        environment_wins: the environment comes after `config`, as in SageMaker's scripts, where
            the launcher's values override those of the script.

    Raises:
        ConfigError: lists every problem of every source: the key, the value met, the rule and
            the smallest fix.
    """
    collected = _Collected()
    if environment_wins:
        _add_config(collected, config)
    _add_environment(collected, environ)
    if not environment_wins:
        _add_config(collected, config)
    given = {k: v for k, v in (arguments or {}).items() if v is not None and v is not UNSET}
    _add(collected, given, "the arguments")
    problems = collected.problems + _value_problems(collected)
    if problems:
        raise config_error(problems)
    result = SMPConfig(**collected.values)  # type: ignore[arg-type]
    _notice_keys_without_effect(result)
    return result


def _value_problems(collected: _Collected) -> list[Problem]:
    found = [
        problem
        for name, value in collected.values.items()
        for problem in KEYS[name].problems(value, collected.origins[name])
    ]
    return found + cross_problems(collected.values, KEYS, collected.origins)


def _notice_keys_without_effect(config: SMPConfig) -> None:
    for name, key in KEYS.items():
        if key.support is Support.NO_EFFECT and getattr(config, name) != key.default:
            _log.warning("%s is accepted and has no effect: %s.", name, key.about)


def _add_environment(collected: _Collected, environ: Mapping[str, str]) -> None:
    name = next((name for name in _VARIABLES if environ.get(name)), None)
    if name is None:
        return
    try:
        values = _read_json(environ[name])
    except (OSError, ValueError, RecursionError) as error:
        rule = f"it must be a JSON object or the path of a file with one ({error})"
        fix = f"""Use {name}='{{"microbatches": 4}}', for example."""
        collected.problems.append(Problem(name, shown(environ[name]), rule, fix))
        return
    _add(collected, values, f"the environment variable {name}")


def _read_json(text: str) -> dict[str, object]:
    """Return the object in a JSON text, or in the file that the text names."""
    if not text.lstrip().startswith(("{", "[")):
        text = Path(text).read_text(encoding="utf-8")
    values = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    if not isinstance(values, dict):
        raise ValueError(f"met a {type(values).__name__}")
    return values


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _add_config(collected: _Collected, config: object) -> None:
    origin = "the config argument"
    if isinstance(config, SMPConfig):
        values = config.as_dict()
        _add(collected, {k: v for k, v in values.items() if v != KEYS[k].default}, origin)
    elif isinstance(config, Mapping):
        _add(collected, config, origin)
    elif config is not None:
        rule = "it must be a dict or an SMPConfig"
        fix = "Use config={'microbatches': 4}, for example."
        collected.problems.append(Problem("config", shown(config), rule, fix))


def _add(collected: _Collected, values: Mapping[str, object], origin: str) -> None:
    """Add one source; its keys may be aliases."""
    seen: dict[str, str] = {}
    for name, value in values.items():
        canonical = _ALIASES.get(name, name) if isinstance(name, str) else ""
        if canonical not in KEYS:
            collected.problems.append(_unknown(name, value, origin))
            continue
        other = seen.setdefault(canonical, name)
        if other != name and shown(values[other]) != shown(value):
            collected.problems.append(_twice(name, other, values, origin))
            continue
        collected.values[canonical] = value
        collected.origins[canonical] = origin


def _twice(name: str, other: str, values: Mapping[str, object], origin: str) -> Problem:
    rule = f"it is another name of {other}, which is {shown(values[other])}"
    return Problem(name, shown(values[name]), rule, f"Remove {name}.", origin)


def _unknown(name: object, value: object, origin: str) -> Problem:
    near = next(_near(name), None)
    fix = f"Did you mean {near}?" if near else "Remove it; docs/configuration.md lists the keys."
    label = name if isinstance(name, str) and name.isprintable() else shown(name)
    return Problem(label[:80], shown(value), "there is no such key", fix, origin)


def _near(name: object) -> Iterator[str]:
    if isinstance(name, str):
        yield from difflib.get_close_matches(name[:80].lower(), [*KEYS, *_ALIASES], n=1)
