"""A process forked off this one, for work that leaves more behind than it gives: torch's exporter.

Its modules and caches are some 100 MB, which a process would keep for as long as it trains, for one graph. A child has the
module's tensors without a copy, and what it leaves behind ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import multiprocessing.util
import os
import pickle
import select
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from orttrainer import signals
from orttrainer.errors import ExportError

__all__ = ["SWITCH", "Child", "SharedTensors", "may_fork"]

log = logging.getLogger("orttrainer")

SWITCH = "ORTTRAINER_EXPORT"  # "here": no child
_EXPORTER = "torch.onnx._internal.exporter._core"
_ALONE = ("jax", "mpi4py.MPI")  # modules whose processes are not to be forked: threads of their own, other ranks
_CHILDREN = 2  # of one process: a child imports the exporter, 2 seconds; who exports more often shall import it once
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_PATIENCE = 60.0  # seconds without an answer and without any work
_LENGTH = 8  # bytes, of the number of bytes that an answer has

_forked = 0


def may_fork(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a child may export a module, and whether that gains anything.

    A fork has the memory of its parent but only the one thread: what others held, such as a lock, stays held for ever; nor
    can it use a GPU or talk to other ranks. Of shared memory it has no copy: both processes would write there.

    Args:
        tensors: that the module computes with.
    """
    return (
        os.environ.get(SWITCH) != "here"
        and sys.platform == "linux"
        and _forked < _CHILDREN
        and _EXPORTER not in sys.modules
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
        and not any(name in sys.modules for name in _ALONE)
        and all(tensor.device.type == "cpu" and not tensor.is_shared() for tensor in tensors)
    )


class Child:
    """Runs `work(receive)` in a forked process; `receive()` waits for what `send` is given.

    Until it has ended torch computes with one thread less here.

    Args:
        work: its result, or each that it yields, is what `pickle` takes, as is that of `receive`.

    Attributes:
        pid: of the process.

    Raises:
        OSError: the system gives no process.
    """

    def __init__(self, work: Callable[[Callable[[], object]], object]):
        global _forked
        parent = os.getpid()
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self.pid = _fork()
        except OSError:
            for descriptor in (orders, self._orders, self._answers, answers):
                os.close(descriptor)
            raise
        if self.pid == 0:
            os.close(self._orders)
            os.close(self._answers)
            _work_and_leave(work, orders, answers, parent)
        os.close(orders)
        os.close(answers)
        self._runs, self._threads = True, torch.get_num_threads()
        torch.set_num_threads(
            max(1, self._threads - 1)
        )  # the child has a processor, too, and all would wait for the last
        _forked += 1

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_) -> None:
        """End the child, whatever it does."""
        self._close_orders()
        if self._answers is not None:
            os.close(self._answers)
            self._answers = None
        if self._runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._ended()

    def send(self, value, more: bool = False) -> None:
        """Give the child what it waits for; a child that has ended is found out by `result`.

        Args:
            more: something else will be sent.
        """
        with contextlib.suppress(BrokenPipeError), open(self._orders, "wb", closefd=False) as orders:
            pickle.dump(value, orders)
        if not more:
            self._close_orders()

    def result(self, more: bool = False):
        """Wait for what `work` gives next; None where it raised, or stands still.

        Args:
            more: it will be asked for something else. Otherwise it is waited for to end.

        Raises:
            ExportError: the child was killed.
        """
        try:
            length = int.from_bytes(self._read(_LENGTH), "little")
            answer = self._read(length)
        except _StandsStill:
            log.warning(
                "the process that exports the module stands still and is ended; what it was to do is done in this one. "
                "Set %s=here to begin with that.", SWITCH,
            )  # fmt: skip
            return None
        if not more or not answer:  # it has ended without one
            self._close_orders()
            status = self._ended()
            if status is not None and os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                raise ExportError(
                    f"the process that exports the module was killed by signal {number} ({signal.strsignal(number)}){_advice(number)}"
                )
        try:
            return pickle.loads(answer)
        except (EOFError, pickle.UnpicklingError):  # `work` raised before it had anything to give
            return None

    def _read(self, length: int) -> bytes:
        """So many bytes, none where the child ends before.

        Raises:
            _StandsStill: it does no work, and gives nothing.
        """
        parts = [b""]
        while (missing := length - sum(map(len, parts))) > 0:
            if not self._has_answer():
                raise _StandsStill
            parts.append(os.read(self._answers, min(missing, 2**20)))
            if not parts[-1]:
                return b""
        return b"".join(parts)

    def _has_answer(self) -> bool:
        """Wait until there is something to read; False if the child does no work meanwhile."""
        worked = None
        signals.raise_noted()
        with signals.at_once():
            while not select.select([self._answers], [], [], _PATIENCE)[0]:
                if worked == (worked := _processor_time(self.pid)):
                    return False
        return True

    def _close_orders(self) -> None:
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None

    def _ended(self) -> int | None:
        """Wait for the child's end; how it ended, None if someone else, such as a handler of SIGCHLD, asked first."""
        self._runs = False
        torch.set_num_threads(self._threads)
        try:
            return os.waitpid(self.pid, 0)[1]
        except ChildProcessError:
            return None


class _StandsStill(Exception):
    """The child does no work, and gives no answer."""


class _Place(NamedTuple):
    """Where a tensor is in the shared memory, and what it is."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SharedTensors:
    """Memory that a process shares with the children that it forks from then on; nobody has any of it before it is written.

    Args:
        largest: tensors of the sizes for which there is to be room.
    """

    def __init__(self, largest: Iterable[torch.Tensor]):
        self._memory = mmap.mmap(-1, sum(map(_room, largest)) or 1)

    def put(self, tensors: dict[str, torch.Tensor]) -> dict[str, _Place] | None:
        """Bring tensors there, one after the other, and into the places of these in `tensors`; None where one has no room."""
        places, begin = {}, 0
        for name, tensor in tensors.items():
            places[name] = _Place(begin, tensor.dtype, tuple(tensor.shape))
            begin += _room(tensor)
            if begin > len(self._memory) or tensor.device.type != "cpu":
                return None
            tensors[name] = self._at(places[name]).copy_(tensor)
        return places

    def tensors(self, places: Mapping[str, _Place]) -> dict[str, torch.Tensor]:
        """What the other process has put there."""
        return {name: self._at(place) for name, place in places.items()}

    def _at(self, place: _Place) -> torch.Tensor:
        if 0 in place.shape:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        count = torch.Size(place.shape).numel()
        return torch.frombuffer(self._memory, dtype=place.dtype, count=count, offset=place.begin).view(place.shape)


def _room(tensor: torch.Tensor) -> int:
    """Bytes, of whole lines of the processor's cache."""
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _advice(number: int) -> str:
    """The rest of what is said of a child that a signal has ended."""
    if number in _CRASHES:
        return (
            ": what it ran has crashed, your forward or torch's exporter, and would take this process with it. Export the module "
            "to ONNX where that works, and pass the ONNX model; or run forward in parts to see which of it crashes."
        )
    memory = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"{memory}. Set the environment variable {SWITCH}=here to export in this process."


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):  # what they hold back would be written twice
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    with warnings.catch_warnings():
        # There is no other thread of Python's; those of torch and ONNX Runtime wait for work, and hold nothing.
        warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning)
        return os.fork()


def _work_and_leave(work: Callable, orders: int, answers: int, parent: int) -> None:
    """What the child does. It must not return into the parent's code, nor run what the parent does at its exit."""
    status = 1
    try:
        _leave_signals_to(parent)
        torch.set_num_threads(1)  # the threads that torch computes with are not in the child
        gc.disable()  # of what it makes nothing stays
        with open(orders, "rb") as given, open(answers, "wb") as taken:
            made = work(lambda: pickle.load(given))
            for answer in made if isinstance(made, types.GeneratorType) else (made,):
                pickled = pickle.dumps(answer)
                taken.write(len(pickled).to_bytes(_LENGTH, "little") + pickled)
                taken.flush()
        status = 0
    except BaseException as error:  # whatever it is, the parent meets it too, when it does the same
        log.debug("the export in a child failed: %r", error)
    finally:
        _release_semaphores()
        os._exit(status)


def _release_semaphores() -> None:
    """Release those that imports have made here (tqdm's lock), which have names in a program that starts processes by spawn.

    Python's tracker would complain of them when the program ends.
    """
    with contextlib.suppress(Exception):  # a private name, and nothing may keep this process from leaving
        multiprocessing.util._run_finalizers()


def _leave_signals_to(parent: int) -> None:
    """Be deaf to signals of which the parent has handlers, which often go to all processes, and end with the parent.

    A handler that saves a checkpoint and exits is to do so once; and a child whose parent was killed would compute on.
    """
    for number in signal.valid_signals() - {signal.SIGCHLD}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before
        os._exit(1)


def _processor_time(pid: int) -> str:
    """The seconds that a process has computed, in some unit; "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return " ".join(file.read().rpartition(")")[2].split()[11:13])
    except OSError:
        return ""
