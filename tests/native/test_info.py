"""`python -m lightning_smp`, and its command `info`."""

from __future__ import annotations

import pytest
import torch

from lightning_smp.__main__ import main
from lightning_smp.native import load_backend, load_kernels


def test_info_tells_what_is_used_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert torch.__version__ in lines["torch"]
    for name, loaded in (("throttled backend", load_backend()), ("CUDA kernels", load_kernels())):
        assert str(loaded.path or loaded.reason) in lines[name]
    assert lines["throttle limit"].strip() == "8"


def test_info_names_a_bad_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_NCCL_THROTTLE_LIMIT", "many")
    assert main(["info"]) == 2
    assert "SMP_NCCL_THROTTLE_LIMIT='many'" in capsys.readouterr().out


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "info" in capsys.readouterr().out
    assert main(["no-such-command"]) == 2
    assert "there is no command 'no-such-command'" in capsys.readouterr().err
