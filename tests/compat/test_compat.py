"""The old import paths, the runner, and CUDA devices that are the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lightning_smp
from lightning_smp import compat
from lightning_smp.errors import ConfigError, SMPError, UnsupportedError
from lightning_smp.run import parse_parameters, prepare

API = "smdistributed.modelparallel.torch"
CONTRACT = {
    "smdistributed.modelparallel": ["__version__"],
    API: ["init", "save", "load", "state", "rank", "model", "amp", "checkpoint"],
    f"{API}.amp": ["GradScaler"],
    f"{API}.nn": ["FusedLayerNorm"],
    f"{API}.optimizers": ["FusedLAMB", "FusedLamb", "FusedNovoGrad", "FusedAdam"],
    f"{API}.patches.checkpoint": ["checkpoint", "checkpoint_sequential"],
    f"{API}.state_mod": ["state"],
    f"{API}.model": ["DistributedModel"],
    f"{API}.utils": ["get_distribution_axis", "rmsg"],
    f"{API}.exceptions": ["SMPError"],
    "smdistributed.modelparallel.backend.exceptions": ["SMPError"],
    "smdistributed.modelparallel.test.torch.utils": ["dump_model", "verify"],
}


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install(cpu_devices=False)
    yield
    compat.remove()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("path", list(CONTRACT))
def test_import_contract(path: str) -> None:
    assert importlib.util.find_spec(path) is not None
    module = importlib.import_module(path)
    for name in CONTRACT[path]:
        assert getattr(module, name) is not None


@pytest.mark.usefixtures("installed")
def test_names_are_ours() -> None:
    smp = importlib.import_module(API)
    assert smp.state is importlib.import_module(f"{API}.state_mod").state is lightning_smp.state
    assert smp.save is lightning_smp.save
    assert smp.SMPError is SMPError
    assert importlib.import_module("smdistributed.modelparallel").__version__ == compat.VERSION
    with pytest.raises(AttributeError, match=r"smp-compat\.md"):
        _ = smp.no_such_name
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{API}.no_such_module")
    assert importlib.util.find_spec("smdistributed.dataparallel") is None
    utilities = importlib.import_module("smdistributed.modelparallel.test.torch.utils")
    for refused in (utilities.dump_model, utilities.verify):
        with pytest.raises(UnsupportedError, match="never documented"):
            refused(None)


def test_nothing_is_left_or_installed() -> None:
    assert importlib.util.find_spec("smdistributed") is None
    compat.install(cpu_devices=False)
    compat.install(cpu_devices=False)
    assert importlib.util.find_spec("smdistributed") is not None
    compat.remove()
    assert importlib.util.find_spec("smdistributed") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(API)


def test_another_package_of_that_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smdistributed", type(sys)("smdistributed"))
    with pytest.raises(SMPError, match="before the first import"):
        compat.install(cpu_devices=False)


def test_cuda_devices_are_the_cpu() -> None:
    before = (torch.device, torch.Tensor.to, torch.nn.Module.cuda, torch.cuda.set_device)
    compat.install(cpu_devices=True)
    try:
        cpu = torch.zeros(1).device
        torch.cuda.set_device(torch.device("cuda", 3))
        torch.cuda.synchronize()
        assert torch.cuda.current_device() == 0
        assert torch.device("cuda", 1) == torch.device("cuda:2") == torch.device("cuda") == cpu
        assert torch.device("meta").type == "meta"
        assert isinstance(cpu, torch.device)
        assert isinstance(torch.device("cuda"), torch.device)
        assert not isinstance("cuda", torch.device)
        tensor = torch.ones(2)
        assert tensor.cuda() is tensor
        assert tensor.to("cuda:1").device == tensor.to(device="cuda").device == cpu
        assert tensor.to(torch.float64).dtype == torch.float64
        linear = torch.nn.Linear(2, 2)
        assert next(linear.cuda().to("cuda").parameters()).device == cpu
        file = io.BytesIO()
        torch.save({"device": torch.device("cuda")}, file)
        file.seek(0)
        assert torch.load(file, weights_only=True)["device"] == cpu
    finally:
        compat.remove()
    after = (torch.device, torch.Tensor.to, torch.nn.Module.cuda, torch.cuda.set_device)
    assert after == before


def test_parameters_on_the_command_line() -> None:
    environ: dict[str, str] = {}
    text = "partitions=2,ddp=True,memory_weight=0.5,pipeline=simple,ddp_port=None"
    arguments = ["--lr", "1", "--mp_parameters", text, "--mp_parameters_not", "x"]
    assert prepare(arguments, environ) == ["--lr", "1", "--mp_parameters_not", "x"]
    assert json.loads(environ["SM_HP_MP_PARAMETERS"]) == {
        "partitions": 2, "ddp": True, "memory_weight": 0.5, "pipeline": "simple", "ddp_port": None,
    }  # fmt: skip
    assert json.loads(environ["SM_FRAMEWORK_PARAMS"])["sagemaker_mpi_enabled"] is True
    kept = {"SM_HP_MP_PARAMETERS": '{"microbatches": 4}', "RANK": "0"}
    assert prepare(['--mp_parameters={"partitions": 8}', "x"], kept) == ["x"]
    assert kept == {"SM_HP_MP_PARAMETERS": '{"microbatches": 4}', "RANK": "0"}
    assert parse_parameters('{"microbatches": 4}') == {"microbatches": 4}
    for wrong in ("partitions", "{x"):
        with pytest.raises(ConfigError, match="mp_parameters"):
            parse_parameters(wrong)


SCRIPT = """
import json, sys
import helper
import torch
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import __version__
torch.cuda.set_device(torch.device("cuda", 0))
print(json.dumps([__name__, sys.argv[1:], __version__, str(torch.device("cuda")), helper.word]))
"""


def test_a_script_runs_with_its_old_imports(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("word = 'beside the script'\n")
    arguments = [str(script), "--epochs", "3", "--mp_parameters", "partitions=1"]
    result = subprocess.run(
        [sys.executable, "-m", "lightning_smp.run", *arguments],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = ["__main__", ["--epochs", "3"], compat.VERSION, device, "beside the script"]
    assert json.loads(result.stdout) == expected


def test_no_script() -> None:
    from lightning_smp.run import main

    with pytest.raises(ConfigError, match=r"script\.py"):
        main([])
