"""Functions of Python's that forward calls with numbers which only a batch tells: `len`, `isinstance`, `min`, `math.cos`.

    rows = len(x)     scale = 1 / math.sqrt(x.shape[1])     rate = 0.5 * (1 + math.cos(math.pi * self.steps.item() / 1000))

They must have, or return, numbers, so that an exporter would write those of the first batch into the graph, or none.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from unittest import mock

import torch

from orttrainer.export.values.builtin_types import KINDS, exact_types, types_of
from orttrainer.export.values.domains import Domains, is_value, value_of
from orttrainer.export.values.ranges import Range, is_symbolic
from orttrainer.export.values.stand_ins import Function
from orttrainer.export.values.told import UNTOLD, by_torch, formats
from orttrainer.export.values.whole_numbers import spelled_out

__all__ = ["scopes", "symbolic"]

_NAMES = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "cosh", "erf", "erfc", "exp", "exp2",
    "expm1", "fmod", "hypot", "lgamma", "log", "log10", "log1p", "log2", "pow", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
# The functions of `math` by torch's. NumPy's call a number's method of the same name.
_MATH = {name: getattr(torch, name) for name in _NAMES}
_MATH |= {"degrees": torch.rad2deg, "fabs": torch.abs, "radians": torch.deg2rad}
_MATH["cbrt"] = lambda x: torch.copysign(x.abs().pow(1 / 3), x)
_EVERYWHERE = {  # defined for all finite numbers
    "asinh", "atan", "atan2", "cbrt", "copysign", "cos", "degrees", "erf", "erfc", "fabs", "hypot", "radians", "sin", "tan", "tanh",
}  # fmt: skip
_ABOVE = {"log": 0, "log10": 0, "log1p": -1, "log2": 0}  # defined for all finite numbers that are more
_CONVERTED = (torch.SymInt, int), (torch.SymFloat, int), (torch.SymFloat, float), (torch.SymInt, float)


@contextlib.contextmanager
def symbolic(wrapper: torch.nn.Module) -> Iterator[None]:
    """Let the functions of the user's code stay symbols where they are given some; with hints also `int`, `float` and `list`."""
    from torch._export import non_strict_utils  # here: with it comes sympy

    domains, hints = Domains(wrapper.followed), wrapper.followed.hints
    of_python = {
        len: _len,
        divmod: _divmod(domains),
        pow: _power,
        round: _round(domains),
        isinstance: _isinstance,
        min: _least(min, domains),
        max: _least(max, domains),
    }
    builtins = {function.__name__: Function(function, call) for function, call in of_python.items()}
    builtins["range"] = Range
    builtins |= types_of(domains, of_numbers=hints is not None and hints.builtins)
    of_math = {
        name: _of_values(getattr(math, name), by, domains, name not in _EVERYWHERE) for name, by in _MATH.items()
    }
    of_math |= {name: _truth(getattr(math, name), by, domains) for name, by in _TRUTHS.items()}
    of_math |= {"dist": _dist(math.dist), "fsum": _sum(math.fsum, domains), "modf": _modf(math.modf, domains)}
    of_math |= {"pow": _pow(of_math["pow"]), "sqrt": _sqrt(of_math["sqrt"]), "isqrt": _isqrt(math.isqrt)}
    of_math = {name: Function(getattr(math, name), call) for name, call in of_math.items()}
    # Also where they have other names, as `from math import log as ln` gives them.
    stand_ins = {getattr(math, name): function for name, function in of_math.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(spelled_out())
        stack.enter_context(domains.of_operators())
        stack.enter_context(mock.patch.multiple(Range, is_listed=hints is not None, errors=wrapper.followed.errors))
        for name, of in (("__float__", float), ("__index__", int)):  # `weights[n % 2 == 0]`; torch has `int` alone
            truth = functools.partialmethod(_of_truth, of)
            stack.enter_context(mock.patch.object(torch.SymBool, name, truth, create=True))
        for kind, builtin in _CONVERTED if hints is None else ():
            method = f"__{builtin.__name__}__"
            unknown = _untold(builtin, getattr(kind, method, lambda number: float(operator.index(number))))
            stack.enter_context(mock.patch.object(kind, method, unknown, create=True))
        for name, function in of_math.items():
            stack.enter_context(mock.patch.object(math, name, function))
        # torch.export has a power of its own, by `**`, which would take the place of ours.
        stack.enter_context(mock.patch.object(non_strict_utils, "math", SimpleNamespace(**vars(math)), create=True))
        for name in _MATH:
            for kind in (torch.SymInt, torch.SymFloat):  # for NumPy, whose functions raise nothing
                computed = _of_values(getattr(math, name), _MATH[name], domains, checked=False)
                stack.enter_context(mock.patch.object(kind, name, computed, create=True))
        if (statistics := sys.modules.get("statistics")) is not None:  # else nobody calls it
            for name in ("fmean", "mean"):
                theirs = getattr(statistics, name)
                stand_ins[theirs] = Function(theirs, _mean(theirs))
                stack.enter_context(mock.patch.object(statistics, name, stand_ins[theirs]))
        stand_ins |= stack.enter_context(exact_types())
        stack.enter_context(mock.patch.object(random.Random, "seed", _seed(random.Random.seed)))
        for scope in scopes(wrapper):
            imported = {
                name: stand_ins[x]
                for name, x in scope.items()
                if isinstance(x, (BuiltinFunctionType, FunctionType, type)) and x in stand_ins
            }
            own = {name: function for name, function in builtins.items() if name not in scope}
            stack.enter_context(mock.patch.dict(scope, imported | own))
        yield


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
    if is_symbolic(sized):
        return sized.size
    return sized.shape[0] if isinstance(sized, torch.Tensor) and sized.dim() else len(sized)


def _isinstance(x, kinds):
    return isinstance(x, kinds) or (type(x) in KINDS and isinstance(KINDS[type(x)](), kinds))


def _untold(builtin: type, theirs: Callable) -> Callable:
    """`int` or `float` of sizes, and of what is computed of them, which gives no symbol: to be traced again, with hints, where it does.

    But not for a text, "%d" % n, which needs a number.
    """

    def converted(number):
        if _is_of_sizes(number) and number.node.expr.free_symbols and not by_torch() and not formats():
            raise TypeError(f"{builtin.__name__}() of {UNTOLD}")
        return theirs(number)

    return converted


def _of_truth(truth: torch.SymBool, number: type):
    """1 or 0, by a decision."""
    return number(bool(truth))


def _seed(theirs: Callable) -> Callable:
    """That of a generator of Python's, which has to know a number; what it draws then is the same for each batch with it."""

    def seed(generator, a=None, version=2):
        theirs(generator, operator.index(a) if isinstance(a, torch.SymInt) else a, version)

    return seed


def _divmod(domains: Domains) -> Callable:
    def call(a, b):
        if not any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in (a, b)):
            return divmod(a, b)
        domains.check_divisor(a, b)
        return domains.quotient("floordiv", a, b), domains.quotient("mod", a, b)

    return call


def _power(base, exp, mod=None):
    """`pow`; modulo a third one of numbers that the trace depends on."""
    return pow(base, exp) if mod is None else pow(*map(operator.index, (base, exp, mod)))


def _round(domains: Domains) -> Callable:
    def call(number, ndigits=None):
        whole = isinstance(number, torch.SymInt)
        if whole and (ndigits is None or ndigits >= 0):
            return number
        if not whole and not is_value(number):
            if isinstance(number, torch.SymFloat) and ndigits is not None:  # of sizes: one batch's then
                number = float(number)
            return round(number, ndigits)
        domains.check_finite(round, number)
        digits, known = ndigits or 0, lambda x: float(round(x, ndigits or 0))
        value, power = value_of(number), 10.0 ** abs(digits)
        rounded = torch.round(value * power) / power if digits >= 0 else torch.round(value / power) * power
        result = domains.number(rounded, known, [number])
        return torch.sym_int(result) if whole or ndigits is None else result

    return call


def _sum(function: Callable, domains: Domains) -> Callable:
    """`math.fsum`: what rounding takes from the sum is summed beside it."""

    def call(numbers):
        numbers = list(numbers)
        if not any(map(_is_symbol, numbers)):
            return function(numbers)
        total = rest = torch.zeros((), dtype=torch.float64)
        for x in map(value_of, numbers):
            before, total = total, total + x
            added = total - before
            rest = rest + (before - (total - added)) + (x - added)
        return domains.number(
            torch.where(total.isfinite(), total + rest, total), lambda *known: function(known), numbers
        )

    return call


def _mean(function: Callable) -> Callable:
    def call(data, *weights, **named):
        data = list(data)
        plain = weights or named or not any(map(_is_symbol, data))
        return function(data, *weights, **named) if plain else sum(data) / len(data)

    return call


def _modf(function: Callable, domains: Domains) -> Callable:
    def call(number):
        if not is_value(number):
            return function(number)
        whole = torch.trunc(x := value_of(number))
        parts = torch.where(x.isinf(), 0.0, x - whole), whole
        return tuple(
            domains.number(part, lambda known, k=k: function(known)[k], [number]) for k, part in enumerate(parts)
        )

    return call


def _dist(function: Callable) -> Callable:
    def call(p, q):
        p, q = list(p), list(q)
        apart = [a - b for a, b in zip(p, q, strict=True)] if any(map(is_value, p + q)) else None
        return function(p, q) if apart is None else math.sqrt(sum(x * x for x in apart))

    return call


def _least(builtin: Callable, domains: Domains) -> Callable:
    """`min` or `max`, without a decision where a float among the numbers is one of a tensor's values."""
    chosen = {min: torch.minimum, max: torch.maximum}[builtin]

    def call(*given, **options):
        numbers = given if len(given) > 1 else given[0]
        values = type(numbers) in (list, tuple) and [
            x for x in numbers if isinstance(x, torch.SymFloat) and is_value(x)
        ]
        if options or not values:
            return builtin(*given, **options)
        return domains.number(functools.reduce(chosen, map(value_of, numbers)), lambda *known: builtin(known), numbers)

    return call


def _of_values(function: Callable, on_tensors: Callable, domains: Domains, checked: bool) -> Callable:
    """A function of `math`, by torch's where a number is one of a tensor's values, or of sizes; `math.log(x, base)` by two.

    Args:
        checked: it raises where it is not defined.
    """

    def call(*numbers):
        if not any(map(_is_symbol, numbers)):
            return function(*numbers)
        given = [value_of(x) for x in numbers]
        with_base = on_tensors is torch.log and len(given) == 2
        result = torch.log(given[0]) / torch.log(given[1]) if with_base else on_tensors(*given)
        if checked and not _is_defined(function.__name__, numbers):
            domains.check(function, numbers, given, result)
        return domains.number(result, function, numbers)

    return call


def _is_symbol(x: object) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat))


def _is_of_sizes(*numbers: object) -> bool:
    return any(map(_is_symbol, numbers)) and not any(map(is_value, numbers))


def _is_defined(name: str, numbers: Sequence) -> bool:
    """Whether the function is for these numbers, and all other sizes that may be: what it asks of sizes is asked of each batch."""
    return name in _ABOVE and _is_of_sizes(*numbers) and all(x > _ABOVE[name] for x in numbers) and 1 not in numbers[1:]


def _pow(of_values: Callable) -> Callable:
    def call(base, exponent):
        return base**exponent if _is_of_sizes(base, exponent) else of_values(base, exponent)

    return call


def _sqrt(of_values: Callable) -> Callable:
    """Of sizes a symbol of these, of which may be asked what is asked of sizes: a divisor must not be 0."""

    def call(number):
        return torch.sym_sqrt(number) if _is_of_sizes(number) and number >= 0 else of_values(number)

    return call


def _isqrt(function: Callable) -> Callable:
    def call(number):
        known = not (_is_of_sizes(number) and number >= 0)
        return function(number) if known else torch.sym_int(torch.sym_sqrt(number))  # no size has as many as 53 bits

    return call


def _truth(function: Callable, on_tensors: Callable, domains: Domains) -> Callable:
    """A function of `math` that tells something of numbers; the answer decides, as a comparison would."""

    def call(*numbers, **options):
        if not any(map(is_value, numbers)):
            return function(*numbers, **options)
        truth = on_tensors(*map(value_of, numbers), **options).double()
        return domains.number(truth, lambda *known: float(function(*known, **options)), numbers) > 0.5

    return call


def _is_close(a: torch.Tensor, b: torch.Tensor, rel_tol: float = 1e-9, abs_tol: float = 0.0) -> torch.Tensor:
    near = (a - b).abs() <= torch.maximum(rel_tol * torch.maximum(a.abs(), b.abs()), torch.full((), abs_tol).double())
    return (a == b) | (near & a.isfinite() & b.isfinite())


_TRUTHS = {"isclose": _is_close, "isfinite": torch.isfinite, "isinf": torch.isinf, "isnan": torch.isnan}
