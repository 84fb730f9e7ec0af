"""The environment variables of the native parts."""

import pytest

from lightning_smp.errors import ConfigError
from lightning_smp.native.switches import is_jit_on, is_native_on, throttle_limit


@pytest.mark.parametrize(
    ("text", "limit"), [(None, 8), ("", 8), ("-1", -1), ("1", 1), (" 3 ", 3), ("1000", 1000)]
)
def test_limit(text: str | None, limit: int) -> None:
    environ = {} if text is None else {"SMP_NCCL_THROTTLE_LIMIT": text}
    assert throttle_limit(environ) == limit


@pytest.mark.parametrize("text", ["0", "-2", "eight", "2.5", "8,"])
def test_bad_limit_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"SMP_NCCL_THROTTLE_LIMIT='{text}': .* from 1 on, or -1"
    ):
        throttle_limit({"SMP_NCCL_THROTTLE_LIMIT": text})


def test_flags() -> None:
    assert is_native_on({})
    assert not is_native_on({"LIGHTNING_SMP_NATIVE": "0"})
    assert not is_jit_on({})
    assert is_jit_on({"LIGHTNING_SMP_JIT": "1"})
    with pytest.raises(ConfigError, match="LIGHTNING_SMP_JIT='yes': it must be 0 or 1"):
        is_jit_on({"LIGHTNING_SMP_JIT": "yes"})
