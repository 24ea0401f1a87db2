"""Activation functions that are named by an attribute: of recurrent layers, FusedGemm and FusedConv."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from orttrainer.errors import GradientError

# By its name in lower case: how many parameters it has, and its node. Runtimes do not agree on the default parameters.
ACTIVATIONS: dict[str, tuple[int, Callable]] = {
    "affine": (2, lambda op, x, a, b: op.Add(op.Mul(x, a), b)),
    "clip": (2, lambda op, x, low, high: op.Clip(x, low, high)),
    "elu": (1, lambda op, x, a: op.Elu(x, alpha=a)),
    "hardsigmoid": (2, lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b)),
    "hardswish": (0, lambda op, x: op.HardSwish(x)),
    "leakyrelu": (1, lambda op, x, a: op.LeakyRelu(x, alpha=a)),
    "parametricsoftplus": (2, lambda op, x, a, b: op.Mul(op.Softplus(op.Mul(x, b)), a)),
    "relu": (0, lambda op, x: op.Relu(x)),
    "scaledtanh": (2, lambda op, x, a, b: op.Mul(op.Tanh(op.Mul(x, b)), a)),
    "selu": (2, lambda op, x, a, g: op.Selu(x, alpha=a, gamma=g)),
    "sigmoid": (0, lambda op, x: op.Sigmoid(x)),
    "softplus": (0, lambda op, x: op.Softplus(x)),
    "softsign": (0, lambda op, x: op.Softsign(x)),
    "tanh": (0, lambda op, x: op.Tanh(x)),
    "thresholdedrelu": (1, lambda op, x, a: op.ThresholdedRelu(x, alpha=a)),
}


def activated(op, node: ir.Node, x: ir.Value, name: str, parameters: Sequence[float | None]) -> ir.Value:
    """The activation `name` of `x`; of `parameters` those that it has.

    Raises:
        GradientError: it is not known, or a parameter is not given.
    """
    count, emit = ACTIVATIONS.get(name.lower(), (0, None))
    if emit is None:
        known = ", ".join(sorted(ACTIVATIONS))
        raise GradientError(
            f"no gradient for the activation {name!r} of {node.op_type!r} node {node.name!r}; known are {known}"
        )
    given = [p for p in parameters[:count] if p is not None]
    if len(given) < count:
        raise GradientError(
            f"the activation {name!r} of {node.op_type!r} node {node.name!r} has {count} parameters, of which "
            f"{len(given)} are given; runtimes differ in the default, so give all of them"
        )
    return emit(op, x, *given)
