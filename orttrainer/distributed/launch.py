"""Decide, from the environment, which rank this process is and who carries its tensors.

`read_launch` is the decision, a pure function of the environment variables; `find_collective`
looks at what already runs in this process, and opens what was decided.
"""

from __future__ import annotations

import operator
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orttrainer.distributed.collective import Collective, SingleProcess
from orttrainer.errors import DistributedError, InvalidArgumentError

if TYPE_CHECKING:
    import torch

_HOW_TO_LAUNCH = (
    "Launch the script with `mpiexec -n {size} python script.py` (pip install orttrainer[mpi]) "
    "or `torchrun --nproc-per-node {size} script.py`; rank and size are then found by themselves."
)


@dataclass(frozen=True)
class Launch:
    """How this process was started, and as which rank of how many.

    Attributes:
        kind: "single" (one process), "torch" (torch.distributed) or "mpi" (mpi4py).
        rank: 0 to size - 1.
        size: the world size.
        local_rank: number among the processes of this machine; None if the launcher does not say.
        source: where this was read, for messages.
    """

    kind: Literal["single", "torch", "mpi"]
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    source: str = "no launcher"

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.source})"


def find_collective(
    world_rank: int | None = None,
    world_size: int | None = None,
    device: str | torch.device = "cpu",
    *,
    cuda_aware_mpi: bool = False,
) -> Collective:
    """Find out which rank this process is and return its collective.

    The first of these that says more than one process decides: an initialised torch.distributed
    group (used as it is, whatever its size); torchrun's variables; the variables of an MPI
    launcher; an mpi4py that the script has imported. Otherwise there is one process.

    Under MPI, CUDA tensors travel over NCCL where torch has it and every rank has a GPU of its
    own; otherwise through host memory, or as they are if `cuda_aware_mpi`.

    Args:
        world_rank: the rank that the caller believes in; None, or 0, is "not said".
        world_size: the world size that the caller believes in; None, or 1, is "not said".
            As in the legacy trainer the launcher wins, with a warning, where they differ.
        device: where the tensors of the training run are.
        cuda_aware_mpi: the MPI library takes CUDA pointers: give it CUDA tensors, without NCCL.

    Raises:
        InvalidArgumentError: `world_rank` or `world_size` is no integer or out of range.
        DistributedError: `world_size` > 1, but nothing launched more than one process; the
            variables contradict each other; mpi4py or its MPI library is missing, or is another
            MPI than the launcher's; the ranks cannot reach each other.

    Example: `collective = find_collective(device="cuda")`
    """
    world_rank, world_size = _checked_world(world_rank, world_size)
    launch = find_launch()
    _compare_with_launch(launch, world_rank, world_size)
    if launch.kind == "torch":
        from orttrainer.distributed.torch_distributed import open_torch

        return open_torch(launch.local_rank, device)
    if launch.kind == "mpi":
        from orttrainer.distributed.mpi import open_mpi

        return open_mpi(launch, device, cuda_aware=cuda_aware_mpi)
    return SingleProcess()


def find_launch() -> Launch:
    """Say which rank this process is, by what runs in it already and by its environment. Opens nothing.

    Raises:
        DistributedError: the variables contradict each other.
    """
    launch = _initialised_group() or read_launch(os.environ)
    return (_initialised_mpi() or launch) if launch.kind == "single" else launch


def device_of_rank(device: str | torch.device, collective: Collective) -> torch.device:
    """Return the device that a rank should use for `device`: "cuda" means its own GPU.

    A device with an index, a CPU, and a single process keep what they say. A rank that has called
    `torch.cuda.set_device` keeps that GPU; any other takes number local_rank % device count.

    Example: `device_of_rank("cuda", collective)` is `cuda:1` on the second rank of a machine.
    """
    import torch

    device = torch.device(device)
    if device.type != "cuda" or device.index is not None or collective.size == 1:
        return device
    if not torch.cuda.is_available():
        return device  # whoever creates a tensor there says what is missing
    own = torch.cuda.current_device() or collective.local_rank % torch.cuda.device_count()
    return torch.device("cuda", own)


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Decide from environment variables alone; a launch of one process is "single".

    Raises:
        DistributedError: a variable is no number, a rank is out of range, torchrun's variables
            are incomplete, or torchrun's and MPI's contradict each other.
    """
    by_torch, by_mpi = _read_torchrun(environ), _read_mpi(environ)
    differ = (by_torch.rank, by_torch.size) != (by_mpi.rank, by_mpi.size)
    if by_torch.size > 1 and by_mpi.size > 1 and differ:
        raise DistributedError(
            f"the environment contradicts itself: {by_torch} but {by_mpi}. "
            f"Unset the variables of the launcher that did not start this process."
        )
    if by_torch.size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if not missing:
            return by_torch
        if by_mpi.size == 1:
            raise DistributedError(
                f"{by_torch} but {' and '.join(missing)} not set, so the ranks cannot meet. "
                f"Launch with torchrun, which sets them, or unset RANK and WORLD_SIZE."
            )
    return by_mpi if by_mpi.size > 1 else Launch("single")


# Rank, size and rank on this machine, as each launcher names them.
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")  # MPICH, Intel MPI, Microsoft MPI
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def _read_torchrun(environ: Mapping[str, str]) -> Launch:
    return _read_variables("torch", environ, *_TORCHRUN) or Launch("single")


def _read_mpi(environ: Mapping[str, str]) -> Launch:
    said = [_read_variables("mpi", environ, *names) for names in (_OPEN_MPI, _MPICH)]
    said = [launch for launch in said if launch is not None]
    # A batch script that Slurm runs sees SLURM_NTASKS too, and is one process all the same: a
    # sign that srun connects its tasks (a PMI) is needed, and no nearer launcher may speak.
    if not said and any(name in environ for name in ("PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE")):
        said = [_read_variables("mpi", environ, *_SLURM) or Launch("single")]
    return next((launch for launch in said if launch.size > 1), Launch("single"))


def _read_variables(
    kind: Literal["torch", "mpi"], environ: Mapping[str, str], rank: str, size: str, local: str
) -> Launch | None:
    """Read one launcher's variables; None where rank or size is not set."""
    if not environ.get(rank) or not environ.get(size):
        return None
    launch = Launch(
        kind,
        rank=_number(environ, rank),
        size=_number(environ, size),
        local_rank=_local_rank(environ, rank, local),
        source=f"{rank}={environ[rank]}, {size}={environ[size]}",
    )
    if launch.rank >= launch.size:
        raise DistributedError(
            f"{rank}={launch.rank} is out of range for {size}={launch.size}: "
            f"unset both, or launch with mpiexec or torchrun, which set them."
        )
    return launch


def _local_rank(environ: Mapping[str, str], rank: str, local: str) -> int | None:
    if environ.get(local):
        return _number(environ, local)
    # srun with a PMI gives PMI_RANK without a local rank. Processes that mpiexec started inside
    # a batch script all inherit the script's SLURM_PROCID=0: theirs says nothing.
    if environ.get("SLURM_LOCALID") and environ.get("SLURM_PROCID") == environ[rank]:
        return _number(environ, "SLURM_LOCALID")
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise DistributedError(
            f"environment variable {name}={text!r} is not a whole number: "
            f"unset it, or launch with mpiexec or torchrun, which set it."
        )
    return int(text)


def _initialised_group() -> Launch | None:
    """The torch.distributed group that the script has made, if any."""
    if "torch" not in sys.modules:  # nobody can have made one, and importing torch is slow
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = _local_rank_of(rank, size, os.environ)
    return Launch("torch", rank, size, local_rank, "the initialised torch.distributed group")


def _initialised_mpi() -> Launch | None:
    """An MPI that the script has imported, whose launcher sets variables unknown to us."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    return Launch("mpi", rank, size, None, "mpi4py's COMM_WORLD") if size > 1 else None


def _local_rank_of(rank: int, size: int, environ: Mapping[str, str]) -> int | None:
    """The local rank from the launcher that says the same rank and size, if one does."""
    for names in (_TORCHRUN, _OPEN_MPI, _MPICH, _SLURM):
        if environ.get(names[0]) == str(rank) and environ.get(names[1]) == str(size):
            return _local_rank(environ, names[0], names[2])
    return None


def _checked_world(world_rank: Any, world_size: Any) -> tuple[int, int]:
    """Return the caller's rank and size, the legacy defaults (0, 1) for what is not said.

    Which ranks exist is checked only against a size that was said: `world_rank=1` alone is
    compared with the launcher later.
    """
    try:
        rank = 0 if world_rank is None else operator.index(world_rank)
        size = 1 if world_size is None else operator.index(world_size)
    except TypeError as error:
        raise InvalidArgumentError(
            f"world_rank={world_rank!r} and world_size={world_size!r} must be whole numbers."
        ) from error
    if size < 1:
        raise InvalidArgumentError(f"world_size={size} must be at least 1.")
    if rank < 0 or (size > 1 and rank >= size):
        raise InvalidArgumentError(
            f"world_rank={rank} is out of range for world_size={size}: ranks are 0 to {size - 1}."
        )
    return rank, size


def _compare_with_launch(launch: Launch, world_rank: int, world_size: int) -> None:
    """Hold the caller's rank and size against the launcher's, which win with a warning."""
    if launch.size == 1 and world_size > 1:
        raise DistributedError(
            f"world_size={world_size}, but this is {launch}. " + _HOW_TO_LAUNCH.format(size=world_size)
        )
    if launch.size == 1 and world_rank > 0:
        raise InvalidArgumentError(
            f"world_rank={world_rank} is out of range: this is {launch}. " + _HOW_TO_LAUNCH.format(size=world_rank + 1)
        )
    for name, given, default, launched in (
        ("world_rank", world_rank, 0, launch.rank),
        ("world_size", world_size, 1, launch.size),
    ):
        if given not in (default, launched):
            warnings.warn(
                f"{name}={given} is not what the launcher says: using {launch}. Leave {name} out.",
                UserWarning,
                stacklevel=4,
            )
