"""What an optimizer of torch's has in its own `state`, and whether someone else than it has changed that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["OwnState"]


class OwnState:
    """The `state` of an optimizer when this is made, to be compared with that of a later moment.

    It keeps the tensors, since what is gone could else not be told from what came to its address.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._state = optimizer.state
        self._entries = _entries_of(self._state)

    def is_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether there is another dict (`optimizer.state = defaultdict(dict)`)."""
        return optimizer.state is not self._state

    def edited(self, optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters that have another entry now (one where there was none, or none any more), and those in whose entry
        something is another or was written to."""
        if not self._entries and not optimizer.state:  # as nearly every step has them
            return [], []
        before, now, others, written = self._entries, _entries_of(optimizer.state), [], []
        for parameter in {**before, **now}:
            (old, was), (new, present) = before.get(parameter, _NONE), now.get(parameter, _NONE)
            if old is not new:
                others.append(parameter)
            elif was.keys() != present.keys() or not all(_same(was[key], present[key]) for key in was):
                written.append(parameter)
        return others, written


_NONE: tuple[None, dict] = (None, {})


def _entries_of(state: Mapping) -> dict[Any, tuple[Mapping, dict[str, tuple[Any, int]]]]:
    """Parameter -> its entry, and of that each value with how often it was written to; without empty ones, which looking makes."""
    return {
        parameter: (entry, {key: (x, x._version if isinstance(x, torch.Tensor) else 0) for key, x in entry.items()})
        for parameter, entry in state.items()
        if entry
    }


def _same(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    (x, written), (y, written_later) = one, other
    plain = not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor)
    return written == written_later and (x is y or (plain and x == y))
