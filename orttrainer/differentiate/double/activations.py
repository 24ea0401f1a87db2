"""Activations, whose numbers are attributes, by their definitions."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.rules.tools import attribute

__all__ = ["FORMS", "FORMS_WITHOUT_BODY", "elu", "elu_of", "hard_sigmoid", "hard_swish", "leaky_relu"]


def leaky_relu(op, node: ir.Node) -> ir.Value:
    """x where it is positive, else alpha x."""
    (x,) = node.inputs
    return op.Where(op.Greater(x, 0.0), x, op.Mul(x, attribute(node, "alpha", 0.01)))


def prelu(op, node: ir.Node) -> ir.Value:
    """The same with slopes that are given."""
    x, slope = node.inputs
    return op.Where(op.Less(x, 0.0), op.Mul(x, slope), x)


def elu(op, node: ir.Node) -> ir.Value:
    """x where it is positive, else alpha (e^x - 1)."""
    return elu_of(op, node.inputs[0], attribute(node, "alpha", 1.0))


def elu_of(op, x: ir.Value, alpha: float) -> ir.Value:
    """x, or alpha (e^x - 1), whose slope at 0 alpha is, and near which e^x - 1 would cancel: that is tanh(x / 2) (e^x + 1)."""
    positive = op.Greater(x, 0.0)
    below = op.Where(positive, op.scalar(0.0, x), x)
    power = op.Exp(below)
    near = op.Mul(op.Tanh(op.Mul(below, 0.5)), op.Add(power, 1.0))
    return op.Where(positive, x, op.Mul(op.Where(op.Greater(x, -1.0), near, op.Sub(power, 1.0)), alpha))


def _selu(op, node: ir.Node) -> ir.Value:
    """gamma times an ELU, by default of ONNX's numbers, which are of float32."""
    alpha, gamma = (
        attribute(node, "alpha", 1.67326319217681884765625),
        attribute(node, "gamma", 1.05070102214813232421875),
    )
    return op.Mul(elu_of(op, node.inputs[0], alpha), gamma)


def hard_sigmoid(op, node: ir.Node) -> ir.Value:
    """clip(alpha x + beta, 0, 1)."""
    return _hard_sigmoid_of(op, node.inputs[0], attribute(node, "alpha", 0.2), attribute(node, "beta", 0.5))


def hard_swish(op, node: ir.Node) -> ir.Value:
    """x clip(x / 6 + 1 / 2, 0, 1)."""
    (x,) = node.inputs
    return op.Mul(x, _hard_sigmoid_of(op, x, 1 / 6, 0.5))


def _hard_sigmoid_of(op, x: ir.Value, alpha: float, beta: float) -> ir.Value:
    """Without a slope at both ends."""
    y = op.Add(op.Mul(x, alpha), beta)
    above = op.Where(op.Less(y, 1.0), y, op.scalar(1.0, y))
    return op.Where(op.Greater(y, 0.0), above, op.scalar(0.0, y))


def thresholded_relu(op, node: ir.Node) -> ir.Value:
    """x where it is above alpha, else 0."""
    (x,) = node.inputs
    return op.Where(op.Greater(x, attribute(node, "alpha", 1.0)), x, op.scalar(0.0, x))


def shrink(op, node: ir.Node) -> ir.Value:
    """x + bias below -lambd, x - bias above lambd, else 0; ONNX Runtime's kernel of float64 computes in float32."""
    x, lambd, bias = node.inputs[0], attribute(node, "lambd", 0.5), attribute(node, "bias", 0.0)
    above = op.Where(op.Greater(x, lambd), op.Sub(x, bias), op.scalar(0.0, x))
    return op.Where(op.Less(x, -lambd), op.Add(x, bias), above)


def softsign(op, node: ir.Node) -> ir.Value:
    """x / (1 + |x|)."""
    (x,) = node.inputs
    return op.Div(x, op.Add(op.Abs(x), 1.0))


def mish(op, node: ir.Node) -> ir.Value:
    """x tanh(log(1 + e^x))."""
    return op.Mul(node.inputs[0], op.Tanh(softplus(op, node)))


def softplus(op, node: ir.Node) -> ir.Value:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), with what 1 + e^-|x| is rounded by."""
    (x,) = node.inputs
    small, one = op.Exp(op.Neg(op.Abs(x))), op.scalar(1.0, x)
    total = op.Add(small, one)
    lost = op.Sub(small, op.Sub(total, one))
    return op.Add(op.Max(x, 0.0), op.Add(op.Log(total), op.Div(lost, total)))


def sigmoid(op, node: ir.Node) -> ir.Value:
    """1 / (1 + e^-x)."""
    (x,) = node.inputs
    return op.Reciprocal(op.Add(op.Exp(op.Neg(x)), 1.0))


# ONNX Runtime's kernels, or ONNX's bodies, lose digits as they near 0.
FORMS = {"Elu": elu, "Mish": mish, "Selu": _selu, "Shrink": shrink, "Sigmoid": sigmoid, "Softplus": softplus}
FORMS_WITHOUT_BODY = {  # of which ONNX Runtime has neither a kernel nor a body of these opsets
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "LeakyRelu": leaky_relu,
    "PRelu": prelu,
    "Softsign": softsign,
    "ThresholdedRelu": thresholded_relu,
}
