"""Ranges as long as a size: `log_probabilities[range(len(y)), y]`, where the places are a tensor in a graph.

    targets[list(range(n)), classes] = 1.0

Whatever else Python does with one has to know the size; but for a loop in steps of several (`range(0, n, 64)`), which asks each
time whether there are more.
"""

from __future__ import annotations

import itertools
import operator
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence

import torch

from orttrainer.export.values.told import PASSED, UNTOLD, is_at

__all__ = ["Range", "is_symbolic"]


class _Type(ABCMeta):
    """The type that Python's `range` is in the code that is traced."""

    def __call__(cls, *bounds):
        symbolic = any(isinstance(bound, torch.SymInt) for bound in bounds)
        return super().__call__(*bounds) if symbolic else range(*bounds)

    def __instancecheck__(cls, x):
        return type(x) in (range, cls)

    def __eq__(cls, other):
        return other is range or other is cls

    def __hash__(cls):
        return hash(range)


class Range(Sequence, metaclass=_Type):
    """`range` of numbers of which a trace has symbols.

    Attributes:
        bounds: as `range` takes them.
        is_listed: `list` of one is one, so that nothing is asked for. Else the trace begins anew with such lists.
    """

    is_listed = True

    def __init__(self, *bounds):
        self.bounds = bounds

    def known(self) -> range:
        """Python's, which the trace depends on."""
        return range(*map(operator.index, self.bounds))

    def places(self) -> torch.Tensor:
        """The numbers of it, int64."""
        return torch.arange(*self.bounds)

    def __len__(self) -> int:
        caller = sys._getframe(1)
        passed_on = caller.f_code.co_filename.startswith(PASSED) and is_at(caller, "CALL_FUNCTION_EX")
        if passed_on or is_at(
            caller, "BINARY_SUBSCR", "STORE_SUBSCR"
        ):  # torch looks for tensors in it, of which there is none
            return 0
        return len(self.known())

    def __getitem__(self, index):
        return self.known()[index]

    def __iter__(self) -> Iterator[int]:
        caller = sys._getframe(1)
        if not self.is_listed and "list" in caller.f_code.co_names and is_at(caller, "CALL"):
            raise TypeError(f"list() of as many as {UNTOLD}")
        match self.bounds:
            case int(start), torch.SymInt() as stop, int(step) if step > 1:
                return itertools.takewhile(lambda number: number < stop, itertools.count(start, step))
        return iter(self.known())


def is_symbolic(x: object) -> bool:
    """Whether it is such a range."""
    return type(x) is Range
