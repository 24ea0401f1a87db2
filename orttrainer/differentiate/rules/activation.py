"""Activation functions.

At a kink a rule takes the subgradient that PyTorch takes, and says which.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.elementwise import compare, mask, masked
from orttrainer.differentiate.rules.tools import widened
from orttrainer.graph.infinite import may_be_infinite
from orttrainer.graph.passes.speed.gelu import normal_distribution

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def one_if_positive(op, x: ir.Value, otherwise: ir.Value | float) -> ir.Value:
    """1 where x > 0, else `otherwise`."""
    other = otherwise if isinstance(otherwise, ir.Value) else op.scalar(otherwise, x)
    return op.Where(compare(op, "Greater", x, 0.0), op.scalar(1.0, x), other)


# -- piecewise --------------------------------------------------------------------------------


@vjp("Relu")
def relu(op, node, dy):
    """Y = max(X, 0)  ->  dX = dY where Y > 0."""
    (y,) = node.outputs  # 0 at X == 0
    if may_be_infinite(y):
        return masked(op, node, dy, compare(op, "Greater", y, 0.0))
    return op.Mul(dy, _positive(op, y))


def _positive(op, y: ir.Value) -> ir.Value:
    """1 where y > 0, else 0, for what is never negative."""
    if y.dtype == ir.DataType.FLOAT:
        # min(3e38 y, 1): a third of the time of Greater and Cast. Less than 1 for denormals alone, below 3.4e-39.
        return op.HardSigmoid(y, alpha=3e38, beta=0.0)
    # In bfloat16 no kernel compares, but of what is never negative the sign is that mask.
    return op.Sign(y) if y.dtype == ir.DataType.BFLOAT16 else mask(op, "Greater", y, 0.0)


@vjp("LeakyRelu")
def leaky_relu(op, node, dy):
    """Y = X where X > 0, else alpha X  ->  dX = dY * (1 where X > 0, else alpha)."""
    (x,) = node.inputs
    alpha = node.attributes.get_float("alpha", 0.01)
    if 0 <= alpha <= 1:
        return op.Mul(dy, op.Max(mask(op, "Greater", x, 0.0), alpha))  # alpha at X == 0
    return op.Mul(dy, one_if_positive(op, x, alpha))


@vjp("PRelu")
def prelu(op, node, dy):
    """Y = X where X > 0, else S X  ->  dX = dY * (1 where X > 0, else S),  dS = dY * min(X, 0)."""
    x, slope = node.inputs
    return op.Mul(dy, one_if_positive(op, x, slope)), op.Mul(dy, op.Min(x, 0.0))  # S at X == 0


@vjp("ThresholdedRelu")
def thresholded_relu(op, node, dy):
    """Y = X where X > alpha, else 0  ->  dX = dY where X > alpha."""
    return masked(op, node, dy, compare(op, "Greater", node.inputs[0], node.attributes.get_float("alpha", 1.0)))


@vjp("Shrink")
def shrink(op, node, dy):
    """Y = X + bias below -lambd, X - bias above lambd, else 0  ->  dX = dY where |X| > lambd."""
    return masked(op, node, dy, compare(op, "Greater", op.Abs(node.inputs[0]), node.attributes.get_float("lambd", 0.5)))


@vjp("HardSigmoid")
def hard_sigmoid(op, node, dy):
    """Y = clip(alpha X + beta, 0, 1)  ->  dX = alpha dY where 0 < Y < 1."""
    (y,) = node.outputs
    return op.Mul(masked(op, node, dy, _strictly_between_0_and_1(op, y)), node.attributes.get_float("alpha", 0.2))


@vjp("HardSwish")
def hard_swish(op, node, dy):
    """Y = X H, H = clip(X / 6 + 1/2, 0, 1)  ->  dX = dY * (H + (X / 6 = H - 1/2, where 0 < H < 1))."""
    h = op.HardSigmoid(node.inputs[0], alpha=1 / 6, beta=0.5)
    return op.Mul(dy, op.Add(h, op.Mul(op.Sub(h, 0.5), op.cast_as(_strictly_between_0_and_1(op, h), h))))


def _strictly_between_0_and_1(op, y: ir.Value) -> ir.Value:
    return op.And(compare(op, "Greater", y, 0.0), compare(op, "Less", y, 1.0))


# -- exponential ------------------------------------------------------------------------------


@vjp("Elu")
def elu(op, node, dy):
    """Y = X where X > 0, else alpha (exp(X) - 1)  ->  dX = dY * (1 where X > 0, else Y + alpha)."""
    alpha = node.attributes.get_float("alpha", 1.0)
    return op.Mul(dy, one_if_positive(op, node.inputs[0], op.Add(node.outputs[0], alpha)))


@vjp("Celu")
def celu(op, node, dy):
    """Y = X where X > 0, else alpha (exp(X / alpha) - 1)  ->  dX = dY * (1 where X > 0, else Y / alpha + 1)."""
    alpha = node.attributes.get_float("alpha", 1.0)
    return op.Mul(dy, one_if_positive(op, node.inputs[0], op.Add(op.Mul(node.outputs[0], 1 / alpha), 1.0)))


@vjp("Selu")
def selu(op, node, dy):
    """Y = gamma * (X where X > 0, else alpha (exp(X) - 1))  ->  dX = dY * (gamma where X > 0, else Y + gamma alpha)."""
    (x,) = node.inputs
    alpha = node.attributes.get_float("alpha", 1.67326319217681884765625)
    gamma = node.attributes.get_float("gamma", 1.05070102214813232421875)
    below = op.Add(node.outputs[0], gamma * alpha)
    return op.Mul(dy, op.Where(compare(op, "Greater", x, 0.0), op.scalar(gamma, x), below))


@vjp("Sigmoid")
def sigmoid(op, node, dy):
    """Y = 1 / (1 + exp(-X))  ->  dX = dY * Y * (1 - Y)."""
    (y,) = node.outputs
    return op.Mul(dy, op.Mul(y, op.Sub(1.0, y)))


@vjp("Softplus")
def softplus(op, node, dy):
    """Y = log(1 + exp(X))  ->  dX = dY * sigmoid(X)."""
    return op.Mul(dy, op.Sigmoid(node.inputs[0]))


@vjp("Softsign")
def softsign(op, node, dy):
    """Y = X / (1 + |X|)  ->  dX = dY / (1 + |X|)^2."""
    d = op.Add(op.Abs(node.inputs[0]), 1.0)
    return op.Div(dy, op.Mul(d, d))


@vjp("Mish")
def mish(op, node, dy):
    """Y = X T, T = tanh(softplus(X))  ->  dX = dY * (T + X (1 - T^2) S), S = sigmoid(X).

    T = S (2 - S) / (1 + (1 - S)^2), since exp(-softplus(X)) = 1 - S; Softplus itself is slow.
    """
    (x,) = node.inputs
    s = op.Sigmoid(x)
    r = op.Sub(1.0, s)
    t = op.Div(op.Mul(s, op.Add(r, 1.0)), op.Add(op.Mul(r, r), 1.0))
    return op.Mul(dy, op.Add(t, op.Mul(op.Mul(x, s), op.Sub(1.0, op.Mul(t, t)))))


# -- gelu -------------------------------------------------------------------------------------


@vjp("Gelu")
def gelu(op, node, dy):
    """Y = X Phi(X), or its tanh approximation  ->  dX = dY * Y'(X)."""
    tanh = node.attributes.get_string("approximate", "none") == "tanh"
    return op.Mul(dy, (tanh_gelu_slope if tanh else gelu_slope)(op, node.inputs[0]))


@vjp("Gelu", domain="com.microsoft")
def microsoft_gelu(op, node, dy):
    """Y = X Phi(X)  ->  dX = dY * Y'(X)."""
    return op.Mul(dy, gelu_slope(op, node.inputs[0]))


@vjp("BiasGelu", domain="com.microsoft")
def bias_gelu(op, node, dy):
    """Y = gelu(A + B)  ->  dA = dB = dY * gelu'(A + B)."""
    a, b = node.inputs
    da = op.Mul(dy, gelu_slope(op, op.Add(a, b)))
    return da, da


@vjp("FastGelu", domain="com.microsoft")
def fast_gelu(op, node, dy):
    """Y = tanh gelu of X + B, B optional  ->  dX = dB = dY * Y'(X + B)."""
    x, b = [*node.inputs, None][:2]
    dx = op.Mul(dy, tanh_gelu_slope(op, x if b is None else op.Add(x, b)))
    return [dx] * len(node.inputs)


@vjp("Swish")
def swish(op, node, dy):
    """Y = X S, S = sigmoid(alpha X)  ->  dX = dY * S * (1 + alpha X (1 - S))."""
    return op.Mul(dy, _swish_slope(op, node.inputs[0], node.attributes.get_float("alpha", 1.0)))


@vjp("QuickGelu", domain="com.microsoft")
def quick_gelu(op, node, dy):
    """Y = X S, S = sigmoid(alpha X)  ->  dX = dY * S * (1 + alpha X (1 - S))."""
    return op.Mul(dy, _swish_slope(op, node.inputs[0], node.attributes.get_float("alpha", 1.702)))


def _swish_slope(op, x: ir.Value, alpha: float) -> ir.Value:
    u = op.Mul(x, alpha)
    s = op.Sigmoid(u)
    return op.Mul(s, op.Add(op.Mul(u, op.Sub(1.0, s)), 1.0))


def gelu_slope(op, x: ir.Value) -> ir.Value:
    """Phi(x) + x phi(x) = Phi(x) + u exp(-u^2) / sqrt(pi), u = x / sqrt(2)."""
    u, phi = normal_distribution(op, x)
    bell = op.Exp(op.Sub(-math.log(math.pi) / 2, op.Mul(u, u)))  # the factor in the exponent: one pass over x less
    return op.Add(op.Mul(u, bell), phi)


def tanh_gelu_slope(op, x: ir.Value) -> ir.Value:
    """s (1 + u' x (1 - s)), where Y = x s, s = sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    c = 2 * SQRT_2_OVER_PI
    square = op.Mul(x, x)
    s = op.Sigmoid(op.Mul(x, op.Add(op.Mul(square, 0.044715 * c), c)))
    slope_x = op.Mul(x, op.Add(op.Mul(square, 3 * 0.044715 * c), c))  # u' x
    return op.Mul(s, op.Add(op.Mul(slope_x, op.Sub(1.0, s)), 1.0))


# -- softmax ----------------------------------------------------------------------------------


@vjp("Softmax")
def softmax(op, node, dy):
    """Y = softmax(X)  ->  dX = Y * (dY - sum(dY * Y))."""
    (y,) = node.outputs
    axis = node.attributes.get_int("axis", -1)
    if _is_selected_from(y):  # what is dropped may be NaN, and 0 * NaN is NaN: where all of a row is masked by -inf
        y = op.Where(op.IsNaN(*widened(op, y)), op.scalar(0.0, y), y)
    return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)))


def _is_selected_from(y: ir.Value) -> bool:
    """Whether a Where takes only some of the elements of `y`."""
    readers = [use.node for use in y.uses()]
    return any(n.op_type == "Where" or (n.op_type == "Cast" and _is_selected_from(n.outputs[0])) for n in readers)


@vjp("LogSoftmax")
def log_softmax(op, node, dy):
    """Y = log(softmax(X))  ->  dX = dY - exp(Y) * sum(dY)."""
    axis = node.attributes.get_int("axis", -1)
    return op.Sub(dy, op.Mul(op.Exp(node.outputs[0]), op.ReduceSum(dy, [axis], keepdims=1)))


@vjp("Hardmax")
def hardmax(op, node, dy):
    """Y = 1 at the largest X, else 0: piecewise constant  ->  dX = 0."""
    return op.zeros_like(node.inputs[0])
