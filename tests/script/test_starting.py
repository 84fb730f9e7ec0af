"""How a script's processes find each other, and whose configuration counts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lightning_smp as smp
from lightning_smp.config.sources import resolve_config
from lightning_smp.errors import ConfigError
from lightning_smp.script.launch import Place, find_place, rendezvous
from tests.support.launch import run_ranks_expect_failure

ROOT = Path(__file__).parents[2]


def test_place_is_that_of_the_launcher() -> None:
    assert find_place({}) == Place(0, 1, 0, 1)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_place(torchrun) == Place(3, 4, 1, 2)
    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }  # fmt: skip
    assert find_place(open_mpi) == Place(5, 8, 1, 4)
    assert find_place({"PMI_RANK": "1", "PMI_SIZE": "2"}) == Place(1, 2, 1, 2)
    assert find_place(open_mpi).as_environment()["LOCAL_WORLD_SIZE"] == "4"
    for name, wrong in (("RANK", "x"), ("RANK", "4"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "-1")):
        with pytest.raises(ConfigError, match=f"variable {name} is '{wrong}'"):
            find_place({**torchrun, name: wrong})


def test_rendezvous_needs_no_fixed_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert "store" in rendezvous(Place(0, 1, 0, 1), environ={})
    given = {"MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    assert rendezvous(Place(1, 2, 1, 2), environ=given)["init_method"] == "env://"
    port = rendezvous(Place(1, 2, 1, 2), 7, {"MASTER_ADDR": "host"})
    assert port["init_method"] == "tcp://host:7"
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        rendezvous(Place(1, 2, 1, 2), environ={})
    with pytest.raises(ConfigError, match="torchrun"):
        rendezvous(Place(1, 2, 0, 1), environ={"PMIX_NAMESPACE": "job"})
    (tmp_path / "other").mkdir()
    assert "store" in rendezvous(Place(1, 2, 1, 2), environ={"PMIX_NAMESPACE": "job@1"})
    folder = next(path for path in tmp_path.iterdir() if path.name != "other")
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="somebody else"):
        rendezvous(Place(1, 2, 1, 2), environ={"PMIX_NAMESPACE": "job@1"})


def test_ddp_port_is_where_the_ranks_meet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be opened"):
            rendezvous(Place(0, 2, 0, 2), port, {})
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: rendezvous(Place(rank, 2, rank, 2), port, {}), range(2)))
    stores: list[Any] = [arguments["store"] for arguments in found]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    assert [f"0100007F:{port:04X}", "0A"] in [[f[1], f[3]] for f in listening]  # loopback only
    with pytest.raises(ConfigError, match="does not know where"):
        rendezvous(Place(0, 2, 0, 2), 0, {})


@pytest.mark.parametrize(
    "config",
    [
        {"batch_source": "leader", "partitions": 2},
        {"drop_last": False},
        {"timeline_every_n_steps": 5, "partitions": 2},
    ],
)
def test_what_only_a_trainer_can_do_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="for the Lightning strategy"):
        smp.init(config)
    assert not smp.is_initialized()


def test_the_launcher_wins_over_the_script() -> None:
    environ = {"SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2, "microbatches": 4})}
    script = {"microbatches": 8, "pipeline": "simple", "static_mode": True}
    found = resolve_config(script, environ=environ, environment_wins=True)
    assert (found.partitions, found.microbatches, found.pipeline) == (2, 4, "simple")
    assert resolve_config(script, environ=environ).microbatches == 8


_SCRIPT = """
import torch
import lightning_smp as smp
assert not smp.is_initialized()
try:
    smp.rank()
except smp.SMPError as error:
    assert "smp.init()" in str(error)
smp.init()
torch.manual_seed(0)
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
@smp.step
def train(x):
    loss = model(x).pow(2).sum()
    model.backward(loss)
    return loss
loss = train(torch.ones(4, 4)).reduce_sum()
optimizer.step()
assert smp.size() == 2 and smp.pp_size() == 2
print(f"rank {smp.rank()}: {loss:.4f}\\n", end="")
"""


def test_starts_under_mpirun_without_a_port(tmp_path: Path) -> None:
    """Two processes with Open MPI's variables, which tell no port."""
    said = _run_two(_SCRIPT, tmp_path)
    assert [code for code, _, _ in said] == [0, 0], said
    losses = [out.split(": ")[1] for _, out, _ in said]
    assert losses[0] == losses[1]
    assert said[0][1].startswith("rank 0: ")


def _run_two(text: str, tmp_path: Path, *runner: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of two processes."""
    script = tmp_path / "script.py"
    script.write_text(text)
    processes = [
        subprocess.Popen(
            [sys.executable, *runner, str(script)],
            env={
                "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path),
                "OMP_NUM_THREADS": "1", "PMIX_NAMESPACE": "prterun-1@1",
                "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "SM_HP_MP_PARAMETERS": '{"partitions": 2, "microbatches": 2, "ddp": true}',
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=90) for process in processes]
    return [
        (process.returncode, out, error)
        for process, (out, error) in zip(processes, said, strict=True)
    ]


_FAILING = _SCRIPT.replace(
    "    model.backward(loss)",
    "    if smp.rank() == 1 and not smp.is_tracing() and x.shape[0] == 1:\n"
    "        raise ValueError('boom')\n"
    "    model.backward(loss)",
).replace("optimizer.step()", "train(torch.ones(2, 4))")


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    """Nobody waits for a rank that has failed, and all say why."""
    start_s = time.monotonic()
    said = _run_two(_FAILING, tmp_path)
    assert [code for code, _, _ in said] != [0, 0]
    assert all(code != 0 for code, _, _ in said)
    assert all("boom" in error for _, _, error in said), said
    assert time.monotonic() - start_s < 60


_LEAVING = _SCRIPT.replace(
    "optimizer.step()", "smp.rank() == 1 and exit(3)\nfor _ in range(99): train(torch.ones(4, 4))"
)


def test_a_script_that_one_rank_ends_early(tmp_path: Path) -> None:
    said = _run_two(_LEAVING, tmp_path, "-m", "lightning_smp.run")
    assert said[1][0] == 3
    assert said[0][0] not in (0, 3)
    assert "rank 1 ended its script (exit code 3) after train" in said[0][2]


def fails_on_one_rank(rank: int, size: int) -> None:
    import torch

    import lightning_smp as smp

    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]))

    @smp.step
    def train(x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    train(torch.ones(4, 4))
    if rank == 0:
        train(torch.zeros(4, 4))
    else:
        train(torch.ones(4, 4))


def test_different_batches_in_one_replica_are_an_error_everywhere() -> None:
    report = run_ranks_expect_failure(fails_on_one_rank, 2)
    for outcome in report.outcomes:
        assert outcome.error is not None
        assert "there is one on rank 0 and a different one on rank 1" in outcome.error
        assert "smp.dp_rank()" in outcome.error
        assert "use_distributed_sampler" not in outcome.error  # an option of the Trainer
