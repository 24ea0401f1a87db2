"""Whether this rank is in step with the others: one that leaves in its midst what all do together never is again.

The calls of the ranks are paired by their order alone. Were such a rank to go on, its gradients would be averaged with those
of another step of the others from then on, in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orttrainer.errors import DistributedError

if TYPE_CHECKING:
    from orttrainer.distributed.collective import Collective

_left: list[str] = []  # what is said since this rank is out of step; of the process: its trainers share the group


def check_in_step(collective: Collective) -> None:
    """Raise DistributedError, if this rank is out of step with the others."""
    if _left and collective.size > 1:
        raise DistributedError(_left[0])


def is_in_step() -> bool:
    """Whether the others can still be told anything."""
    return not _left


@contextlib.contextmanager
def in_step(collective: Collective) -> Iterator[None]:
    """A block of calls that all ranks make: what it raises leaves this rank out of step for good, and the others are told so.

    Raises:
        DistributedError: this rank is out of step already.
    """
    check_in_step(collective)
    try:
        yield
    except BaseException as error:
        if collective.size > 1 and not _left:
            here = f"rank {collective.rank} of {collective.size}"
            _left.append(str(error) if isinstance(error, DistributedError) else why_left(here, text_of(error)))
            collective.tell_left(text_of(error))
        raise


def why_left(who: str, why: str) -> str:
    """That a rank is out of step, for a message."""
    return (
        f"{who} has left in its midst what all ranks do together, by {why.rstrip('.')}. The ranks are no longer in step, and "
        "cannot go on: end the program, and start it again from a checkpoint."
    )


def text_of(error: BaseException) -> str:
    """The error in a message of another."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
