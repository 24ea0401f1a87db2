"""Whether later forwards give what the first one does: else it kept something elsewhere than in buffers and frozen parameters."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Sequence

import torch

from orttrainer.export.checks.forwards import called, opposite_values, other_values
from orttrainer.export.memory.counters import Counters
from orttrainer.export.memory.first_call import FirstCall
from orttrainer.export.memory.hidden_state import alike, anew, changes, sampled

__all__ = ["LaterCalls"]

log = logging.getLogger("orttrainer")


class LaterCalls:
    """What a module gives in the calls after the first; `check` compares it with what it gives once all is put back.

    Raises:
        UnsupportedModelError: of what a loss or a forward keeps, later calls compute with it.
    """

    def __init__(self, first: FirstCall):
        self._wrapper, self._inputs, self._outputs = first.wrapper, first.inputs, sampled(first.outputs)
        self._others = other_values(first.inputs)
        self._level = logging.WARNING if first.aloud else logging.DEBUG
        self._changed, self._registered = first.hidden.changed(), first.hidden.registered()
        self._written = [name for name in first.after if name in first.before]
        counters, left = Counters(first.wrapper, first.mute.read), map(first.after.__getitem__, self._written)
        self._error = first.hidden.error((*self._outputs, *left), lambda: self._again(first), counters)
        # Batches, and what it gives for one behind the other.
        self._behind: list[tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]]] = []
        if self._error is None and self._others is not None:
            if not self._changed:
                self._check_kept(first, counters.kept())
            if self._changed or self._registered or first.mute.read is None or first.mute.read.stored:
                with contextlib.suppress(Exception):  # the module's own: values that it does not take
                    for batch in (self._others, self._inputs, opposite_values(self._others), self._inputs):
                        # Forward may write to it.
                        given = batch if batch is self._inputs else [*map(torch.clone, batch)]
                        self._behind.append((batch, first.again(given)))
                self._changed = self._changed or first.hidden.changed() or counters.kept()

    def _again(self, first: FirstCall) -> tuple[torch.Tensor, ...]:
        """Also what buffers hold: which rows of a memory bank it writes to may be kept in an attribute."""
        return (*first.again(self._inputs), *(_state(self._wrapper, name) for name in self._written))

    def _check_kept(self, first: FirstCall, kept: list[str]) -> None:
        if kept and _remembers(lambda: first.again(self._others), lambda: first.again(self._inputs)):
            raise changes(kept)
        if kept:
            log.log(
                self._level,
                "forward and loss write to %s. Later steps run a graph, and not this code: what they would keep there, take "
                "from what a step returns.",
                ", ".join(map(repr, kept)),
            )

    def check(self) -> None:
        """Refuse a module whose later calls are not as its first is."""
        if self._error is not None and not self._only_caches():
            raise self._error
        for batch, found in self._behind:
            # A first call, on the same values.
            expected = self._outputs if batch is self._inputs else called(self._wrapper, batch)[0]
            if not alike(found, expected):
                raise anew(self._registered) if self._registered else changes(self._changed)
        if self._registered:
            log.log(
                self._level,
                "forward makes %s, which no later call computes with; in training they are not made.",
                ", ".join(map(repr, self._registered)),
            )

    def _only_caches(self) -> bool:
        """Whether what the first call left in attributes and buffers is what it computes with anyway, whatever the values.

        Such as tables of positions, which the next call reads: it gives the same, and for other values what a first call on
        them does. A layer that takes its scale from the first batch does not.
        """
        if self._others is None:
            return False
        try:
            (new,) = called(self._wrapper, self._others)
            _, again, later = called(self._wrapper, self._inputs, self._inputs, self._others)
        except Exception:  # the module's own, whatever it is: values that it does not take
            return False
        return alike(again, self._outputs) and alike(later, new)


def _remembers(other: Callable, call: Callable) -> bool:
    """Whether what the other gives depends on the calls before: on one of two, or on all, as by an average that the first began."""
    try:
        before = other()
        call()
        return not (alike(other(), before) and alike(other(), before))
    except Exception:  # the module's own: values that it does not take
        return False


def _state(wrapper, name: str) -> torch.Tensor:
    found = operator.attrgetter(name)(wrapper)
    return torch.empty(0, device="cpu") if found is None else found.detach()
