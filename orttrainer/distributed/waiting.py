"""Waiting for other ranks that may never come: they have ended, or wait for this one in another call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from orttrainer import signals
from orttrainer.errors import DistributedError

log = logging.getLogger("orttrainer.distributed")

_LONG = 1.0  # seconds, after which a rank that waits looks for what the others do
_GRACE = 5.0  # seconds for a call in which a rank that has gone on since did take part
_TOLD = 60.0  # seconds, after which it says that it waits

SAME_CALLS = (
    "Every rank has to make the same trainers, and step them in the same order; but for those made by "
    "orttrainer.trainer(..., data_parallel=False), which train on one rank alone."
)
ENDED = (
    "has ended its script. If that was no error, the ranks had different numbers of batches: give each rank as many, e.g. "
    "drop the last ones."
)


def wait(here: str, call: str, done: Callable[[], bool], why_never: Callable[[], str | None]) -> None:
    """Wait until `done()`; what a handler of a signal raises (Ctrl-C) does so when that takes long, and leaves the ranks out of step.

    Args:
        here: which rank of how many waits.
        call: what is waited in, for the log.
        why_never: asked when that takes long; returns why it will not be done, or None.

    Raises:
        DistributedError: it will not be done.
    """
    begin, told, reason, give_up = time.monotonic(), False, None, 0.0
    while not done():
        now = time.monotonic()
        if now < begin + _LONG:
            continue
        with signals.at_once():
            signals.raise_noted()
            time.sleep(1e-3)
            if reason is None:
                reason, give_up = why_never(), now + _GRACE
            elif now > give_up:
                raise DistributedError(f"{here} waits for another rank, but {reason}")
        if now > begin + _TOLD and not told:
            log.warning("%s has waited %d seconds for another rank, in %s", here, _TOLD, call)
            told = True
