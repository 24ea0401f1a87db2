"""Elementwise arithmetic and functions.

At a kink a rule takes the subgradient that PyTorch takes, and says which.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.driver import FLOATS
from orttrainer.differentiate.registry import non_differentiable, piecewise_constant, vjp
from orttrainer.differentiate.rules.tools import operand, widened
from orttrainer.graph.infinite import may_be_infinite

piecewise_constant("Ceil", "Floor", "Round", "Sign")
non_differentiable("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN")
non_differentiable("And", "Not", "Or", "Xor")
non_differentiable("StopGradient", domain="orttrainer")  # ours, see graph/passes/gradient_marks.py
non_differentiable("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor")


def compare(op, relation: str, a: ir.Value, b: ir.Value | float) -> ir.Value:
    """The bool `a relation b`; bfloat16 goes through float32 (exactly), since no provider compares it."""
    if a.dtype == ir.DataType.BFLOAT16:
        a = op.Cast(a, to=int(ir.DataType.FLOAT))
        b = op.cast_as(b, a) if isinstance(b, ir.Value) else b
    return op.node(relation, a, b)


def mask(op, relation: str, a: ir.Value, b: ir.Value | float) -> ir.Value:
    """1 where `a relation b` holds, else 0, in the dtype of `a`. Faster than Where, which has one thread."""
    return op.cast_as(compare(op, relation, a, b), a)


def masked(op, node: ir.Node, dy: ir.Value, condition: ir.Value) -> ir.Value:
    """`dy` where `condition` holds for an element of what `node` reads, else 0, of an infinite `dy` too."""
    if may_be_infinite(node.outputs[0]):
        return op.Where(condition, dy, op.scalar(0.0, dy))
    return op.Mul(dy, op.cast_as(condition, dy))


# -- arithmetic -------------------------------------------------------------------------------


@vjp("Add")
def add(op, node, dy):
    """Y = A + B  ->  dA = dY,  dB = dY."""
    return dy, dy


@vjp("Sub")
def sub(op, node, dy):
    """Y = A - B  ->  dA = dY,  dB = -dY."""
    return dy, op.Neg(dy)


@vjp("Mul")
def mul(op, node, dy):
    """Y = A * B  ->  dA = dY * B,  dB = dY * A."""
    a, b = node.inputs
    return op.Mul(dy, b), op.Mul(dy, a)


@vjp("Div")
def div(op, node, dy):
    """Y = A / B  ->  dA = dY / B,  dB = -dY / B * Y."""
    b, y = node.inputs[1], node.outputs[0]
    da = op.Div(dy, b)
    return da, op.Neg(op.Mul(da, y))


@vjp("Mod")
def mod(op, node, dy):
    """Y = A - n B  ->  dA = dY,  dB = -n dY, with the integer n = (A - Y) / B."""
    a, b, y = widened(op, *node.inputs, *node.outputs)  # halves round n, or have no Round
    n = op.Round(op.Div(op.Sub(a, y), b))
    return dy, op.Neg(op.Mul(dy, op.cast_as(n, dy)))


@vjp("Sum")
def sum_(op, node, dy):
    """Y = sum of X_i  ->  dX_i = dY."""
    return [dy] * len(node.inputs)


@vjp("Mean")
def mean(op, node, dy):
    """Y = (sum of X_i) / n  ->  dX_i = dY / n."""
    return [op.Mul(dy, 1 / len(node.inputs))] * len(node.inputs)


@vjp("Max", "Min")
def max_(op, node, dy):
    """Y = max of X_i  ->  dX_i = dY where X_i >= all others, shared equally by the inputs that tie."""
    xs = node.inputs
    wins_over, beats = ("GreaterOrEqual", "Greater") if node.op_type == "Max" else ("LessOrEqual", "Less")
    if len(xs) == 1:
        return dy
    # Never X_i == Y: ONNX Runtime may hold a float16 X_i in float32, and Y rounded.
    if len(xs) == 2 and may_be_infinite(node.outputs[0]):
        zero, half = op.scalar(0.0, dy), op.Mul(dy, 0.5)
        first, second = compare(op, beats, *xs), compare(op, beats, *reversed(xs))
        return tuple(op.Where(a, dy, op.Where(b, zero, half)) for a, b in ((first, second), (second, first)))
    if len(xs) == 2:
        lead = op.Sub(mask(op, beats, *xs), mask(op, beats, *reversed(xs)))  # 1, 0 for a tie, -1
        da = op.Mul(dy, op.Add(op.Mul(lead, 0.5), 0.5))
        return da, op.Sub(dy, da)
    conditions = []
    for i, x in enumerate(xs):
        won = functools.reduce(op.And, [compare(op, wins_over, x, other) for j, other in enumerate(xs) if j != i])
        conditions.append(won)
    share = op.Div(dy, functools.reduce(op.Add, [op.cast_as(won, dy) for won in conditions]))
    return [masked(op, node, share, won) for won in conditions]


@vjp("Clip")
def clip(op, node, dy):
    """Y = min(high, max(X, low))  ->  dX = dY where low <= X <= high; dlow, dhigh = dY below low, above high."""
    x, low, high = (operand(node, index) for index in range(3))
    low, high = (
        None if _is_always(op, bound, infinite) else bound for bound, infinite in ((low, -math.inf), (high, math.inf))
    )
    inside, dlow, dhigh = [], None, None
    if low is not None:
        inside.append(compare(op, "GreaterOrEqual", x, low))  # 1 on the bounds
        below = compare(op, "Less", x, low)
        if high is not None:  # low > high: Y = high everywhere
            below = op.And(below, compare(op, "LessOrEqual", low, high))
        dlow = masked(op, node, dy, below)
    if high is not None:
        inside.append(compare(op, "LessOrEqual", x, high))
        above = compare(op, "Greater", x, high)
        if low is not None:
            above = op.Or(above, compare(op, "Greater", low, high))
        dhigh = masked(op, node, dy, above)
    dx = masked(op, node, dy, functools.reduce(op.And, inside)) if inside else dy
    return (dx, dlow, dhigh)[: len(node.inputs)]


def _is_always(op, bound: ir.Value | None, number: float) -> bool:
    """Whether it is a constant of that number, as torch's `clamp` with one bound has infinity for the other."""
    known = None if bound is None else op.constant_value(bound)
    return known is not None and bool((known == number).all())


@vjp("Where")
def where(op, node, dy):
    """Y = A if C else B  ->  dA = dY if C else 0,  dB = 0 if C else dY; an infinite dY stays on its side."""
    condition, zero = node.inputs[0], op.scalar(0.0, dy)
    return None, op.Where(condition, dy, zero), op.Where(condition, zero, dy)


@vjp("CumSum")
def cumsum(op, node, dy):
    """Y = running sum of X along an axis  ->  dX = the same of dY, from the other end."""
    reverse, exclusive = node.attributes.get_int("reverse", 0), node.attributes.get_int("exclusive", 0)
    return op.CumSum(dy, node.inputs[1], reverse=1 - reverse, exclusive=exclusive), None


# -- dtype ------------------------------------------------------------------------------------


@vjp("Identity")
def identity(op, node, dy):
    """Y = X  ->  dX = dY."""
    return dy


@vjp("Cast")
def cast(op, node, dy):
    """Y = X in another float dtype  ->  dX = dY in the dtype of X."""
    return op.cast_as(dy, node.inputs[0])


@vjp("CastLike")
def cast_like(op, node, dy):
    """Y = X in the dtype of T  ->  dX = dY in the dtype of X; T has no gradient."""
    (x, _) = node.inputs
    return op.cast_as(dy, x) if x.dtype in FLOATS else None, None  # op.Cast knows no 2-bit integers before opset 25


# -- powers, exponentials, logarithms ---------------------------------------------------------


@vjp("Neg")
def neg(op, node, dy):
    """Y = -X  ->  dX = -dY."""
    return op.Neg(dy)


@vjp("Abs")
def abs_(op, node, dy):
    """Y = |X|  ->  dX = dY * sign(X); 0 at X == 0."""
    return op.Mul(dy, op.Sign(node.inputs[0]))


@vjp("Reciprocal")
def reciprocal(op, node, dy):
    """Y = 1 / X  ->  dX = -dY * Y^2."""
    (y,) = node.outputs
    return op.Neg(op.Mul(dy, op.Mul(y, y)))


@vjp("Sqrt")
def sqrt(op, node, dy):
    """Y = sqrt(X)  ->  dX = dY / (2 Y)."""
    return op.Div(op.Mul(dy, 0.5), node.outputs[0])


@vjp("Exp")
def exp(op, node, dy):
    """Y = exp(X)  ->  dX = dY * Y."""
    return op.Mul(dy, node.outputs[0])


@vjp("Log")
def log(op, node, dy):
    """Y = log(X)  ->  dX = dY / X."""
    return op.Div(dy, node.inputs[0])


@vjp("Pow")
def pow_(op, node, dy):
    """Y = X^P  ->  dX = dY * P * X^(P-1)  (0 where P == 0),  dP = dY * Y * log(X)  (0 where X == 0, P >= 0)."""
    x, p = node.inputs
    (y,) = node.outputs
    flat = op.And(compare(op, "Equal", x, 0.0), compare(op, "GreaterOrEqual", p, 0.0))
    dp = op.Mul(dy, op.Where(flat, op.scalar(0.0, y), op.Mul(y, op.Log(x))))  # NaN where X < 0, as in PyTorch
    return op.Mul(dy, _power_slope(op, x, p, y)), op.cast_as(dp, p)


def _power_slope(op, x: ir.Value, p: ir.Value, y: ir.Value) -> ir.Value:
    """P * X^(P-1), in fewer and faster operators for the usual constant exponents."""
    constant = op.constant_value(p)
    if constant is None or constant.size == 0 or np.any(constant != constant.flat[0]):
        p = op.cast_as(p, x)
        slope = op.Mul(p, op.Pow(x, op.Sub(p, 1.0)))
        return op.Where(compare(op, "Equal", p, 0.0), op.scalar(0.0, x), slope)  # not 0 * inf at X == 0
    c = float(constant.flat[0])
    if c in (0, 1):
        return op.scalar(c, x)
    if c in (2, 3):
        return op.Mul(x, c) if c == 2 else op.Mul(op.Mul(x, x), c)
    if c == 0.5:
        return op.Div(op.scalar(0.5, x), y)
    if c in (-0.5, -1):
        return op.Mul(op.Mul(y, y) if c == -1 else op.Mul(op.Mul(y, y), y), c)
    return op.Mul(op.Pow(x, op.scalar(c - 1, x)), c)


@vjp("Erf")
def erf(op, node, dy):
    """Y = erf(X)  ->  dX = dY * 2 / sqrt(pi) * exp(-X^2)."""
    (x,) = node.inputs
    return op.Mul(dy, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2 / math.sqrt(math.pi)))


# -- trigonometric and hyperbolic -------------------------------------------------------------


@vjp("Sin")
def sin(op, node, dy):
    """Y = sin(X)  ->  dX = dY * cos(X)."""
    return op.Mul(dy, op.Cos(node.inputs[0]))


@vjp("Cos")
def cos(op, node, dy):
    """Y = cos(X)  ->  dX = -dY * sin(X)."""
    return op.Neg(op.Mul(dy, op.Sin(node.inputs[0])))


@vjp("Tan")
def tan(op, node, dy):
    """Y = tan(X)  ->  dX = dY * (1 + Y^2)."""
    (y,) = node.outputs
    return op.Mul(dy, op.Add(op.Mul(y, y), 1.0))


@vjp("Asin")
def asin(op, node, dy):
    """Y = asin(X)  ->  dX = dY / sqrt(1 - X^2)."""
    return op.Div(dy, _sqrt_of_one_minus_square(op, node.inputs[0]))


@vjp("Acos")
def acos(op, node, dy):
    """Y = acos(X)  ->  dX = -dY / sqrt(1 - X^2)."""
    return op.Neg(op.Div(dy, _sqrt_of_one_minus_square(op, node.inputs[0])))


def _sqrt_of_one_minus_square(op, x: ir.Value) -> ir.Value:
    return op.Sqrt(op.Mul(op.Sub(1.0, x), op.Add(x, 1.0)))  # 1 - X^2 would cancel near 1


@vjp("Atan")
def atan(op, node, dy):
    """Y = atan(X)  ->  dX = dY / (1 + X^2)."""
    (x,) = node.inputs
    return op.Div(dy, op.Add(op.Mul(x, x), 1.0))


@vjp("Sinh")
def sinh(op, node, dy):
    """Y = sinh(X)  ->  dX = dY * cosh(X)."""
    return op.Mul(dy, op.Cosh(node.inputs[0]))


@vjp("Cosh")
def cosh(op, node, dy):
    """Y = cosh(X)  ->  dX = dY * sinh(X)."""
    return op.Mul(dy, op.Sinh(node.inputs[0]))


@vjp("Tanh")
def tanh(op, node, dy):
    """Y = tanh(X)  ->  dX = dY * (1 - Y^2)."""
    (y,) = node.outputs
    return op.Mul(dy, op.Sub(1.0, op.Mul(y, y)))


@vjp("Asinh")
def asinh(op, node, dy):
    """Y = asinh(X)  ->  dX = dY / sqrt(X^2 + 1)."""
    (x,) = node.inputs
    return op.Div(dy, op.Sqrt(op.Add(op.Mul(x, x), 1.0)))


@vjp("Acosh")
def acosh(op, node, dy):
    """Y = acosh(X)  ->  dX = dY / sqrt(X^2 - 1)."""
    (x,) = node.inputs
    return op.Div(dy, op.Sqrt(op.Mul(op.Sub(x, 1.0), op.Add(x, 1.0))))


@vjp("Atanh")
def atanh(op, node, dy):
    """Y = atanh(X)  ->  dX = dY / (1 - X^2)."""
    (x,) = node.inputs
    return op.Div(dy, op.Mul(op.Sub(1.0, x), op.Add(x, 1.0)))
