"""What is known about one key: its kind, its support, its aliases, its meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from lightning_smp.config.kinds import Kind
from lightning_smp.config.problems import Problem, shown

__all__ = ["Key", "Support", "key", "keys_of"]

_METADATA: Final = "smp_key"


class Support(Enum):
    """What setting a key does today."""

    YES = "yes"
    PLANNED = "not yet"  # refused unless it has its default
    NO_EFFECT = "no effect"  # accepted with a notice: the meaning was never documented


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration.

    Attributes:
        kind: what values are accepted.
        about: the meaning, as one sentence without its end.
        default: the default value; None may stand for "derived" and is then accepted.
        support: what setting it does today.
        instead: for a planned key, what to do now.
        aliases: other names of the key.
        name: set when the schema is read.
    """

    kind: Kind
    about: str
    default: object
    support: Support = Support.YES
    instead: str = ""
    aliases: tuple[str, ...] = ()
    name: str = ""

    @property
    def rule(self) -> str:
        """What a value must be, as a noun phrase."""
        return self.kind.rule + (" or None" if self.default is None else "")

    def accepts(self, value: object) -> bool:
        """Tell whether a value obeys the rule of the key alone."""
        return (value is None and self.default is None) or self.kind.accepts(value)

    def problems(self, value: object, origin: str = "") -> Iterator[Problem]:
        """Yield what is wrong with a value, looking at this key alone."""
        if not self.accepts(value):
            nearest = self.kind.nearest(value)
            use = self.default if nearest is None else nearest
            yield self.problem(value, f"it must be {self.rule}", self._use(use), origin)
        elif self.support is Support.PLANNED and value != self.default:
            rule = f"it is not supported yet and must be {self.default!r}"
            yield self.problem(value, rule, self.instead or self._use(self.default), origin)

    def problem(self, value: object, rule: str, fix: str, origin: str = "") -> Problem:
        """Return a problem of this key."""
        return Problem(self.name, shown(value), rule, fix, origin)

    def _use(self, value: object) -> str:
        return f"Use {self.name}={value!r}."


def key(kind: Kind, default: Any, about: str, **options: Any) -> Any:
    """Return a dataclass field that carries a `Key`; options are those of `Key`."""
    spec = Key(kind, about, default, **options)
    return dataclasses.field(default=default, metadata={_METADATA: spec})


def keys_of(schema: Any) -> dict[str, Key]:
    """Return the keys of a dataclass whose fields were all made by `key`."""
    return {
        field.name: dataclasses.replace(field.metadata[_METADATA], name=field.name)
        for field in dataclasses.fields(schema)
    }
