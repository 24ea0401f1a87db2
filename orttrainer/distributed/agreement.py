"""What the ranks tell each other before they rely on each other, so that none waits for one that has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orttrainer.distributed.collective import Collective
from orttrainer.distributed.in_step import in_step, is_in_step, text_of
from orttrainer.errors import DistributedError

if TYPE_CHECKING:
    import torch

# Of the signals that travel at the end of the gradients: one says that a rank has failed, the others, of which each
# rank sets one in each group, show its number of batches by two remainders, and which trainer it steps by one.
_REMAINDERS = (7, 8)
_TRAINERS = 16
SIGNALS = 1 + sum(_REMAINDERS) + _TRAINERS  # 32 elements, two cache lines of float32

_numbers: list[int] = []  # of the trainers of this process that step together with those of other ranks


def number_of_another() -> int:
    """The number of one more trainer; the same on all ranks, which compile together."""
    _numbers.append(len(_numbers))
    return _numbers[-1]


@contextlib.contextmanager
def failing_together(collective: Collective, what: str) -> Iterator[None]:
    """Let what fails on one rank fail on all; the others would wait for it in the next collective.

    Args:
        collective: its ranks all run this block, in which there is no collective that a rank can miss.
        what: is done here, for the message, such as "compiling the model".

    Raises:
        DistributedError: another rank failed; the text has its error.
    """
    if collective.size == 1:
        yield
        return
    try:
        yield
    except BaseException as error:  # Ctrl-C, too
        if is_in_step():
            collective.all_gather_object(text_of(error))
        raise
    if error := _error_of_others(collective, collective.all_gather_object(None), what):
        raise error


def fail_on_others(collective: Collective, error: Exception) -> None:
    """Let ranks fail that are in a `failing_together`, or will be next, since this one has failed before it."""
    if collective.size > 1 and is_in_step():
        collective.all_gather_object(text_of(error))


def average_together(
    collective: Collective, buffers: list[torch.Tensor], trainer: int, batches: int, own: Exception | None, dropped: str
) -> None:
    """Replace gradients by their means over the ranks; raise on all, if one has failed or is elsewhere.

    Args:
        buffers: the gradients, flat; the last elements of the first one, SIGNALS of them, are free.
        trainer: its number among those of the ranks.
        batches: whose gradients this rank has summed for this update.
        own: why this rank has none that can be used; None if it has.
        dropped: what is lost where this raises, for the message.

    Raises:
        DistributedError: another rank has failed, steps another trainer, or has another number of batches.
        Exception: `own`, with a note of what that means for all.
        BaseException: from a handler of a signal, while the others are waited for: this rank is out of step.
    """
    with in_step(collective):
        error = _averaged(collective, buffers, trainer, batches, own, dropped)
    if error is not None:
        raise error


def _averaged(
    collective: Collective, buffers: list[torch.Tensor], trainer: int, batches: int, own: Exception | None, dropped: str
) -> Exception | None:
    """The same; returns what all ranks are to raise, which stay in step by it."""
    signals = buffers[0][-SIGNALS:]
    if several := len(_numbers) > 1:
        signals = signals.float().cpu()
    signals.zero_()
    signals[0] = own is not None
    for place in _places(trainer, batches):
        signals[place] = 1
    if several:  # their buffers differ in size, and gloo ends a process that is sent too much
        collective.all_reduce_mean_(signals)
        if error := _announced(collective, signals.tolist(), trainer, batches, own, dropped):
            return error
    for buffer in buffers:
        collective.all_reduce_mean_(buffer)
    return _announced(collective, signals.tolist(), trainer, batches, own, dropped)


def _announced(
    collective: Collective, heard: list[float], trainer: int, batches: int, own: Exception | None, dropped: str
) -> Exception | None:
    """What all ranks are to raise, by the means of what they said."""
    if heard[0] > 0.0:
        texts = collective.all_gather_object(None if own is None else text_of(own))
        then = f"Nothing was updated on any rank.{dropped}"
        if own is not None:
            own.add_note(then)
            return own
        return _error_of_others(collective, texts, "this step", f" {then}")
    least = 1.0 - 0.5 / collective.size  # of a sum of equal ones, in whatever order it was taken
    if any(heard[place] < least for place in _places(trainer, batches)):
        trainers, counts = zip(*collective.all_gather_object((trainer, batches)))
        if len({*trainers}) > 1:
            return DistributedError(
                f"the ranks step different trainers: {[*trainers]}, in the order of the ranks, counted from 0 by their first "
                f"steps. Every rank has to step the same ones, in the same order. Nothing was updated.{dropped}"
            )
        return DistributedError(
            f"the ranks have summed the gradients of different numbers of batches for one update: {[*counts]}, in the order "
            f"of the ranks. Give every rank the same gradient_accumulation_steps. Nothing was updated.{dropped}"
        )
    return None


def _places(trainer: int, batches: int) -> list[int]:
    """The signals that a rank sets that steps this trainer and has so many batches."""
    places, start, rest = [SIGNALS - _TRAINERS + trainer % _TRAINERS], 1, batches
    for divisor in _REMAINDERS:
        rest, remainder = divmod(rest, divisor)
        places.append(start + remainder)
        start += divisor
    return places


def _error_of_others(
    collective: Collective, texts: list[str | None], what: str, then: str = ""
) -> DistributedError | None:
    failed = [
        f"rank {rank} of {collective.size} failed in {what}: {text.rstrip('.')}."
        for rank, text in enumerate(texts)
        if text
    ]
    return DistributedError(f"{' '.join(failed)}{then}") if failed else None
