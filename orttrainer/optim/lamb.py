"""LAMB: Adam's direction, with a step length per parameter tensor."""

from __future__ import annotations

import math
from typing import ClassVar, final

import onnx_ir as ir

from orttrainer.graph import Builder
from orttrainer.optim import moments
from orttrainer.optim.clip import sum_of_squares
from orttrainer.optim.optimizer import NUMBER, Attribute


@final
class Lamb(moments.MomentOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962), with the decay inside the direction.

        m <- alpha * m + (1 - alpha) * g;   v <- beta * v + (1 - beta) * g^2
        ac, bc = 1 - alpha^t, 1 - beta^t    (1, 1 without do_bias_correction)
        d = lambda * x + (m / ac) / (sqrt(v / bc) + epsilon)
        r = max(ratio_min, min(ratio_max, |x| / |d|))   (1 where |x| or |d| is 0)
        x <- x - lr * r * d

    g is scaled by max_norm_clip / norm where the global norm is above max_norm_clip. An element
    that is not finite makes its whole tensor NaN; legacy's kernel left single elements as they
    were, which would take several more passes over every tensor here.
    """

    name = "LambOptimizer"
    slot_names, count = ("Moment_1", "Moment_2", "Step"), "Step"
    elementwise = False
    known: ClassVar = {
        **moments.attributes(epsilon=1e-6, do_bias_correction=0, shared=True),
        "ratio_min": Attribute(-math.inf, *NUMBER, shared=True),
        "ratio_max": Attribute(math.inf, *NUMBER, shared=True),
    }

    def step(self, op, scalars, values, rate, x, m, v):
        a, b = moments.corrections(scalars, values)
        d = moments.direction(op, scalars, m, v, scalars.product(b, values["epsilon"]))
        if values["lambda"]:
            # d / a instead of d: one product with a tensor fewer, and a * |d / a| = |d|.
            decay = scalars.quotient(values["lambda"], a)
            d = op.Add(op.Mul(x, scalars.like(x, decay)), d)
        norm = op.Sqrt(sum_of_squares(op, d))
        norm = op.Mul(norm, scalars.like(norm, a)) if isinstance(a, ir.Value) else norm
        ratio = _trust_ratio(op, op.Sqrt(sum_of_squares(op, x)), norm, values)
        step = op.Mul(scalars.like(x, scalars.product(rate, a)), ratio)
        return op.Sub(x, op.Mul(d, step))

    def _check_together(self, parameter, values):
        super()._check_together(parameter, values)
        if values["ratio_min"] > values["ratio_max"]:
            rule = f"at most 'ratio_max', which is {values['ratio_max']!r}"
            raise self._error(parameter, "ratio_min", values["ratio_min"], rule)


def _trust_ratio(op: Builder, x_norm: ir.Value, d_norm: ir.Value, values) -> ir.Value:
    """|x| / |d| between ratio_min and ratio_max; 1 where either norm is 0."""
    ratio = op.Div(x_norm, d_norm)
    if values["ratio_max"] < math.inf:
        ratio = op.Min(ratio, values["ratio_max"])
    if values["ratio_min"] > -math.inf:
        ratio = op.Max(ratio, values["ratio_min"])
    return op.Where(op.Greater(op.Min(x_norm, d_norm), 0.0), ratio, op.scalar(1.0, ratio))
