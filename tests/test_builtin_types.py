"""Python's types of numbers that only a batch tells: what `type` says of them, and what is made of them, is as in PyTorch."""

from __future__ import annotations

import decimal
import fractions
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from marks import slow
from said import batch, train

from orttrainer.errors import UnsupportedModelError


def kinds(x, number):
    """A part each, whether it is said: each changes the sum by more than float32 rounds."""
    n = len(x)
    said = [
        type(n) is int, type(n) in {int, str}, type(n / 2) in (float, str), type(n > 3) is bool, type(x.shape[1]) is int,
        type(len([n])) is int, type(number / 2) is float, type([n]) is list, type((n,)) is tuple, type(range(n)) is range,
        type(range(3)) is range, type(number) is float, {int: True}.get(type(n)), type(n)("3") == 3,
        type(x) is torch.Tensor, type(torch.ones(n)) is torch.Tensor, type(type(n)) is type, isinstance(type(n), type),
        issubclass(type(n), int), issubclass(type([n]), list), type(n).__name__ == "int", type("Made", (), {})().__class__,
        type(torch.nn.Linear) is type, type(type) is type, type(type("Made", (), {})) is type,
    ]  # fmt: skip
    return sum(bool(truth) * (32 + place) for place, truth in enumerate(said)) / 512


FORMS = {
    "of sizes": (lambda x: kinds(x, 1.0), 1),
    "beside numbers of tensors": (lambda x: kinds(x, x.sum().item()) * (2 if x.sum().item() > 8 else 1), 2),
    "beside whole numbers of tensors": (lambda x: kinds(x, x.sum().item()) * x[: int(x.sum())].sum(), 1),
    "fractions": (lambda x: float(Fraction(len(x), 3) + Fraction("1/2")) + float(fractions.Fraction(len(x))), 3),
    "decimals": (lambda x: float(Decimal(len(x)) / 3 * decimal.Decimal("0.1")) + isinstance(Decimal(3), Decimal), 3),
    "of counts": (lambda x: float(Fraction((x > 0.5).sum().item(), 3)) + float(Decimal(int((x > 0.2).sum())) / 3), 3),
}


@pytest.mark.parametrize("name", [slow(name) if name in ("fractions", "of counts") else name for name in FORMS])
def test_types_are_pythons(name):
    function, graphs = FORMS[name]
    before = Fraction.__new__, decimal.Decimal, Decimal
    assert train(function, [batch(2 * size, size) for size in (8, 7, 1)]) == graphs
    assert before == (Fraction.__new__, decimal.Decimal, Decimal)


def test_a_decimal_of_a_tensors_float_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"makes a number of a tensor's value at .*test_builtin_types\.py"):
        train(lambda x: float(Decimal(x.sum().item())), [batch(0)])
