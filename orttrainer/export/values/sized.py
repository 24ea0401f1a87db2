"""Tensors of one number that follows from sizes, in a trace: what forward computes of those, of constants and integer buffers.

    frames = torch.ceil((x.shape[-1] - self.kernel_size) / self.stride).long()      F.pad(x, (0, frames * self.stride - x.shape[-1]))

Where Python takes the number, or a function of torch's takes it for a size, it is an expression of sizes, as if Python had
computed it. A tensor's item is a number that torch knows nothing of, and no size that is computed of it is one of another input.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from orttrainer.export.values.sizes import is_never_negative

__all__ = ["Sized", "computed", "follows"]

_WHOLE = torch.int64
# Less than this have quotients above and below where a dtype, by some sums and differences of quotients and whole numbers, rounds
# none to a whole number or across one.
_MOST = {torch.float32: 2**21, torch.float64: 2**50}


class _Ratio(NamedTuple):
    """above / below, whole numbers of which the latter is positive."""

    above: int | torch.SymInt
    below: int | torch.SymInt = 1


class Sized:
    """One such number, which is computed where it is asked for: that may ask something of sizes.

    Args:
        form: gives the ratio that it is, or None, of those of the `operands`, numbers or others such as this.
        dtype: of the tensor.
        version: of the tensor that stands for it: what was written to since is another.
        buffers: that it comes from.
    """

    def __init__(self, form: Callable, operands: Sequence, dtype: torch.dtype, version: int, buffers: frozenset[str]):
        self._form, self._operands, self._dtype = form, operands, dtype
        self.version, self.buffers = version, buffers

    @functools.cached_property
    def _ratio(self) -> _Ratio | None:
        operands = [x._ratio if isinstance(x, Sized) else _Ratio(x) for x in self._operands]
        ratio = None if None in operands else self._form(*operands)
        if ratio is not None and self._dtype != _WHOLE:
            most = _MOST[self._dtype]
            return ratio if all(_is_less(abs(n), most) for x in (*operands, ratio) for n in x) else None
        return ratio

    @property
    def whole(self) -> int | torch.SymInt | None:
        """The number, if it is a whole one, and known."""
        return _whole(self._ratio)


def follows(tensor: torch.Tensor) -> Sized | None:
    """What `tensor` stands for, if that follows from sizes."""
    sized = getattr(tensor, "sized", None)
    return sized if sized is not None and sized.version == tensor._version else None


def computed(func: Callable, args: Sequence, kwargs: dict, result: Any, operand: Callable) -> Sized | None:
    """What the `result` of a call stands for, if that follows from sizes.

    Args:
        operand: gives an argument as a whole number or a `Sized`, and the buffers that it comes from; None where it is neither.
    """
    if not isinstance(result, torch.Tensor) or result.dim() or result.dtype not in (_WHOLE, *_MOST):
        return None
    name = getattr(func, "__name__", "").strip("_")
    form, given, options = _FORMS.get(name), list(args), dict(kwargs)
    if name in _DIVISIONS:
        form = _ROUNDED.get(options.pop("rounding_mode", None))
    elif name in _CONVERSIONS:
        form, given, options = (_truncated if result.dtype == _WHOLE else _same), given[:1], {}
    elif name in _BOUNDS:
        given += [options.pop(bound, None) for bound in ("min", "max")[len(given) - 1 :]]
        form, given = _bounded([x is not None for x in given[1:]]), [x for x in given if x is not None]
    found = [operand(x) for x in given]
    if form is None or options or None in found or not any(isinstance(x, (torch.SymInt, Sized)) for x, _ in found):
        return None
    numbers, buffers = zip(*found)
    return Sized(form, numbers, result.dtype, result._version, frozenset().union(*buffers))


# ---------------------------------------------------------------- numbers


def _is_less(number: int | torch.SymInt, most: int) -> bool:
    """Whether it is; of a size the trace depends on it."""
    return bool(number < most)


def _whole(x: _Ratio | None) -> int | torch.SymInt | None:
    return x.above if x is not None and isinstance(x.below, int) and x.below == 1 else None


def _of_whole(function: Callable) -> Callable:
    """A form of whole numbers, of which the function may be None."""

    def form(*given: _Ratio) -> _Ratio | None:
        numbers = [_whole(x) for x in given]
        result = None if None in numbers else function(*numbers)
        return None if result is None else _Ratio(result)

    return form


def _same(x: _Ratio) -> _Ratio:
    return x


def _added(a: _Ratio, b: _Ratio) -> _Ratio | None:
    """Of two quotients the sum may be rounded to a whole number, or from one."""
    a, b = (b, a) if _whole(a) is None else (a, b)
    return None if _whole(a) is None else _Ratio(a.above * b.below + b.above, b.below)


def _negated(x: _Ratio) -> _Ratio:
    return _Ratio(-x.above, x.below)


def _floor(x: _Ratio) -> _Ratio:
    return x if _whole(x) is not None else _Ratio(x.above // x.below)


def _ceil(x: _Ratio) -> _Ratio:
    return _negated(_floor(_negated(x)))


def _truncated(x: _Ratio) -> _Ratio:
    return _floor(x) if is_never_negative(x.above) or x.above >= 0 else _ceil(x)


def _quotient(a: _Ratio, b: _Ratio) -> _Ratio | None:
    above, below = _whole(a), _whole(b)
    return _Ratio(above, below) if above is not None and below is not None and below > 0 else None


def _bounded(given: Sequence[bool]) -> Callable:
    """`clamp` of a number and those of its two bounds that are given."""
    functions = [function for function, there in zip((torch.sym_max, torch.sym_min), given) if there]
    return _of_whole(lambda x, *bounds: functools.reduce(lambda n, of: of[0](n, of[1]), zip(functions, bounds), x))


def _turned(form: Callable) -> Callable:
    return lambda a, b: form(b, a)


def _after(first: Callable, second: Callable) -> Callable:
    def form(*given: _Ratio) -> _Ratio | None:
        return None if (ratio := first(*given)) is None else second(ratio)

    return form


_DIVISIONS = {"div", "divide"}
_ROUNDED = {None: _quotient, "floor": _after(_quotient, _floor), "trunc": _after(_quotient, _truncated)}
_CONVERSIONS = {"clone", "contiguous", "cpu", "detach", "double", "float", "long", "squeeze", "to", "type"}
_BOUNDS = {"clamp", "clip"}
_SUBTRACTED = lambda a, b: _added(a, _negated(b))  # noqa: E731
_DIVIDED = _ROUNDED["floor"]
_REMAINDER = _of_whole(lambda a, b: a % b if b > 0 else None)
_FORMS = {
    **dict.fromkeys(("add", "radd"), _added),
    **dict.fromkeys(("sub", "subtract"), _SUBTRACTED),
    "rsub": _turned(_SUBTRACTED),
    **dict.fromkeys(("mul", "multiply", "rmul"), _of_whole(operator.mul)),
    **dict.fromkeys(("truediv", "true_divide"), _quotient),  # n / x is n times 1 / x, which is rounded first
    **dict.fromkeys(("floor_divide", "floordiv"), _DIVIDED),
    "rfloordiv": _turned(_DIVIDED),
    **dict.fromkeys(("remainder", "mod"), _REMAINDER),
    "rmod": _turned(_REMAINDER),
    **dict.fromkeys(("neg", "negative"), _negated),
    "ceil": _ceil,
    "floor": _floor,
    **dict.fromkeys(("trunc", "fix"), _truncated),
    "maximum": _of_whole(torch.sym_max),
    "minimum": _of_whole(torch.sym_min),
    **dict.fromkeys(("tensor", "as_tensor", "scalar_tensor"), _same),
}
