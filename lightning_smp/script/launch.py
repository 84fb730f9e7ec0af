"""Who this process is, as its launcher tells: torchrun, mpirun, or none."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch._C import _distributed_c10d as torch_c10d

from lightning_smp.errors import ConfigError

__all__ = ["Place", "find_place", "rendezvous"]

_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS: Final = (
    _TORCHRUN,
    (  # Open MPI
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and its relatives
)  # fmt: skip
_LOOPBACK: Final = "127.0.0.1"
_JOBS: Final = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDI_CONTROL_FD")
"""What tells one run of mpirun from another."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process among those of its job.

    Attributes:
        rank: its global number.
        size: number of processes.
        local_rank: its number on its node.
        local_size: number of processes on its node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def as_environment(self) -> dict[str, str]:
        """The variables that torchrun sets."""
        values = (self.rank, self.size, self.local_rank, self.local_size)
        return dict(zip(_TORCHRUN, map(str, values), strict=True))


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Reads the launcher's variables; without a launcher there is one process.

    Raises:
        ConfigError: a variable that is no number, or a rank outside of the world.
    """
    for names in _LAUNCHERS:
        if names[0] in environ and names[1] in environ:
            size = _number(environ, names[1], 1)
            rank = _number(environ, names[0], 0, below=size)
            local_size = _number(environ, names[3], 1, default=size)
            local_rank = _number(environ, names[2], 0, default=rank % local_size)
            return Place(rank, size, local_rank, local_size)
    return Place(0, 1, 0, 1)


def _number(
    environ: Mapping[str, str], name: str, low: int, *, below: int | None = None,
    default: int | None = None,
) -> int:  # fmt: skip
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal() or not low <= int(text) < (below or 2**31):
        rule = f"a number from {low}" + ("" if below is None else f" to {below - 1}")
        raise ConfigError(
            f"smp.init(): the environment variable {name} is {text!r}; it must be {rule}. Start "
            "with torchrun or mpirun, which set it."
        )
    return int(text)


def rendezvous(
    place: Place, port: int | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, object]:
    """How the processes find each other: arguments of `init_process_group`.

    Args:
        place: this process.
        port: a port that the configuration names, 0 for none; the launcher's counts if it names
            one.
        environ: environment variables.

    Raises:
        ConfigError: nothing tells where.
    """
    if place.size == 1 and "MASTER_PORT" not in environ:
        return {"store": torch_c10d.HashStore(), "rank": 0, "world_size": 1}
    address, given = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", port or None)
    if address is not None and given is not None:
        method = "env://" if "MASTER_PORT" in environ else f"tcp://{address}:{given}"
        return {"init_method": method, "rank": place.rank, "world_size": place.size}
    if given is not None and place.local_size == place.size:
        store = _loopback_store(place, int(given))
        return {"store": store, "rank": place.rank, "world_size": place.size}
    job = next((environ[name] for name in _JOBS if name in environ), None)
    if place.local_size == place.size and job is not None:
        store = torch_c10d.FileStore(str(_job_file(job)), place.size)
        return {"store": store, "rank": place.rank, "world_size": place.size}
    raise ConfigError(
        f"smp.init(): rank {place.rank} of {place.size} does not know where the others are. Start "
        "with torchrun, or set MASTER_ADDR and MASTER_PORT for all ranks, for example with "
        "mpirun -x MASTER_ADDR=host -x MASTER_PORT=port."
    )


def _loopback_store(place: Place, port: int) -> torch_c10d.Store:
    """A store that only this node can reach; torch's own would listen on all its interfaces."""
    listener = None
    if place.rank == 0:
        try:
            listener = socket.create_server((_LOOPBACK, port)).detach()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"smp.init(): port {port} cannot be opened ({error}). Give another ddp_port or "
                "MASTER_PORT, or none under torchrun and mpirun on one node."
            ) from None
    return torch_c10d.TCPStore(
        _LOOPBACK, port, place.size, listener is not None, master_listen_fd=listener
    )


def _job_file(job: str) -> Path:
    """A file of this user's that all processes of one job on this node find."""
    folder = Path(tempfile.gettempdir()) / f"lightning_smp_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} belongs to somebody else, or others may write to it. Remove it, or set "
            "MASTER_ADDR and MASTER_PORT."
        )
    name = "".join(c if c.isalnum() else "_" for c in job)
    return folder / f"job_{name}"
