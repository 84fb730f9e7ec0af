"""The kinds of values a key can have: what is accepted, the rule in words, the nearest value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["Choice", "Flag", "Kind", "NameStyles", "Number", "Text", "Whole"]

# Degrees and counts travel as int64 and are multiplied with each other.
_MAX_INT: Final = 2**31 - 1


class Kind(Protocol):
    """A kind of values."""

    @property
    def rule(self) -> str:
        """What a value must be, as a noun phrase."""
        ...

    def accepts(self, value: object) -> bool:
        """Tell whether `value` obeys the rule."""
        ...

    def nearest(self, value: object) -> object:
        """Return the valid value closest to what was probably meant; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An int (not a bool, not 2.0, not "2") of at least `minimum` and below 2**31."""

    minimum: int = 1

    @property
    def rule(self) -> str:
        """The rule in words."""
        return f"an int >= {self.minimum} and < 2**31"

    def accepts(self, value: object) -> bool:
        """Tell whether the value is an int in range."""
        return type(value) is int and self.minimum <= value <= _MAX_INT

    def nearest(self, value: object) -> object:
        """Return the number meant, moved into range."""
        number = _as_float(value)
        if number is None:
            return None
        return int(min(max(number, self.minimum), _MAX_INT))


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number between `low` and `high`; `low` itself is excluded with `above_low`."""

    low: float
    high: float = math.inf
    above_low: bool = False

    @property
    def rule(self) -> str:
        """The rule in words."""
        if math.isinf(self.high):
            return f"a finite number {'>' if self.above_low else '>='} {self.low:g}"
        return f"a number between {self.low:g} and {self.high:g}"

    def accepts(self, value: object) -> bool:
        """Tell whether the value is an int or float in range."""
        if type(value) is int:
            value = _as_float(value)
        if type(value) is not float or not math.isfinite(value):
            return False
        return self.low <= value <= self.high and not (self.above_low and value == self.low)

    def nearest(self, value: object) -> object:
        """Return the number meant, moved into range where the range has an end there."""
        number = _as_float(value)
        if number is None:
            return None
        number = min(max(number, self.low), self.high)
        return number if self.accepts(number) else None


@dataclass(frozen=True, slots=True)
class Flag:
    """True or False (not 1, not "true")."""

    @property
    def rule(self) -> str:
        """The rule in words."""
        return "True or False"

    def accepts(self, value: object) -> bool:
        """Tell whether the value is a bool."""
        return type(value) is bool

    def nearest(self, value: object) -> object:
        """Return the flag meant by 0, 1, "true", "off" and the like."""
        if isinstance(value, int | float):
            return bool(value) if value in (0, 1) else None
        if not isinstance(value, str):
            return None
        words = {"true": True, "1": True, "yes": True, "on": True}
        words |= {"false": False, "0": False, "no": False, "off": False}
        return words.get(value.strip().lower())


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some words."""

    words: tuple[str, ...]

    @property
    def rule(self) -> str:
        """The rule in words."""
        return "one of " + ", ".join(f'"{word}"' for word in self.words)

    def accepts(self, value: object) -> bool:
        """Tell whether the value is one of the words."""
        return type(value) is str and value in self.words

    def nearest(self, value: object) -> object:
        """Return the most similar word."""
        if not isinstance(value, str):
            return None
        lowered = {word.lower(): word for word in self.words}
        close = difflib.get_close_matches(value[:100].lower(), lowered, n=1)
        return lowered[close[0]] if close else None


@dataclass(frozen=True, slots=True)
class Text:
    """Any text."""

    @property
    def rule(self) -> str:
        """The rule in words."""
        return "a text"

    def accepts(self, value: object) -> bool:
        """Tell whether the value is a str."""
        return type(value) is str

    def nearest(self, value: object) -> object:
        """Return nothing: there is no nearest text."""
        return None


@dataclass(frozen=True, slots=True)
class NameStyles:
    """A word, or a mapping from name patterns to styles."""

    word: str

    @property
    def rule(self) -> str:
        """The rule in words."""
        return f'"{self.word}" or a mapping from name patterns to styles'

    def accepts(self, value: object) -> bool:
        """Tell whether the value is the word or a mapping of texts that is not empty."""
        if isinstance(value, Mapping):
            return bool(value) and all(type(item) is str for pair in value.items() for item in pair)
        return type(value) is str and value == self.word

    def nearest(self, value: object) -> object:
        """Return the word."""
        return self.word


def _as_float(value: object) -> float | None:
    """Return the number that an int, a float or a text stands for; None for anything else."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
