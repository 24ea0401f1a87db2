"""Trigonometric and hyperbolic functions and their inverses: rational functions where others would cancel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

__all__ = ["FORMS"]

# Numerators and denominators, the highest power first: Moshier, "Methods and programs for mathematical functions", 1989
# (Cephes), each to 17 digits in the bounds that are used here. (f(x) - x) / x^3 in x^2, but acosh(1 + z) / sqrt(z) in z.
_TAN = (
    (-1.30936939181383734205e4, 1.15351664838587416140e6, -1.79565251976484877988e7),
    (1.0, 1.36812963470692954678e4, -1.32089234440210967447e6, 2.50083801823357915839e7, -5.38695755929454629881e7),
)  # fmt: skip
_SINH = (
    (-7.89474443963537015605e-1, -1.63725857525983828727e2, -1.15614435765005216044e4, -3.51754964808151394800e5),
    (1.0, -2.77711081420602794433e2, 3.61578279834431989373e4, -2.11052978884890840399e6),
)  # fmt: skip
_ASIN = (
    (4.253011369004428248960e-3, -6.019598008014123785661e-1, 5.444622390564711410273, -1.626247967210700244449e1,
     1.956261983317594739197e1, -8.198089802484824371615),
    (1.0, -1.474091372988853791896e1, 7.049610280856842141659e1, -1.471791292232726029859e2, 1.395105614657485689735e2,
     -4.918853881490881290097e1),
)  # fmt: skip
_ATAN = (
    (-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1, -1.228866684490136173410e2,
     -6.485021904942025371773e1),
    (1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2, 4.853903996359136964868e2,
     1.945506571482613964425e2),
)  # fmt: skip
_ASINH = (
    (-4.33231683752342103572e-3, -5.91750212056387121207e-1, -4.37390226194356683570, -9.09030533308377316566,
     -5.56682227230859640450),
    (1.0, 1.28757002067426453537e1, 4.86042483805291788324e1, 6.95722521337257608734e1, 3.34009336338516356383e1),
)  # fmt: skip
_ACOSH = (
    (1.18801130533544501356e2, 3.94726656571334401102e3, 3.43989375926195455866e4, 1.08102874834699867335e5,
     1.10855947270161294369e5),
    (1.0, 1.86145380837903397292e2, 4.15352677227719831579e3, 2.97683430363289370382e4, 8.29725251988426222434e4,
     7.83869920495893927727e4),
)  # fmt: skip
_ATANH = (
    (-8.54074331929669305196e-1, 1.20426861384072379242e1, -4.61252884198732692637e1, 6.54566728676544377376e1,
     -3.09092539379866942570e1),
    (1.0, -1.95638849376911654834e1, 1.08938092147140262656e2, -2.49839401325893582852e2, 2.52006675691344555838e2,
     -9.27277618139601130017e1),
)  # fmt: skip
# pi / 2 in parts of 33 bits, whose products with a count of at most 20 bits are exact; and the largest such x.
_HALF_PI = 1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624871116645580e-21, 8.47842766036889956997e-32
_FAR_AWAY = 2.0**19
_HUGE = 2.0**28  # beyond it x^2 + 1 and x^2 - 1 are x^2
_LARGEST = 2.0**1022  # of which 2 x is no infinity
_LOG_2 = math.log(2)
_PI_LOST = 6.123233995736765886130e-17  # what pi / 2 has more than the number of float64


def cos(op, node):
    """1 - 2 sin(x / 2)^2, to 2e-15: ONNX Runtime has long had the sine only (1.28 has)."""
    return _cos(op, node.inputs[0])


def _cos(op, x: ir.Value) -> ir.Value:
    half = op.Sin(op.Mul(x, 0.5))
    return op.Sub(op.scalar(1.0, x), op.Mul(op.Mul(half, half), 2.0))


def tan(op, node):
    """Of the rest of x by pi / 2 its series, or -1 / that; ONNX Runtime's sine loses digits where it is near 0.

    Not so far away, where cos(x) = sin(2 x) / (2 sin(x)).
    """
    (x,) = node.inputs
    count = op.Round(op.Mul(x, 2 / math.pi))
    rest = x
    for part in _HALF_PI:
        rest = op.Sub(rest, op.Mul(count, part))
    odd = op.Equal(op.Mul(op.Floor(op.Mul(count, 0.5)), 2.0), op.Sub(count, 1.0))
    series = _series(op, _TAN, rest)
    near = op.Where(odd, op.Neg(op.Reciprocal(series)), series)
    size, sine = op.Abs(x), op.Sin(x)
    cosine = op.Where(op.Greater(size, _LARGEST), _cos(op, x), op.Div(op.Sin(op.Mul(x, 2.0)), op.Mul(sine, 2.0)))
    return op.Where(op.Greater(size, _FAR_AWAY), op.Div(sine, cosine), near)


def sinh(op, node):
    """(e^x - e^-x) / 2, and its series up to 1."""
    (x,) = node.inputs
    size = op.Abs(x)
    root, half = _halves(op, size)
    far = op.Mul(op.Sub(op.Mul(half, root), op.Div(op.Div(op.scalar(0.5, x), root), root)), op.Sign(x))
    return op.Where(op.Greater(size, 1.0), far, _series(op, _SINH, x))


def cosh(op, node):
    """(e^x + e^-x) / 2."""
    (x,) = node.inputs
    root, half = _halves(op, op.Abs(x))
    return op.Add(op.Mul(half, root), op.Div(op.Div(op.scalar(0.5, x), root), root))


def _halves(op, size):
    """e^(size / 2) and half of that: e^size overflows before what is made of it."""
    root = op.Exp(op.Mul(size, 0.5))
    return root, op.Mul(root, 0.5)


def asinh(op, node):
    """log(x + sqrt(x^2 + 1)), and its series up to 1 / 2."""
    (x,) = node.inputs
    size = op.Abs(x)
    near = op.Min(size, _HUGE)
    middle = op.Log(op.Add(near, op.Sqrt(op.Add(op.Mul(near, near), 1.0))))
    far = op.Mul(op.Where(op.Greater(size, _HUGE), op.Add(op.Log(size), _LOG_2), middle), op.Sign(x))
    return op.Where(op.Greater(size, 0.5), far, _series(op, _ASINH, x))


def acosh(op, node):
    """log(x + sqrt(x^2 - 1)), and sqrt(x - 1) times a rational function up to 3 / 2."""
    (x,) = node.inputs
    above, near = op.Sub(x, 1.0), op.Min(x, _HUGE)
    middle = op.Log(op.Add(near, op.Sqrt(op.Mul(op.Sub(near, 1.0), op.Add(near, 1.0)))))
    far = op.Where(op.Greater(x, _HUGE), op.Add(op.Log(x), _LOG_2), middle)
    return op.Where(op.Greater(above, 0.5), far, op.Mul(op.Sqrt(above), _quotient(op, _ACOSH, above)))


def atanh(op, node):
    """log((1 + x) / (1 - x)) / 2, and its series up to 1 / 2."""
    (x,) = node.inputs
    far = op.Mul(op.Log(op.Div(op.Add(x, 1.0), op.Sub(op.scalar(1.0, x), x))), 0.5)
    return op.Where(op.Greater(op.Abs(x), 0.5), far, _series(op, _ATANH, x))


def asin(op, node):
    """Its series up to 1 / 2; beyond it pi / 2 - 2 asin(sqrt((1 - x) / 2))."""
    (x,) = node.inputs
    size = op.Abs(x)
    far = op.Sub(op.scalar(math.pi / 2, x), op.Sub(op.Mul(_asin_of_rest(op, size), 2.0), _PI_LOST))
    return op.Where(op.Greater(size, 0.5), op.Mul(far, op.Sign(x)), _series(op, _ASIN, x))


def acos(op, node):
    """pi / 2 - asin(x) up to 1 / 2; beyond it 2 asin(sqrt((1 - x) / 2)), or pi less that of -x."""
    (x,) = node.inputs
    size = op.Abs(x)
    near = op.Sub(op.scalar(math.pi / 2, x), op.Sub(_series(op, _ASIN, x), _PI_LOST))
    far = op.Mul(_asin_of_rest(op, size), 2.0)
    behind = op.Sub(op.scalar(math.pi, x), op.Sub(far, 2 * _PI_LOST))
    return op.Where(op.Greater(size, 0.5), op.Where(op.Less(x, 0.0), behind, far), near)


def _asin_of_rest(op, size):
    """asin(sqrt((1 - size) / 2)), which is the half of acos(size)."""
    return _series(op, _ASIN, op.Sqrt(op.Mul(op.Sub(op.scalar(1.0, size), size), 0.5)))


def atan(op, node):
    """Its series in x, in (x - 1) / (x + 1) = tan(atan(x) - pi / 4), or in -1 / x = tan(atan(x) - pi / 2)."""
    (x,) = node.inputs
    size, sign, one = op.Abs(x), op.Sign(x), op.scalar(1.0, x)
    far, half = op.Greater(size, 0.66), op.Greater(size, math.tan(3 * math.pi / 8))
    inverse = op.Neg(op.Reciprocal(op.Where(half, size, one)))
    turned = op.Mul(op.Where(half, inverse, op.Div(op.Sub(size, one), op.Add(size, one))), sign)
    series = _series(op, _ATAN, op.Where(far, turned, x))
    angle, lost = (
        op.Mul(op.Where(half, op.scalar(2 * quarter, x), op.scalar(quarter, x)), sign)
        for quarter in (math.pi / 4, _PI_LOST / 2)
    )
    return op.Where(far, op.Add(angle, op.Add(series, lost)), series)


def _series(op, polynomials, x: ir.Value) -> ir.Value:
    """x (1 + x^2 times a rational function of x^2): -0 stays that."""
    square = op.Mul(x, x)
    return op.Mul(x, op.Add(op.Mul(square, _quotient(op, polynomials, square)), 1.0))


def _quotient(op, polynomials, x: ir.Value) -> ir.Value:
    return op.Div(*(_polynomial(op, coefficients, x) for coefficients in polynomials))


def _polynomial(op, coefficients: Sequence[float], x: ir.Value) -> ir.Value:
    """By Horner's rule, the highest power first."""
    total = op.scalar(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = op.Add(op.Mul(total, x), coefficient)
    return total


FORMS = {
    "Acos": acos,
    "Acosh": acosh,
    "Asin": asin,
    "Asinh": asinh,
    "Atan": atan,
    "Atanh": atanh,
    "Cos": cos,
    "Cosh": cosh,
    "Sinh": sinh,
    "Tan": tan,
}
