"""Waiting for other ranks of MPI that may never come: they have ended, or wait for this one in another call."""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass
from typing import Any

from orttrainer.distributed.in_step import why_left
from orttrainer.distributed.waiting import ENDED, SAME_CALLS, wait
from orttrainer.errors import DistributedError

# Tags of messages; every MPI has them up to 32767. A rank that has ended waits in MPI_Finalize for the others, and they for
# it in their next call, for ever: so it tells them.
_ENDED = 31_413
_OBJECT = 31_414
_LEFT = 31_415

_sending: list = []  # requests, which keep what they send
_left: dict[int, str] = {}  # ranks that have left a call in its midst, and why


@dataclass(frozen=True)
class _Absent:
    """What a rank that waits in a call on tensors sends in place of an object."""


def why_tensors_never_come(comm: Any) -> str | None:
    """Why a call on tensors will not be done: a rank has left one, or ended, or waits in `gather_objects`."""
    if left := _why_left(comm):
        return left
    if ended := [rank for rank in range(comm.Get_size()) if comm.Iprobe(source=rank, tag=_ENDED)]:
        return f"rank {ended[0]} {ENDED}"
    if waiting := _waiting_for_an_object(comm):
        return f"rank {waiting[0]} makes the first step of another trainer, or failed in one. {SAME_CALLS}"
    return None


def tell_absence(comm: Any) -> None:
    """Tell the ranks that wait in `gather_objects` that this one will not come."""
    for rank in _waiting_for_an_object(comm):
        _sending.append(comm.isend(_Absent(), dest=rank, tag=_OBJECT))


def tell_left(comm: Any, why: str) -> None:
    """Tell all ranks that this one has left a call in its midst, and makes no further one."""
    own = comm.Get_rank()
    _sending.extend(comm.isend(why, dest=rank, tag=_LEFT) for rank in range(comm.Get_size()) if rank != own)


def _why_left(comm: Any) -> str | None:
    """What another rank has told so; None if none has."""
    for rank in range(comm.Get_size()):
        if comm.Iprobe(source=rank, tag=_LEFT):
            _left[rank] = comm.recv(source=rank, tag=_LEFT)
    return next((why_left(f"rank {rank}", why) for rank, why in _left.items()), None)


def gather_objects(comm: Any, obj: Any) -> list:
    """The objects of all ranks, in rank order, by messages that no call on tensors can take for its own.

    Raises:
        DistributedError: a rank has left a call, or ended, or waits in a call on tensors.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    _sending[:] = [request for request in _sending if not request.Test()]
    _sending.extend(comm.isend(obj, dest=other, tag=_OBJECT) for other in range(size) if other != rank)
    objects = [obj if other == rank else _object_of(comm, other) for other in range(size)]
    for other, received in enumerate(objects):
        if isinstance(received, _Absent):
            raise DistributedError(
                f"rank {rank} of {size} waits for another rank in the first step of a trainer, or with an error, but rank "
                f"{other} averages the gradients of a step. {SAME_CALLS}"
            )
    return objects


def _object_of(comm: Any, other: int) -> Any:
    def why_never() -> str | None:
        if (left := _why_left(comm)) or not comm.Iprobe(source=other, tag=_ENDED):
            return left
        return f"rank {other} has ended its script. {SAME_CALLS}"

    here = f"rank {comm.Get_rank()} of {comm.Get_size()}"
    wait(here, "all_gather_object", lambda: comm.Iprobe(source=other, tag=_OBJECT), why_never)
    return comm.recv(source=other, tag=_OBJECT)


def _waiting_for_an_object(comm: Any) -> list[int]:
    return [rank for rank in range(comm.Get_size()) if comm.Iprobe(source=rank, tag=_OBJECT)]


_telling: list = []  # one list of requests in a process


def tell_the_end(comm: Any, mpi: Any) -> None:
    """Let this rank tell the others, at the end of its script, that it will take part in nothing any more.

    Args:
        comm: an mpi4py communicator of all ranks.
        mpi: the module `mpi4py.MPI`.
    """
    if comm.Get_size() == 1 or _telling:
        return
    requests: list = []
    _telling.append(requests)

    def tell() -> None:
        if mpi.Is_finalized():
            return
        others = set(range(comm.Get_size())) - {comm.Get_rank()}
        requests.extend(comm.isend(None, dest=rank, tag=_ENDED) for rank in others)
        # MPI_Finalize waits for the others as well, and with messages that nobody took MPICH kills a rank there.
        while others:
            for rank in [rank for rank in others if comm.Iprobe(source=rank, tag=_ENDED)]:
                comm.recv(source=rank, tag=_ENDED)
                others.remove(rank)
            time.sleep(1e-3)
        for request in requests:
            request.wait()

    atexit.register(tell)
