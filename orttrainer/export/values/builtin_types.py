"""Types of Python's in the place of which the code that is traced has others: `int(lengths.max())`, `list(range(n))`, `type(n)`."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from torch._subclasses import FakeTensor

from orttrainer.export.values.domains import Domains
from orttrainer.export.values.ranges import Range, is_symbolic
from orttrainer.export.values.sized import follows
from orttrainer.export.values.stand_ins import Kind

__all__ = ["KINDS", "ON_BEHALF", "exact_types", "types_of"]

KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}  # what symbols stand for
_SYMBOLIC = {int: torch.sym_int, float: torch.sym_float}


class _Builtin(Kind):
    """A type that is called in another way, and else is the builtin one."""

    def __getattr__(cls, name):
        return getattr(cls.builtin, name)


class _Converting(_Builtin):
    """One that makes symbols of tensors."""

    def __call__(cls, *args, **kwargs):
        x = args[0] if args else None
        if len(args) == 1 and isinstance(x, torch.Tensor):
            whole = x.dtype == torch.bool or (cls.builtin is int and follows(x) is not None)
            x = (x.long() if whole else x).item()  # torch would decide by a truth
        if len(args) == 1 and cls.builtin is list and is_symbolic(x):
            return x
        if cls.builtin is not list and isinstance(x, (torch.SymInt, torch.SymFloat)):
            if cls.builtin is int:
                cls.domains.check_finite(int, x)
            return _SYMBOLIC[cls.builtin](x)
        return cls.builtin(*args, **kwargs)


class _Kind(_Builtin):
    """`type`, which of what stands for a number or a tensor is theirs, and in the place of which there is another, the other.

    Of a type, or of what has the place of one, it is itself.
    """

    def __call__(cls, *args, **kwargs):
        kind = type(*args, **kwargs)
        if len(args) == 1:
            if kind is type or issubclass(kind, Kind):
                return cls
            kind = KINDS.get(kind, kind)
            if issubclass(kind, FakeTensor):
                kind = torch.nn.Parameter if isinstance(args[0], torch.nn.Parameter) else torch.Tensor
            kind = cls.others.get(kind, kind)
        return kind


class _Exact(_Builtin):
    """One that has to know the numbers, which the trace then depends on."""

    def __call__(cls, *args, **kwargs):
        return cls.builtin(*map(_known, args), **kwargs)


def _known(number: object) -> object:
    if isinstance(number, torch.SymFloat):
        return float(number)
    return operator.index(number) if isinstance(number, torch.SymInt) else number


ON_BEHALF = {_Exact.__call__.__code__, _known.__code__}  # the code that asks for whoever called it


@contextlib.contextmanager
def exact_types() -> Iterator[dict[type, type]]:
    """Within the block, `Fraction` and `Decimal` take symbols; what is to have the place of one where it is imported by name."""
    found = {}
    with contextlib.ExitStack() as stack:
        if (fractions := sys.modules.get("fractions")) is not None:  # else nobody calls it
            made = fractions.Fraction.__new__
            known = lambda cls, *numbers, **options: made(cls, *map(_known, numbers), **options)  # noqa: E731
            stack.enter_context(mock.patch.object(fractions.Fraction, "__new__", known))
        if (decimal := sys.modules.get("decimal")) is not None:  # whose type is C's
            found[decimal.Decimal] = _Exact("Decimal", (), {"builtin": decimal.Decimal})
            stack.enter_context(mock.patch.object(decimal, "Decimal", found[decimal.Decimal]))
        yield found


def types_of(domains: Domains, of_numbers: bool) -> dict[str, type]:
    """`type`, and with those `of_numbers` `int` and `float`, which raise as Python's, and `list`."""
    kinds = (*_SYMBOLIC, list) if of_numbers else ()
    found = {x.__name__: _Converting(x.__name__, (), {"builtin": x, "domains": domains}) for x in kinds}
    others = {x.builtin: x for x in found.values()} | {range: Range}
    return {**found, "type": _Kind("type", (), {"builtin": type, "others": others})}
