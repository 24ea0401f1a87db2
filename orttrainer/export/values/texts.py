"""Texts that forward makes of numbers which are not known while it is traced: f"loss {x.mean():.3f}", str(int(n)), repr(x).

Nearly all of them are for a log, so that a trace makes them of numbers that stand in for these. Whether forward computes or
decides by a text is what further traces tell, which make the texts of other numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.values.domains import is_value
from orttrainer.export.values.told import UNTOLD, by_torch, place, shown

__all__ = ["Texts"]

_OTHERS = (
    (-1.5, -1),
    (0.25, 0),
    (1.0, 1),
    (2e30, 2),
)  # a float and a whole number; the first trace has NaN and no number


class Texts:
    """What numbers are as texts, in the traces of one module.

    Attributes:
        exact: whole numbers are as they were observed, which the graph then depends on.
        by_size: sizes among them.
    """

    def __init__(self):
        self.exact = self.by_size = False
        self._place: tuple[str, int] | None = None  # where the last trace made the first of a number that stands in
        self._others: tuple[float, int] | None = None

    def of(self, number: torch.Tensor | torch.SymInt | torch.SymFloat, spec: str = "") -> str:
        """The text of a number: of a tensor of one element, or of a symbol."""
        if self.exact and not _is_float(number):
            return format(int(number), spec)
        return self.of_other(number, spec)

    def of_other(self, values: torch.Tensor | torch.SymInt | torch.SymFloat, spec: str = "") -> str:
        """The text of a number that stands in for one of these, whatever they are."""
        self._place = self._place or place()
        if _is_float(values):
            return format(math.nan if self._others is None else self._others[0], spec)
        return UNTOLD if self._others is None else format(self._others[1], spec)

    def of_size(self, size: torch.SymInt, spec: str, theirs: str) -> str:
        """The text of a size that varies: by it forward may look up what it keeps for each, so that two have two texts."""
        if self.exact:
            self.by_size = True
            return format(int(size), spec)
        self._place = self._place or place()
        return theirs if self._others is None else format(size.node.hint + self._others[1], spec)

    @contextlib.contextmanager
    def of_symbols(self) -> Iterator[None]:
        """Within the block, these have texts of numbers where forward makes them; torch has its own."""
        with contextlib.ExitStack() as stack:
            for kind in (torch.SymInt, torch.SymFloat):
                for name in ("__repr__", "__str__", "__format__"):
                    theirs = getattr(kind, name)
                    stack.enter_context(mock.patch.object(kind, name, self._of_symbol(theirs)))
            yield

    def checked(self, trace: Callable[[], Any], computes: Callable[[Any], Any]) -> Any:
        """What `trace` gives; where texts make a difference to what `computes` finds in that, those of whole numbers are exact.

        Raises:
            UnsupportedModelError: those of other numbers make one, too.
        """
        self._place = self._others = None
        try:
            first = trace()
        except Exception as error:
            self.exact |= UNTOLD in str(error)  # as a key, or in a name
            raise
        if self._place is None:
            return first
        where, expected = self._place, computes(first)
        for self._others in _OTHERS:
            try:
                same = computes(trace()) == expected
            except Exception:  # the module's own, such as a key that is not there, or torch's
                same = False
            if not same:
                self._others = None
                return self._of_exact(trace, computes, where)
        self._others = None
        return first

    def _of_exact(self, trace: Callable[[], Any], computes: Callable[[Any], Any], where: tuple[str, int]) -> Any:
        if self.exact:
            raise UnsupportedModelError(
                f"forward makes a text of a tensor's value at {shown(*where)}, and computes or decides by it; a graph would have "
                "that of one batch for ever. Compute with the number itself, as a key of a dictionary, too (table[int(x)], "
                "x.item() < 0)."
            )
        self.exact = True
        return self.checked(trace, computes)

    def _of_symbol(self, theirs: Callable[..., str]) -> Callable[..., str]:
        def text(number: torch.SymInt | torch.SymFloat, spec: str = "") -> str:
            if by_torch() or not torch.compiler.is_exporting() or not number.node.is_symbolic():
                return theirs(number, *[spec] * (theirs.__name__ == "__format__"))
            if is_value(number) or isinstance(number, torch.SymFloat):
                return self.of(number, spec)
            return self.of_size(number, spec, number.node._graph_repr())

        return text


def _is_float(number: torch.Tensor | torch.SymInt | torch.SymFloat) -> bool:
    return number.is_floating_point() if isinstance(number, torch.Tensor) else isinstance(number, torch.SymFloat)
