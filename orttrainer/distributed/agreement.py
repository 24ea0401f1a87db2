"""What the ranks tell each other before they rely on each other, so that none waits for one that has failed."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orttrainer.distributed.collective import Collective
from orttrainer.distributed.in_step import in_step, is_in_step, text_of
from orttrainer.errors import DistributedError

if TYPE_CHECKING:
    import torch

# What travels at the end of the gradients, an element for each bit: whether the rank has failed, the number of its trainer,
# how many batches it has, and the loss scale. A mean that is neither 0 nor 1 is of ranks that differ.
_SAID = struct.Struct("<?BHf")
SIGNALS = 8 * _SAID.size  # 64 elements, four cache lines of float32

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


@dataclass(frozen=True)
class Share:
    """What a rank has for an update.

    Attributes:
        trainer: its number among those of the ranks.
        batches: whose gradients it has summed.
        scale: the loss scale that these are multiplied with.
        failure: why there are none that can be used; None if there are.
        dropped: what is lost where not all ranks have the same, for the message.
    """

    trainer: int
    batches: int
    scale: float
    failure: Exception | None
    dropped: str

    def bits(self) -> list[float]:
        """SIGNALS zeros and ones."""
        return _bits(self.failure is not None, self.trainer % 2**8, self.batches % 2**16, self.scale)


@functools.lru_cache(maxsize=64)  # which are the same in most steps
def _bits(*said) -> list[float]:
    return [float(byte >> place & 1) for byte in _SAID.pack(*said) for place in range(8)]


def average_together(collective: Collective, buffers: list[torch.Tensor], own: Share) -> None:
    """Replace gradients by their means over the ranks; raise on all, if one has failed or is elsewhere.

    Args:
        buffers: the gradients, flat; the last elements of the first one, SIGNALS of them, are free.
        own: what they are, or why there are none.

    Raises:
        DistributedError: another rank has failed, steps another trainer, or has another number of batches or loss scale.
        Exception: the failure of this one, with a note of what that means for all.
        BaseException: from a handler of a signal, while the others are waited for: this rank is out of step.
    """
    with in_step(collective):
        error = _averaged(collective, buffers, own)
    if error is not None:
        raise error


def _averaged(collective: Collective, buffers: list[torch.Tensor], own: Share) -> Exception | None:
    """The same; returns what all ranks are to raise, which stay in step by it."""
    signals = buffers[0][-SIGNALS:]
    if several := len(_numbers) > 1:
        signals = signals.float().cpu()
    signals.copy_(signals.new_tensor(own.bits()))
    if several:  # their buffers differ in size, and gloo ends a process that is sent too much
        collective.all_reduce_mean_(signals)
        if error := _announced(collective, signals.tolist(), own):
            return error
    for buffer in buffers:
        collective.all_reduce_mean_(buffer)
    return _announced(collective, signals.tolist(), own)


def _announced(collective: Collective, heard: list[float], own: Share) -> Exception | None:
    """What all ranks are to raise, by the means of what they said."""
    if heard[0] > 0.0:
        texts = collective.all_gather_object(None if own.failure is None else text_of(own.failure))
        then = f"Nothing was updated on any rank.{own.dropped}"
        if own.failure is not None:
            own.failure.add_note(then)
            return own.failure
        return _error_of_others(collective, texts, "this step", f" {then}")
    least = 1.0 - 0.5 / collective.size  # of a mean of equal ones, in whatever order their sum was taken
    if all(mean == 0.0 or mean > least for mean in {*heard}):
        return None
    trainers, counts, scales = zip(*collective.all_gather_object((own.trainer, own.batches, own.scale)))
    if len({*trainers}) > 1:
        text = (
            f"the ranks step different trainers: {[*trainers]}, in the order of the ranks, counted from 0 by their first "
            "steps. Every rank has to step the same ones, in the same order."
        )
    elif len({*counts}) > 1:
        text = (
            f"the ranks have summed the gradients of different numbers of batches for one update: {[*counts]}, in the order "
            "of the ranks. Give every rank the same gradient_accumulation_steps."
        )
    else:
        text = (
            f"the ranks have different loss scales: {[*scales]}, in the order of the ranks. Give every rank the same one, and "
            "load the same checkpoint on every rank, or on none."
        )
    return DistributedError(f"{text} Nothing was updated.{own.dropped}")


def _error_of_others(
    collective: Collective, texts: list[str | None], what: str, then: str = ""
) -> DistributedError | None:
    failed = [
        f"rank {rank} of {collective.size} failed in {what}: {text.rstrip('.')}."
        for rank, text in enumerate(texts)
        if text
    ]
    return DistributedError(f"{' '.join(failed)}{then}") if failed else None
