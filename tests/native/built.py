"""The native library of these tests: they are skipped without it, but not where it must be."""

import os
from types import ModuleType

import pytest

from lightning_smp.native import load_backend


def backend_module() -> ModuleType:
    """Return the loaded module of the throttled backend, or skip the test that asks.

    Raises:
        AssertionError: LIGHTNING_SMP_BUILD=1 says that it was built, but it is not there.
    """
    loaded = load_backend()
    if loaded.module is None:
        assert os.environ.get("LIGHTNING_SMP_BUILD") != "1", loaded.reason
        pytest.skip(loaded.reason)
    return loaded.module
