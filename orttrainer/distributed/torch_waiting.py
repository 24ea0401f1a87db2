"""Waiting for other ranks of torch.distributed: gloo and NCCL pair the calls of the ranks by their order alone.

Two ranks in different calls wait for each other until the time of the group is up, half an hour of gloo's. So a rank that
waits long writes its last calls to the store of the group, each under its number, unless another rank has written there:
two calls of one number that differ never end. A rank that is merely slow has written nothing. One that leaves a call in its
midst says so under its number, which the others are at, or shortly behind.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import json
import os
import sys
import time

import torch.distributed as dist

from orttrainer.distributed.in_step import why_left
from orttrainer.distributed.waiting import SAME_CALLS, wait

_SLICE = datetime.timedelta(seconds=0.05)  # of waiting in C++, where no KeyboardInterrupt is heard
_LOOK = 0.25  # seconds between two looks at the store
_TIME_TO_GIVE_UP = 1.0  # seconds for the others, to which the end of this process is a broken connection
_TIME_TO_TELL = 1.0  # likewise, from the end of a group to that of a script
_KEPT = 8  # calls; the root of a broadcast has gone on when the others wait for it

_unfinished: list[dist.Work] = []  # given up, with the tensors that they may still write to


class Calls:
    """The calls that this rank has made on the group; on every rank the same ones, in the same order."""

    def __init__(self) -> None:
        self._count = 0
        self._last: collections.deque[tuple[int, str]] = collections.deque(maxlen=_KEPT)

    def wait(self, work: dist.Work, call: str, doing: str, on_cuda: bool) -> None:
        """Wait until a call is done.

        Args:
            work: what the call returned.
            on_cuda: its tensors are there; then torch's current stream waits for it, too.
            call: its name, for the log.
            doing: what a rank does in it, for the others; a call of theirs that is paired with it has the same.

        Raises:
            DistributedError: another rank waits in another call.
            RuntimeError: the call has failed.
        """
        self._count += 1
        self._last.append((self._count, doing))
        posted = _Posted([*self._last])
        here = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        try:
            wait(here, call, work.is_completed if on_cuda else functools.partial(_is_done, work), posted.why_never)
            work.wait()
        except BaseException:
            _unfinished.append(work)
            raise
        posted.take_down()

    def tell_left(self, why: str) -> None:
        """Tell the other ranks that this one has left its last call in its midst, and makes no further one."""
        with contextlib.suppress(RuntimeError, ValueError):  # of a store that has ended, or of no group
            store_of_group().set(_key(self._count, "/left"), json.dumps([dist.get_rank(), why]))


calls = Calls()  # of this process: its trainers share the group


class _Posted:
    """Calls in the group's store, written there when they are first asked for."""

    def __init__(self, calls: list[tuple[int, str]]) -> None:
        self._calls = calls
        self._looked: float | None = None

    def why_never(self) -> str | None:
        """Why the last of the calls will not be done; None if nothing says so."""
        if self._looked is not None and time.monotonic() < self._looked + _LOOK:
            return None
        first, self._looked = self._looked is None, time.monotonic()
        with contextlib.suppress(RuntimeError):  # of a store that has ended, or cannot do that: then gloo's time is up
            other = self._post() if first else None
            return other or self._answer() or self._left()
        return None

    def _post(self) -> str | None:
        store, rank = store_of_group(), dist.get_rank()
        for number, doing in self._calls:
            there = json.loads(store.compare_set(_key(number), "", json.dumps([rank, doing])))
            if there[1] != doing:
                store.set(_key(number, "/answer"), json.dumps([rank, doing]))
                return _reason(*there)
        return None

    def _answer(self) -> str | None:
        """What a rank has written that found another call under the number of one of these."""
        store, said = store_of_group(), dict(self._calls)
        for number in said:
            key = _key(number, "/answer")
            if store.check([key]):
                rank, doing = json.loads(store.get(key))
                return _reason(rank, doing) if doing != said[number] else None
        return None

    def _left(self) -> str | None:
        """What a rank has written that has left one of these, or what comes behind it."""
        store = store_of_group()
        for number, _ in self._calls:
            if store.check([key := _key(number, "/left")]):
                rank, why = json.loads(store.get(key))
                return why_left(f"rank {rank}", why)
        return None

    def take_down(self) -> None:
        if self._looked is None:
            return
        with contextlib.suppress(RuntimeError):  # likewise
            for number, _ in self._calls:
                store_of_group().delete_key(_key(number))


def _reason(rank: int, doing: str) -> str:
    return f"rank {rank} {doing}. {SAME_CALLS}"


def _key(number: int, suffix: str = "") -> str:
    return f"orttrainer/call/{number}{suffix}"


def store_of_group() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _is_done(work: dist.Work) -> bool:
    """Whether it is done, or is so after a moment; NCCL would end the group instead of waiting only for so long."""
    with contextlib.suppress(RuntimeError):
        work.wait(_SLICE)
        return True
    return work.is_completed()  # done in between, or failed


def tell_the_end(store: dist.Store, rank: int) -> None:
    """Tell the others, at the end of the script, that this rank will take part in nothing any more: their next call fails."""
    with contextlib.suppress(RuntimeError):  # the store has ended
        store.set(_ended(rank), "")


def rank_that_ended() -> int | None:
    """The rank for which a call has failed, since its script has ended; None if it was for another reason."""
    begun = time.monotonic()
    with contextlib.suppress(RuntimeError):  # likewise
        while time.monotonic() < begun + _TIME_TO_TELL:
            for rank in range(dist.get_world_size()):
                if store_of_group().check([_ended(rank)]):
                    return rank
            time.sleep(0.02)
    return None


def _ended(rank: int) -> str:
    return f"orttrainer/ended/{rank}"


def end_unfinished() -> None:
    """End this process, if it has given up a call that never ends: gloo would wait for it before the process does."""
    if all(work.is_completed() for work in _unfinished):
        return
    time.sleep(_TIME_TO_GIVE_UP)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
