"""Two ranks of a worker script under each launcher."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from marks import slow

ROOT = pathlib.Path(__file__).parent.parent
WORKERS = ROOT / "tests" / "workers"
TIMEOUT = 300  # seconds; a run takes 20. A hang is a failure, not a long test.

LAUNCH_VARIABLES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_RANK", "PMI_SIZE", "PMI_FD", "MPI_LOCALRANKID", "PMIX_RANK", "PMIX_NAMESPACE"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
]

# As root, and with more ranks than cores, Open MPI wants to be told.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip


def mpiexec(ranks: int = 2) -> list[str]:
    """The beginning of a command that runs a script on so many ranks, with the mpiexec of this environment."""
    pytest.importorskip("mpi4py")
    beside = pathlib.Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec: pip install mpich")  # `make test` installs it
    return [found, "-n", str(ranks), sys.executable]


def torchrun(ranks: int = 2) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ["--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", *where]


LAUNCHERS = {"mpiexec": mpiexec, "torchrun": torchrun}
# A launch takes a quarter of a minute of both cores; `test_data_parallel.py` has both launchers always.
ONE_LAUNCHER = ["mpiexec", slow("torchrun")]


def launch(launcher: str, worker: str, *arguments: str, timeout: float = TIMEOUT) -> subprocess.CompletedProcess:
    """Run `tests/workers/<worker>` on two ranks."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES} | ENVIRONMENT
    return subprocess.run(
        [*LAUNCHERS[launcher](), str(WORKERS / worker), *arguments],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def results(launcher: str, worker: str, folder: pathlib.Path, *arguments: str) -> list[dict]:
    """What each of two ranks left in `folder`."""
    result = launch(launcher, worker, str(folder), *arguments)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
