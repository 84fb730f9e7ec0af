"""What is wrong with a configuration, and the one error that reports all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smp.errors import ConfigError

__all__ = ["Problem", "config_error", "shown"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule.

    Attributes:
        key: the key, or the source for problems of a whole source.
        met: the value met, as text.
        rule: what the value must be, starting with "it ...".
        fix: the smallest change that works, as a sentence.
        origin: where the value came from; empty when it was given directly.
    """

    key: str
    met: str
    rule: str
    fix: str
    origin: str = ""

    def __str__(self) -> str:
        place = f" (from {self.origin})" if self.origin else ""
        return f"{self.key} = {self.met}{place}: {self.rule}. {self.fix}"


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """Return the error that lists all problems."""
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"Invalid SMP configuration, {count}:{lines}")


def shown(value: object) -> str:
    """Return a value as short text; never fails (an int may have too many digits to print)."""
    try:
        text = repr(value)
    except Exception as error:  # a broken __repr__ must not hide the other problems
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."
