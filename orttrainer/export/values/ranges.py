"""Ranges as long as a size: `log_probabilities[range(len(y)), y]`, where the places are a tensor in a graph.

    targets[list(range(n)), classes] = 1.0

What is asked of one, such as whether a number is in it, is asked of its bounds; a loop in steps of several (`range(0, n, 64)`)
asks each time whether there are more. Whatever else Python does with one has to know the size.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from orttrainer.export.values.stand_ins import Kind
from orttrainer.export.values.told import PASSED, UNTOLD, is_at

if TYPE_CHECKING:
    from orttrainer.export.caught import Errors

__all__ = ["Range", "is_symbolic"]


class _Type(Kind):
    """The type that Python's `range` is in the code that is traced."""

    def __call__(cls, *bounds):
        symbolic = any(isinstance(bound, torch.SymInt) for bound in bounds)
        return super().__call__(*bounds) if symbolic else range(*bounds)

    def __instancecheck__(cls, x):
        return type(x) in (range, cls)


class Range(Sequence, metaclass=_Type):
    """`range` of numbers of which a trace has symbols.

    Attributes:
        start, stop, step: as those of `range`.
        size: how many numbers it has.
        is_listed: `list` of one is one, so that nothing is asked for. Else the trace begins anew with such lists.
        errors: of the trace, where something is looked up by one.
    """

    builtin, is_listed = range, True
    errors: Errors | None = None

    def __init__(self, *bounds):
        range(*[bound if not isinstance(bound, torch.SymInt) else 1 for bound in bounds])  # what it refuses
        self.start, self.stop, self.step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        if self.step == 0:
            range(0, 1, 0)
        self.size = torch.sym_max(-((self.start - self.stop) // self.step), 0)

    def known(self) -> range:
        """Python's, which the trace depends on."""
        return range(*map(operator.index, (self.start, self.stop, self.step)))

    def places(self) -> torch.Tensor:
        """The numbers of it, int64."""
        return torch.arange(self.start, self.start + self.size * self.step, self.step)

    def __len__(self) -> int:
        caller = sys._getframe(1)
        passed_on = caller.f_code.co_filename.startswith(PASSED) and is_at(caller, "CALL_FUNCTION_EX")
        if passed_on or is_at(caller, "BINARY_SUBSCR", "STORE_SUBSCR"):
            return 0  # torch looks for tensors in it, of which there is none
        return operator.index(self.size)

    def __bool__(self) -> bool:
        return bool(self.size > 0)

    def __eq__(self, other) -> bool:
        """Whether it is a range of the same numbers."""
        if not isinstance(other, Range):
            return NotImplemented
        size = other.size if is_symbolic(other) else len(other)
        if self.size != size or size == 0:
            return bool(self.size == size)
        return bool(self.start == other.start and (size == 1 or self.step == other.step))

    def __hash__(self) -> int:
        if self.errors is not None:
            self.errors.by_size = True
        return hash(self.known())

    def __repr__(self) -> str:
        steps = () if isinstance(self.step, int) and self.step == 1 else (self.step,)
        return f"range({', '.join(map(repr, (self.start, self.stop, *steps)))})"

    def __contains__(self, x) -> bool:
        if not isinstance(x, (int, torch.SymInt)):
            return x in self.known()
        first, last = (self.start, self.stop - 1) if self.step > 0 else (self.stop + 1, self.start)
        return bool(first <= x and x <= last and (x - self.start) % self.step == 0)

    def count(self, x) -> int:
        return int(x in self) if isinstance(x, (int, torch.SymInt)) else self.known().count(x)

    def index(self, x):
        if not isinstance(x, (int, torch.SymInt)):
            return self.known().index(x)
        if x not in self:
            raise ValueError(f"{x} is not in range")
        return (x - self.start) // self.step

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = self._within(index)
            return Range(self.start + start * self.step, self.start + stop * self.step, self.step * step)
        if not isinstance(index, (int, torch.SymInt)):
            return self.known()[index]
        if not -self.size <= index < self.size:
            raise IndexError("range object index out of range")
        return self.start + (index if index >= 0 else self.size + index) * self.step

    def _within(self, part: slice) -> tuple:
        """`slice.indices` of its size."""
        step = 1 if part.step is None else part.step
        if step == 0:
            return part.indices(0)
        least, most = (0, self.size) if step > 0 else (-1, self.size - 1)
        first, last = (least, most) if step > 0 else (most, least)

        def place(bound, by_default):
            if bound is None:
                return by_default
            return torch.sym_max(bound + self.size, least) if bound < 0 else torch.sym_min(bound, most)

        return place(part.start, first), place(part.stop, last), step

    def __iter__(self) -> Iterator[int]:
        caller = sys._getframe(1)
        if not self.is_listed and "list" in caller.f_code.co_names and is_at(caller, "CALL"):
            raise TypeError(f"list() of as many as {UNTOLD}")
        match self.start, self.stop, self.step:
            case int(start), torch.SymInt() as stop, int(step) if step > 1:
                return itertools.takewhile(lambda number: number < stop, itertools.count(start, step))
        return iter(self.known())

    def __reversed__(self) -> Iterator[int]:
        return reversed(self.known())

    def __copy__(self) -> Range:
        return self

    def __deepcopy__(self, memo: dict) -> Range:
        return self

    def __reduce__(self) -> tuple:
        known = self.known()
        return range, (known.start, known.stop, known.step)


def is_symbolic(x: object) -> bool:
    """Whether it is such a range."""
    return type(x) is Range
