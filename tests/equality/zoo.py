"""All cases of the zoo by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.equality import (
    zoo_autograd,
    zoo_basic,
    zoo_huggingface,
    zoo_inplace,
    zoo_python,
    zoo_text,
    zoo_training,
)
from tests.equality.case import Case

__all__ = ["CASES"]

CASES: Mapping[str, Case] = MappingProxyType(
    {
        entry.name: entry
        for part in (
            zoo_basic,
            zoo_text,
            zoo_huggingface,
            zoo_python,
            zoo_inplace,
            zoo_autograd,
            zoo_training,
        )
        for entry in part.CASES
    }
)
