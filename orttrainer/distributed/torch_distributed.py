"""Collectives over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, final

import torch
import torch.distributed as dist

from orttrainer.distributed.collective import Collective, check_mean_operand, check_root, communication_failed
from orttrainer.distributed.in_step import in_step
from orttrainer.distributed.launch import device_of_rank
from orttrainer.distributed.torch_waiting import (
    calls,
    end_unfinished,
    rank_that_ended,
    store_of_group,
    tell_the_end,
)
from orttrainer.distributed.waiting import ENDED
from orttrainer.errors import DistributedError

logger = logging.getLogger("orttrainer.distributed")


def open_torch(local_rank: int | None, device: str | torch.device) -> TorchCollective:
    """Return the collective of the initialised group, or of a new one from torchrun's variables.

    Raises:
        DistributedError: torch has no torch.distributed, or the ranks do not find each other.
    """
    if not dist.is_available():
        raise DistributedError(
            "this torch was built without torch.distributed: install another build of torch, "
            "or launch with mpiexec (pip install orttrainer[mpi])."
        )
    if not dist.is_initialized():
        join_group(backend_for(device))
    _end_with_what_is_unfinished()
    return TorchCollective(local_rank_or_guess(local_rank, dist.get_rank()), device)


def backend_for(device: str | torch.device) -> str:
    """Return the backend for tensors on a device: gloo, and NCCL where it is needed and there.

    A group for CUDA has gloo too: names and shapes are compared, and CPU buffers broadcast,
    without a detour over the GPU.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "gloo"
    return "cpu:gloo,cuda:nccl" if dist.is_available() and dist.is_nccl_available() else "gloo"


def local_rank_or_guess(local_rank: int | None, rank: int) -> int:
    """Return the launcher's local rank; without one, rank % number of GPUs."""
    if local_rank is not None:
        return local_rank
    return rank % max(1, torch.cuda.device_count())


def join_group(backend: str, **rendezvous: Any) -> None:
    """Make the default group and leave it at the end of the process.

    Args:
        backend: what `backend_for` returned.
        rendezvous: `store`, `rank` and `world_size`; by default torchrun's variables are used.

    Raises:
        DistributedError: the ranks do not find each other in time.
    """
    try:
        dist.init_process_group(backend, **rendezvous)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"cannot make a torch.distributed group ({backend}): {error}. Check that every rank "
            f"was started and that MASTER_ADDR and MASTER_PORT can be reached from all of them."
        ) from error
    atexit.register(_leave_group)


@functools.cache
def _end_with_what_is_unfinished() -> None:
    """At the end of the process; before the group is left, which would wait for it, and lets what others call fail."""
    atexit.register(end_unfinished)
    atexit.register(tell_the_end, store_of_group(), dist.get_rank())


def _leave_group() -> None:
    # After an uncaught exception the other ranks may be in a collective, and leaving waits for
    # them: then just end, and the launcher ends them. (Python sets sys.last_value just then.)
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
        # A thread of gloo may hold the last tensor a moment longer; one that lets it go when the interpreter has ended
        # aborts the process (https://github.com/pytorch/pytorch/pull/179291).
        time.sleep(0.2)


@final
class TorchCollective(Collective):
    """Collectives over the default group of torch.distributed.

    A tensor on a device for which the group has no backend is staged through one for which it has.
    """

    def __init__(self, local_rank: int, device: str | torch.device) -> None:
        self.rank, self.size, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank
        # "cpu:gloo,cuda:nccl" -> {"cpu": "gloo", "cuda": "nccl"}
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        self._cpu = backends.get("cpu") not in (None, "nccl")
        self._nccl = backends.get("cuda") == "nccl"
        # NCCL refuses two ranks on one GPU, and only at its first call.
        on_cuda = torch.device(device).type == "cuda"
        if on_cuda and self._nccl and self._cpu and self._shares_a_gpu(device):
            logger.info("ranks share a GPU, which NCCL refuses: CUDA tensors go through gloo")
            self._nccl = False

    def all_reduce_mean_(self, tensor: torch.Tensor) -> None:
        check_mean_operand(tensor)
        tensor = tensor.detach()
        staged = self._staged(tensor, summed=True)
        with self._restated("all_reduce_mean_"):
            # NCCL scales before the sum: no overflow.
            work = dist.all_reduce(staged, dist.ReduceOp.AVG if staged.is_cuda else dist.ReduceOp.SUM, async_op=True)
            calls.wait(
                work, "all_reduce_mean_", f"averages the gradients of a step ({staged.numel()} numbers)", staged.is_cuda
            )
            if not staged.is_cuda:
                staged.div_(self.size)
            self._finish(tensor, staged)

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        check_root(root, self.size)
        tensor = tensor.detach()
        staged = self._staged(tensor.contiguous())
        with self._restated("broadcast_"):
            # As bytes: the backends do not know every dtype.
            work = dist.broadcast(staged.view(-1).view(torch.uint8), src=root, async_op=True)
            calls.wait(work, "broadcast_", "shares the weights of another trainer", staged.is_cuda)
            self._finish(tensor, staged)

    def all_gather_object(self, obj: Any) -> list:
        with self._restated("all_gather_object"):
            own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
            sizes = [int(size) for size in self._gather(torch.tensor([own.numel()], device="cpu"))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
            padded[: own.numel()] = own
            gathered = self._gather(padded)
        return [pickle.loads(one[:size].numpy().tobytes()) for one, size in zip(gathered, sizes)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which have one shape."""
        staged = self._staged(tensor)
        gathered = [torch.empty_like(staged) for _ in range(self.size)]
        work = dist.all_gather(gathered, staged, async_op=True)
        calls.wait(
            work, "all_gather_object", "makes the first step of another trainer, or failed in one", staged.is_cuda
        )
        return [one.cpu() for one in gathered]

    def barrier(self) -> None:
        # Not dist.barrier: with NCCL it guesses a device, and returns before the others arrive.
        self.all_gather_object(None)

    def tell_left(self, why: str) -> None:
        calls.tell_left(why)

    def _staged(self, tensor: torch.Tensor, summed: bool = False) -> torch.Tensor:
        """Return the tensor, or a copy of it where the group has a backend for it.

        Args:
            summed: the CPU is going to add: then 16-bit floats become float32.
        """
        if tensor.is_cuda and not self._nccl:
            tensor = tensor.cpu()
        elif not tensor.is_cuda and not self._cpu:
            tensor = tensor.cuda()
        if summed and not tensor.is_cuda and tensor.dtype != torch.float64:
            tensor = tensor.float()
        return tensor

    def _finish(self, tensor: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy a result back and wait until it is there: ONNX Runtime has its own CUDA stream."""
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)
        for device in {t.device for t in (tensor, staged) if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _shares_a_gpu(self, device: str | torch.device) -> bool:
        """Whether any two ranks have the same GPU; every rank gets the same answer."""
        index = device_of_rank(device, self).index or 0  # "cuda" of a lone rank
        gpu = (socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid))
        return len(set(self.all_gather_object(gpu))) < self.size

    @contextlib.contextmanager
    def _restated(self, call: str) -> Iterator[None]:
        """A call, in step with the other ranks; torch's error becomes ours, with the rank and the call in it."""
        with in_step(self):
            try:
                yield
            except DistributedError:
                raise
            except (RuntimeError, ValueError) as error:
                if not dist.is_initialized():
                    raise DistributedError(
                        f"{call} failed on rank {self.rank} of {self.size}: the group of torch.distributed was destroyed. "
                        "Call destroy_process_group() after the last step of all trainers."
                    ) from error
                if (ended := rank_that_ended()) is not None:
                    raise DistributedError(
                        f"{call} failed on rank {self.rank} of {self.size}: rank {ended} {ENDED}"
                    ) from error
                raise communication_failed(self, call, error) from error
