"""Where arithmetic with numbers that only a batch tells is defined: beyond that Python raises, as of math.log(-1.0) or 1 / 0.

A graph would go on with NaN or infinity, where forward may catch the error. So it depends on whether one is raised.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING
from unittest import mock

import torch

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.values.told import PASSED, place, shown

if TYPE_CHECKING:
    from orttrainer.export.values.conditions import Followed

__all__ = ["Domains", "is_value", "value_of"]


class Domains:
    """Arithmetic within a trace: asks whether Python would raise, and raises then, too.

    Args:
        followed: the decisions of the trace.
    """

    def __init__(self, followed: Followed):
        self._followed = followed

    def number(self, tensor: torch.Tensor, function: Callable, numbers: Sequence) -> torch.SymFloat:
        """The number that `tensor` holds, float64 [], which is `function(*numbers)`."""
        hints = self._followed.hints
        if hints is None:
            return tensor.item()
        with hints.passed():  # forward does not take this one
            result = tensor.item()
        hints.computed(result, function, numbers, tensor)
        return result

    def check(self, function: Callable, numbers: Sequence, given: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Raise what `function` of `math` does: where it has no number, or an infinite one, for the numbers `given`."""
        none = result.isnan() & ~functools.reduce(operator.or_, [x.isnan() for x in given])
        infinite = result.isinf() & functools.reduce(operator.and_, [x.isfinite() for x in given])
        raises = self.number((none | infinite).double(), lambda *known: float(_raises(function, known)), numbers)
        if self._decides(lambda: raises > 0.5):
            function(*self._followed.hints.known(numbers))

    @contextlib.contextmanager
    def of_operators(self) -> Iterator[None]:
        """Within the block, `/`, `//`, `%` and `**` of the user's code raise as Python's; those of NumPy's numbers never do."""
        with contextlib.ExitStack() as stack:
            for kind in (torch.SymInt, torch.SymFloat):
                for name, checked in _CHECKED.items():
                    for method, turned in ((f"__{name}__", False), (f"__r{name}__", True)):
                        theirs = getattr(kind, method)
                        stack.enter_context(
                            mock.patch.object(kind, method, self._operator(name, theirs, checked, turned))
                        )
            for method, same in (("__eq__", True), ("__ne__", False)):
                for kind in (torch.SymBool, torch.SymInt, torch.SymFloat):
                    compared = self._compared(getattr(kind, method), same)
                    stack.enter_context(mock.patch.object(kind, method, compared))
            for function in (math.ceil, math.floor, math.trunc):
                method = f"__{function.__name__}__"
                whole = self._whole(getattr(torch.SymFloat, method), function)
                stack.enter_context(mock.patch.object(torch.SymFloat, method, whole))
            yield

    def _operator(self, name: str, theirs: Callable, checked: Callable, turned: bool) -> Callable:
        def computed(number, other):
            if _is_users(sys._getframe(1)):
                given = (other, number) if turned else (number, other)
                checked(self, *given)
                if name in _OF_FLOATS and all(isinstance(x, _NUMBERS) for x in given):
                    return self.quotient(name, *given)
            return theirs(number, other)

        return computed

    def quotient(self, name: str, a, b):
        """`a // b` ("floordiv") or `a % b` ("mod"). Of floats torch's symbols round the quotient, and have no remainder."""
        function = getattr(operator, name)
        if any(isinstance(x, (float, torch.SymFloat)) for x in (a, b)):
            return self.number(_OF_FLOATS[name](value_of(a), value_of(b)), function, [a, b])
        return function(a, b)

    def _compared(self, theirs: Callable, same: bool) -> Callable:
        """`x == x`, which is whether it is NaN, and `n == True`; torch knows neither."""

        def compared(number, other):
            if isinstance(other, bool):
                if isinstance(number, torch.SymBool):
                    return number if other == same else torch.sym_not(number)
                other = int(other)
            if not (isinstance(other, torch.SymFloat) and is_value(number) and number.node.expr == other.node.expr):
                return theirs(number, other)
            nan = self.number(value_of(number).isnan().double(), lambda x: float(math.isnan(x)), [number])
            return nan < 0.5 if same else nan > 0.5

        return compared

    def _whole(self, theirs: Callable, function: Callable) -> Callable:
        def computed(number):
            if not _is_users(sys._getframe(1)) or not is_value(number):
                return theirs(number)
            self.check_finite(function, number)
            whole = getattr(torch, function.__name__)(value_of(number))
            # By truncation, as of `int()`: of floors torch can assert nothing.
            return torch.sym_int(self.number(whole, lambda x: float(function(x)), [number]))

        return computed

    def check_divisor(self, number, divisor) -> None:
        """Raise ZeroDivisionError where it is 0."""
        if is_value(divisor) and isinstance(number, _NUMBERS) and self._decides(lambda: divisor == 0, divisor):
            operator.truediv(1, 0)

    def check_finite(self, function: Callable, number) -> None:
        """Raise what `function`, which makes whole numbers, does of NaN and infinity."""
        if isinstance(number, torch.SymFloat) and is_value(number):
            value = value_of(number)
            raises = self.number((~value.isfinite()).double(), lambda known: float(not math.isfinite(known)), [number])
            if self._decides(lambda: raises > 0.5):
                function(*self._followed.hints.known([number]))

    def check_power(self, base, exponent) -> None:
        """Raise ZeroDivisionError for 0 to a negative power; and an error of our own for a complex one."""
        if not is_value(base) or not isinstance(exponent, (int, float)):
            return
        if exponent < 0 and self._decides(lambda: base == 0, base):
            operator.pow(0, -1)
        if exponent % 1 and self._decides(lambda: base < 0, base):
            raise UnsupportedModelError(
                f"forward makes a complex number at {shown(*place())}: a negative number, which only a batch tells, to the power "
                f"of {exponent}. Compute with tensors instead."
            )

    def _decides(self, ask: Callable[[], torch.SymBool], divisor: object = None) -> bool:
        """What is answered; False where forward was not observed to be told the numbers."""
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # here: with it comes sympy

        hints = self._followed.hints
        if hints is not None and hints.is_of_numpy(divisor):
            return False
        try:
            with contextlib.nullcontext() if hints is None else hints.raising():
                return bool(ask())
        except GuardOnDataDependentSymNode as error:
            if hints is None:  # to be traced again with the numbers, whatever forward catches
                self._followed.errors.of_numbers(error)
                raise
            return False


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_CHECKED = {
    "truediv": Domains.check_divisor,
    "floordiv": Domains.check_divisor,
    "mod": Domains.check_divisor,
    "pow": Domains.check_power,
}
_OF_FLOATS = {"floordiv": functools.partial(torch.div, rounding_mode="floor"), "mod": torch.remainder}


def _is_users(frame: FrameType) -> bool:
    """Whether it is neither ours nor torch's."""
    return not frame.f_code.co_filename.startswith(PASSED)


def _raises(function: Callable, numbers: Sequence[float]) -> bool:
    try:
        function(*numbers)
    except (ArithmeticError, ValueError):
        return True
    return False


def is_value(x: object) -> bool:
    """Whether a trace has, for a number, a symbol that depends on a tensor's values."""
    if not isinstance(x, (torch.SymInt, torch.SymFloat)):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # here: with it comes sympy

    return bool(free_unbacked_symbols(x))


def value_of(number: float | torch.SymInt | torch.SymFloat) -> torch.Tensor:
    """The number as a tensor, float64 []."""
    return torch.full((), number, dtype=torch.float64)
