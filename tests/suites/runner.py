"""Run the entries of a suite, each in a process of its own: an exporter may take the process with it."""

from __future__ import annotations

import contextlib
import fnmatch
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from types import ModuleType

from suites.outcome import Outcome, State

_FORK = multiprocessing.get_context("fork")


def run(
    suite: ModuleType, entries: Iterable[str], limit: int | None = None, workers: int = 2, seconds: float = 300.0
) -> Iterator[tuple[str, list[Outcome]]]:
    """Yield each entry with its outcomes, as they end.

    Args:
        suite: a module of this package.
        limit: how many samples of an entry to run; all by default.
        workers: processes at a time.
        seconds: the time without a new outcome after which an entry is given up.
    """
    waiting = list(reversed(list(entries)))
    running: dict[Connection, _Entry] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            entry = _Entry(suite, waiting.pop(), limit)
            running[entry.connection] = entry
        ready = set(wait(list(running), timeout=1.0))
        for connection, entry in list(running.items()):
            if (connection in ready and not entry.receive()) or entry.overdue(seconds):
                del running[connection]
                yield entry.name, entry.close()


def seeded_slice(suite: ModuleType, seed: int = 0) -> list[str]:
    """The `SLICE` entries of a suite that CI runs, in their order."""
    names = suite.entries()
    chosen = set(random.Random(seed).sample(names, min(suite.SLICE, len(names))))
    return [name for name in names if name in chosen]


def exception(suite: ModuleType, entry: str, outcome: Outcome) -> str | None:
    """The reason why a bad outcome is no fault of ours, if the suite gives one."""
    for pattern, reason in suite.EXCEPTIONS.items():
        if fnmatch.fnmatchcase(entry, pattern) or fnmatch.fnmatchcase(f"{entry}/{outcome.sample}", pattern):
            return reason
    return None


class _Entry:
    def __init__(self, suite: ModuleType, name: str, limit: int | None):
        self.name, self.outcomes, self.last = name, [], time.monotonic()
        self.connection, theirs = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_child, args=(suite, name, limit, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.ended = False

    def receive(self) -> bool:
        """Take one message; False when there are no more."""
        try:
            message = self.connection.recv()
        except EOFError:
            return False
        self.last = time.monotonic()
        if message is None:
            self.ended = True
            return False
        self.outcomes.append(message)
        return True

    def overdue(self, seconds: float) -> bool:
        if time.monotonic() - self.last < seconds:
            return False
        self.outcomes.append(Outcome(self._place(), State.TIMEOUT, f"nothing for {seconds:.0f} s"))
        self.ended = True
        return True

    def close(self) -> list[Outcome]:
        if self.ended:
            self.process.kill()
        self.process.join()
        if not self.ended:
            self.outcomes.append(
                Outcome(self._place(), State.CRASHED, f"the process ended with status {self.process.exitcode}")
            )
        self.connection.close()
        return self.outcomes

    def _place(self) -> str:
        return f"after {self.outcomes[-1].sample}" if self.outcomes else "first"


def _child(suite: ModuleType, name: str, limit: int | None, connection: Connection) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    try:
        for outcome in suite.check(name, limit):
            connection.send(outcome)
    except Exception as error:
        connection.send(Outcome("", State.CRASHED, f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]))
    connection.send(None)
