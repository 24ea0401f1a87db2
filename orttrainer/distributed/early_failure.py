"""A rank that fails before its first trainer, where the others would wait for it in MPI for ever."""

from __future__ import annotations

import atexit
import contextlib
import opcode
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

__all__ = ["end_all_ranks_on_failure", "let_it_be_forwarded"]

# Seconds. A launcher passes on what its ranks print through pipes of its own, and drops what is in them on an abort:
# on a busy machine that was the traceback.
_TIME_TO_FORWARD = 1.0

_HAS_ITS_OWN = "orttrainer.distributed.mpi"  # the room of the hook that trainers install


def end_all_ranks_on_failure() -> None:
    """Let an uncaught exception, or a `sys.exit` of a failure, that comes before the first trainer end all ranks.

    Later ones do, too; of a rank that ends its script later the others hear.

    Before MPI is initialised, MPICH's mpiexec takes a process that ends so for one that has no use for MPI. It is asked in
    its own protocol, PMI-1, on the connection that it gave to each rank; Open MPI's and torchrun need no asking. Where the
    script has initialised MPI, as an import of `mpi4py.MPI` does, MPI is asked. Does nothing elsewhere.
    """
    size, connection = os.environ.get("PMI_SIZE", ""), os.environ.get("PMI_FD", "")
    if not (size.isdecimal() and int(size) > 1 and connection.isdecimal()):
        return
    if (identity := _socket(int(connection))) is not None:
        sys.excepthook = _AskForTheEnd(int(connection), identity, sys.excepthook)
        sys.exit = left = _Exit(sys.excepthook, sys.exit)
        atexit.register(left.at_the_end)


def let_it_be_forwarded() -> None:
    """Give a launcher the time to pass on what was printed, before an abort drops it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    time.sleep(_TIME_TO_FORWARD)


class _AskForTheEnd:
    """An excepthook: print the traceback as before; where no trainer has one of its own yet, ask for the end of all ranks."""

    def __init__(self, connection: int, identity: int, previous: Callable[..., Any]) -> None:
        self._connection, self._identity, self._previous = connection, identity, previous
        self._process = os.getpid()

    def __call__(self, kind: type, error: BaseException, traceback: Any) -> None:
        self._previous(kind, error, traceback)
        self.ask()

    def ask(self) -> None:
        """End all ranks, if this one has no trainer yet and is not a process that a rank has started."""
        if _HAS_ITS_OWN in sys.modules or os.getpid() != self._process:
            return
        mpi = sys.modules.get("mpi4py.MPI")
        runs = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
        if not runs and _socket(self._connection) != self._identity:
            return
        rank, size = os.environ.get("PMI_RANK"), os.environ["PMI_SIZE"]
        print(f"orttrainer: rank {rank} failed before its first trainer, ending all {size} ranks", file=sys.stderr)
        let_it_be_forwarded()
        if runs:
            mpi.COMM_WORLD.Abort(1)
            return
        with contextlib.suppress(OSError):
            os.write(self._connection, b"cmd=abort exitcode=1\n")


class _Exit:
    """In place of `sys.exit`: at the end of the process, ask for the end of all ranks, if it was left by one that says failure.

    Python calls no excepthook for a SystemExit, and tells nobody at the end why it ends.
    """

    def __init__(self, hook: _AskForTheEnd, previous: Callable[..., NoReturn]) -> None:
        self._hook, self._previous = hook, previous
        self._left: tuple[FrameType, int] | None = None  # the script's own frame, and where it was then

    def __call__(self, *status: Any) -> NoReturn:
        try:
            self._previous(*status)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                script = _outermost(sys._getframe())
                self._left = None if error.code in (None, 0) else (script, script.f_lasti)
            raise

    def at_the_end(self) -> None:
        """Called when the process ends. One that was caught meanwhile was no failure: behind it the script went on."""
        if self._left is not None:
            script, place = self._left
            behind_finally = script.f_code.co_code[script.f_lasti] == opcode.opmap["RERAISE"]
            if script.f_lasti == place or behind_finally:
                self._hook.ask()


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _socket(number: int) -> int | None:
    """The identity of the socket that has this number; None if it is another file, as in processes that a rank starts."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None
