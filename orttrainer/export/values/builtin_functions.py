"""Functions of Python's that forward calls with numbers which only a batch tells: `len`, `isinstance`, `min`, `math.cos`.

    rows = len(x)          beta = min(1.0, self.steps.item() / 1000)          rate = 0.5 * (1 + math.cos(self.steps.item()))

They must have, or return, numbers, so that an exporter would write those of the first batch into the graph, or none.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

__all__ = ["is_value", "scopes", "symbolic", "value_of"]

_NAMES = (
    "acos", "asin", "atan", "atan2", "cos", "cosh", "erf", "exp", "expm1", "hypot", "log", "log10", "log1p", "log2", "pow", "sin",
    "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
# The functions of `math` by torch's. NumPy's call a number's method of the same name.
_MATH = {name: getattr(torch, name) for name in _NAMES} | {"degrees": torch.rad2deg, "radians": torch.deg2rad}
_NUMBERS = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}  # of the types that symbols stand for
_TRUTHS = {name: getattr(torch, name) for name in ("isfinite", "isinf", "isnan")}


@contextlib.contextmanager
def symbolic(wrapper: torch.nn.Module) -> Iterator[None]:
    """Let the functions of the user's code stay symbols where they are given some; with hints also `int` and `float`."""
    hints = wrapper.followed.hints
    names = {"len": _len, "divmod": _divmod, "round": _round, "isinstance": _isinstance}
    names |= {"min": _least(min, hints), "max": _least(max, hints)}
    if hints is not None and hints.builtins:
        from orttrainer.export.values.hints import BUILTINS  # here: with it comes sympy

        names |= BUILTINS
    placed = [(scope, name) for scope in scopes(wrapper) for name in names if name not in scope]
    with contextlib.ExitStack() as stack:
        for name, function in _TRUTHS.items():
            stack.enter_context(mock.patch.object(math, name, _truth(getattr(math, name), function, hints)))
        for name, function in _MATH.items():
            computed = _of_values(getattr(math, name), function, hints)
            stack.enter_context(mock.patch.object(math, name, computed))
            for kind in (torch.SymInt, torch.SymFloat):
                stack.enter_context(mock.patch.object(kind, name, computed, create=True))
        for scope, name in placed:
            scope[name] = names[name]
        try:
            yield
        finally:
            for scope, name in placed:
                del scope[name]


def scopes(wrapper: torch.nn.Module) -> list[dict]:
    """Globals of forward and loss, and of the other code that they run, but for torch's and the like."""
    functions = [getattr(type(m), "forward", None) for m in wrapper.modules()] + [wrapper.loss_fn]
    found = [getattr(function, "__globals__", None) for function in functions]
    names = _beside(found) if wrapper.runs is None else wrapper.runs
    found += [vars(module) for name in sorted(names) if hasattr(module := sys.modules.get(name), "__dict__")]
    return [*{id(scope): scope for scope in found if scope is not None and _is_user_code(scope)}.values()]


def _beside(scopes: list[dict | None]) -> set[str]:
    """The modules of Python's of the same packages."""
    packages = {scope["__name__"].partition(".")[0] for scope in scopes if scope is not None and "__name__" in scope}
    return {name for name in [*sys.modules] if name.partition(".")[0] in packages}


def _is_user_code(scope: dict) -> bool:
    root = scope.get("__name__", "").partition(".")[0]
    return root not in ("torch", "orttrainer", "numpy") and root not in sys.stdlib_module_names


def _len(sized):
    return sized.shape[0] if isinstance(sized, torch.Tensor) and sized.dim() else len(sized)


def _isinstance(x, kinds):
    return isinstance(x, kinds) or (type(x) in _NUMBERS and isinstance(_NUMBERS[type(x)], kinds))


def _divmod(a, b):
    symbols = any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in (a, b))
    return (a // b, a % b) if symbols else divmod(a, b)


def _round(number, ndigits=None):
    return round(float(number) if isinstance(number, torch.SymFloat) else number, ndigits)  # which is one batch's then


def _least(builtin: Callable, hints) -> Callable:
    """`min` or `max`, without a decision where a float among the numbers is one of a tensor's values."""
    chosen = {min: torch.minimum, max: torch.maximum}[builtin]

    def call(*given, **options):
        numbers = given if len(given) > 1 else given[0]
        values = type(numbers) in (list, tuple) and [
            x for x in numbers if isinstance(x, torch.SymFloat) and is_value(x)
        ]
        if options or not values:
            return builtin(*given, **options)
        return _number(functools.reduce(chosen, map(value_of, numbers)), lambda *known: builtin(known), numbers, hints)

    return call


def _of_values(function: Callable, on_tensors: Callable, hints) -> Callable:
    """A function of `math`, by torch's where a number is one of a tensor's values; `math.log(x, base)` by two."""

    def call(*numbers):
        if not any(map(is_value, numbers)):
            return function(*numbers)
        given = [value_of(x) for x in numbers]
        if on_tensors is torch.log and len(given) == 2:
            return _number(torch.log(given[0]) / torch.log(given[1]), function, numbers, hints)
        return _number(on_tensors(*given), function, numbers, hints)

    return call


def _truth(function: Callable, on_tensors: Callable, hints) -> Callable:
    """A function of `math` that tells something of one number; the answer decides, as a comparison would."""
    number = _of_values(lambda x: float(function(x)), lambda x: on_tensors(x).double(), hints)
    return lambda x: number(x) > 0.5 if is_value(x) else function(x)


def _number(tensor: torch.Tensor, function: Callable, numbers: Sequence, hints) -> torch.SymFloat:
    """The number that `tensor` holds, which is `function(*numbers)`."""
    result = tensor.item()
    if hints is not None:
        hints.computed(result, function, numbers, tensor)
    return result


def is_value(x: object) -> bool:
    """Whether a trace has, for a number, a symbol that depends on a tensor's values."""
    if not isinstance(x, (torch.SymInt, torch.SymFloat)):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # here: with it comes sympy

    return bool(free_unbacked_symbols(x))


def value_of(number: float | torch.SymInt | torch.SymFloat) -> torch.Tensor:
    """The number as a tensor, float64 []."""
    return torch.full((), number, dtype=torch.float64)
