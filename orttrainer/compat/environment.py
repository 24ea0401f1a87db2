"""The functions by which a script set up its process: seed, GPU, and rank."""

from __future__ import annotations

import os
import warnings

from orttrainer import seed
from orttrainer.distributed import find_launch
from orttrainer.distributed.torch_distributed import local_rank_or_guess
from orttrainer.errors import DistributedError, InvalidArgumentError, RuntimeNotFoundError

# How many ranks a machine has, as torchrun, Open MPI, MPICH and Intel MPI, and Slurm name it.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def set_seed(value: int) -> None:
    """`onnxruntime.set_seed`: seed ONNX Runtime's random operators, and the dropout of trainers made from now on.

    Raises:
        InvalidArgumentError: `value` is no integer of 64 bits.
    """
    from orttrainer import runtime

    seed.set_seed(value)
    # Not by its public name, which is this function.
    runtime.load()
    from onnxruntime.capi import onnxruntime_pybind11_state

    onnxruntime_pybind11_state.set_seed(value)


def set_cuda_device_id(device_id: int) -> None:
    """Let "cuda" mean this GPU, in torch as well. Without a GPU it has no effect, and warns.

    Raises:
        InvalidArgumentError: `device_id` is no number of a GPU.
    """
    import torch

    if isinstance(device_id, bool) or not isinstance(device_id, int) or device_id < 0:
        raise InvalidArgumentError(f"set_cuda_device_id takes the number of a GPU, an int >= 0; got {device_id!r}")
    if not torch.cuda.is_available():
        warnings.warn(f"set_cuda_device_id({device_id}) has no effect: torch sees no CUDA GPU", stacklevel=2)
        return
    if device_id >= (count := torch.cuda.device_count()):
        raise InvalidArgumentError(f"set_cuda_device_id({device_id}): there are {count} CUDA devices")
    torch.cuda.set_device(device_id)


def set_cuda_mem_limit(limit: int) -> None:
    """Bytes of GPU memory for ONNX Runtime's arena, in trainers made from now on.

    Raises:
        InvalidArgumentError: `limit` is no number of bytes.
    """
    from orttrainer import runtime

    if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise InvalidArgumentError(f"set_cuda_mem_limit takes a number of bytes, an int > 0; got {limit!r}")
    runtime.cuda_defaults["gpu_mem_limit"] = str(limit)


def set_arena_extend_strategy(strategy) -> None:
    """How ONNX Runtime's arena on the GPU grows: an `ArenaExtendStrategy`, in trainers made from now on.

    Raises:
        InvalidArgumentError: `strategy` is none.
    """
    from orttrainer import runtime

    name = getattr(strategy, "name", None)
    if name not in ("kNextPowerOfTwo", "kSameAsRequested"):
        raise InvalidArgumentError(
            f"set_arena_extend_strategy takes ArenaExtendStrategy.kNextPowerOfTwo or .kSameAsRequested; got {strategy!r}"
        )
    runtime.cuda_defaults["arena_extend_strategy"] = name


def get_mpi_context_world_rank() -> int:
    """This process's rank, as mpiexec or torchrun says; 0 without a launcher."""
    return find_launch().rank


def get_mpi_context_world_size() -> int:
    """The number of processes; 1 without a launcher."""
    return find_launch().size


def get_mpi_context_local_rank() -> int:
    """This process's number among those of its machine; where the launcher does not say, rank % number of GPUs."""
    launch = find_launch()
    return local_rank_or_guess(launch.local_rank, launch.rank) if launch.size > 1 else 0


def get_mpi_context_local_size() -> int:
    """The number of processes on this machine.

    Raises:
        DistributedError: the launcher does not say.
    """
    launch = find_launch()
    if launch.size == 1:
        return 1
    for name in _LOCAL_SIZES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    raise DistributedError(
        f"this is {launch}, which does not say how many processes this machine has. Launch with mpiexec or torchrun, "
        f"or set LOCAL_WORLD_SIZE."
    )


def is_ortmodule_available() -> bool:
    """Whether the installed ONNX Runtime has what ORTModule needs: one that has its own answer is asked instead."""
    return False


def has_cuda() -> bool:
    """Whether torch and the installed ONNX Runtime can both use a GPU."""
    import torch

    from orttrainer import runtime

    try:
        runtime.check_device(torch.device("cuda", 0))
    except (RuntimeNotFoundError, InvalidArgumentError):
        return False
    return True
