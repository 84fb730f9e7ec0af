"""The environment variables of the native parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from lightning_smp.errors import ConfigError

__all__ = ["DEFAULT_LIMIT", "NO_LIMIT", "is_jit_on", "is_native_on", "throttle_limit"]

DEFAULT_LIMIT: Final = 8
NO_LIMIT: Final = -1

_LIMIT: Final = "SMP_NCCL_THROTTLE_LIMIT"
_NATIVE: Final = "LIGHTNING_SMP_NATIVE"
_JIT: Final = "LIGHTNING_SMP_JIT"


def throttle_limit(environ: Mapping[str, str] = os.environ) -> int:
    """Return the most collectives of one group in flight, or -1 for any number.

    Raises:
        ConfigError: SMP_NCCL_THROTTLE_LIMIT is neither -1 nor a positive whole number.
    """
    text = environ.get(_LIMIT, "").strip()
    if not text:
        return DEFAULT_LIMIT
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if limit == NO_LIMIT or limit > 0:
        return limit
    raise ConfigError(
        f"{_LIMIT}={text!r}: it is the most collectives of one process group in flight, a whole "
        f"number from 1 on, or {NO_LIMIT} for no bound. Unset it for {DEFAULT_LIMIT}."
    )


def is_native_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether built libraries are to be used: LIGHTNING_SMP_NATIVE is not 0."""
    return _flag(_NATIVE, environ, default=True)


def is_jit_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is missing is to be built at first use: LIGHTNING_SMP_JIT is 1."""
    return _flag(_JIT, environ, default=False)


def _flag(name: str, environ: Mapping[str, str], *, default: bool) -> bool:
    text = environ.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name}={text!r}: it must be 0 or 1, or unset for {int(default)}.")
    return default if not text else text == "1"
