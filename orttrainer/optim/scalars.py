"""The scalar side of an update: learning rates, scaling, clipping and bias correction as 0-d float64 values.

Each is emitted once and shared by all parameters that use it. Tensors are then multiplied with
products of them, so that none costs a pass of its own over a tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import onnx_ir as ir

from orttrainer.graph import Builder

DOUBLE = ir.DataType.DOUBLE
INT64 = ir.DataType.INT64

Scalar = ir.Value | float

EMITTED_ONCE = (
    "clip", "bias_correction", "undamped", "slowed", "rectification", "where", "product", "quotient", "sqrt", "complement", "positive",
    "_like",
)  # fmt: skip


def sign(values: Mapping[str, float | int]) -> float:
    """What a gradient is multiplied with for the way that the update goes: up with `maximize`, else down."""
    return -1.0 if values.get("maximize") else 1.0


class Scalars:
    """Scalars of one update.

    Args:
        op: builder of the training graph.
        learning_rates: for each parameter a float of shape [1]; equal values are converted once.
        gradient_norm: global norm of the gradients after scaling, 0-d float; None: do not clip.
        gradient_scale: what every gradient is to be multiplied with, 0-d float; None: nothing.
        count: number of updates, this one included, plus 1: int64, shape [1] (legacy counts from 1).
    """

    def __init__(
        self,
        op: Builder,
        learning_rates: Mapping[str, ir.Value],
        gradient_norm: ir.Value | None = None,
        gradient_scale: ir.Value | None = None,
        count: ir.Value | None = None,
    ):
        self.op = op
        distinct = dict.fromkeys(learning_rates[name] for name in sorted(learning_rates))
        converted = {rate: self._double(rate) for rate in distinct}
        self._rates = {name: converted[rate] for name, rate in learning_rates.items()}
        self._gradient_norm, self._gradient_scale, self._count = gradient_norm, gradient_scale, count
        for method in EMITTED_ONCE:
            setattr(self, method, functools.cache(getattr(self, method)))

    @functools.cached_property
    def step(self) -> ir.Value:
        """Number of this update: 1 at the first."""
        return self.op.Sub(self._double(self._count), 1.0)

    def learning_rate(self, parameter: str) -> ir.Value:
        return self._rates[parameter]

    def gradient(self, values: Mapping[str, float | int]) -> Scalar:
        """What a gradient is multiplied with: its scale, and the clipping that the attributes of its parameter ask for."""
        clip = self.clip(values["max_norm_clip"], values["max_norm_epsilon"])
        return clip if self._scale is None else self.product(clip, self._scale)

    def decayed(self, values: Mapping[str, float | int], x: ir.Value, g: ir.Value) -> ir.Value:
        """h = s * g + weight_decay * x: what the update takes for the gradient; s scales, clips and, with maximize, turns g round."""
        op, s, decay = self.op, self.product(self.gradient(values), sign(values)), values["weight_decay"]
        h = g if s == 1.0 else op.Mul(g, self.like(g, s))
        return op.Add(h, op.Mul(x, self.like(x, decay))) if decay else h

    def clip(self, max_norm: float, epsilon: float = 0.0) -> Scalar:
        """max_norm / norm where norm > max_norm, else 1: also where norm is NaN, so that NaN gradients stay seen.

        With `epsilon`, which is added to the norm, as `torch.nn.utils.clip_grad_norm_` has it: NaN makes all gradients NaN.
        """
        if self._gradient_norm is None or max_norm == math.inf:
            return 1.0
        op, bound = self.op, self.op.const(max_norm, DOUBLE)
        if not epsilon:
            return op.Where(op.Greater(self._norm, bound), op.Div(bound, self._norm), self._one)
        norm = op.Add(self._norm, epsilon)
        return op.Where(op.LessOrEqual(norm, bound), self._one, op.Div(bound, norm))

    def bias_correction(self, decay: Scalar, enabled: bool) -> Scalar:
        """1 - decay ** step where step > 0, else 1. In float64: float32 loses half the digits for decay near 1."""
        if not enabled:
            return 1.0
        decay = decay if isinstance(decay, ir.Value) else self.op.const(decay, DOUBLE)
        corrected = self.op.Sub(self._one, self.op.Pow(decay, self.step))
        return self.op.Where(self._started, corrected, self._one)

    def undamped(self, dampening: float) -> Scalar:
        """What of a gradient goes into the momentum: 1 at the first update, as in PyTorch, then 1 - dampening."""
        if not dampening:
            return 1.0
        later = self.op.const(1.0 - dampening, DOUBLE)
        return self.op.Where(self.op.Greater(self.step, 1.0), later, self._one)

    def slowed(self, rate: ir.Value, decay: Scalar) -> ir.Value:
        """rate / (1 + (step - 1) * decay), as torch.optim.Adagrad's lr_decay has it."""
        if not decay:
            return rate
        op = self.op
        return op.Div(rate, op.Add(op.Mul(op.Sub(self.step, 1.0), decay), 1.0))

    def rectification(self, decay: Scalar) -> tuple[ir.Value, ir.Value]:
        """Whether the variance of the adaptive rate is tractable at this step, and then RAdam's r_t (its equation 3), else any number."""
        op, corrected = self.op, self.bias_correction(decay, True)
        longest = op.Sub(op.Div(2.0, op.Sub(self._one, decay)), 1.0)
        length = op.Sub(longest, op.Div(op.Mul(op.Mul(self.step, 2.0), op.Sub(self._one, corrected)), corrected))
        above, below = (
            op.Mul(op.Mul(op.Sub(x, 4.0), op.Sub(x, 2.0)), y) for x, y in ((length, longest), (longest, length))
        )
        return op.Greater(length, 5.0), op.Sqrt(op.Div(above, below))

    def where(self, condition: ir.Value, a: Scalar, b: Scalar) -> ir.Value:
        return self.op.Where(condition, *(x if isinstance(x, ir.Value) else self.op.const(x, DOUBLE) for x in (a, b)))

    def product(self, *factors: Scalar) -> Scalar:
        """Product of all factors; the known ones are multiplied here and now."""
        known = math.prod(f for f in factors if not isinstance(f, ir.Value))
        values = [f for f in factors if isinstance(f, ir.Value)]
        if not values:
            return known
        return functools.reduce(self.op.Mul, values if known == 1.0 else [*values, known])

    def quotient(self, a: Scalar, b: Scalar) -> Scalar:
        if not isinstance(b, ir.Value):
            return self.product(a, 1.0 / b)
        return self.op.Div(a if isinstance(a, ir.Value) else self.op.const(a, DOUBLE), b)

    def sqrt(self, a: Scalar) -> Scalar:
        return self.op.Sqrt(a) if isinstance(a, ir.Value) else math.sqrt(a)

    def complement(self, a: Scalar) -> Scalar:
        """1 - a."""
        return self.op.Sub(self._one, a) if isinstance(a, ir.Value) else 1.0 - a

    def positive(self, a: Scalar) -> Scalar:
        """`a`, which is not negative, as a divisor: 1 where it is 0."""
        if not isinstance(a, ir.Value):
            return a
        return self.op.Where(self.op.Greater(a, 0.0), a, self._one)

    def like(self, x: ir.Value, scalar: Scalar) -> ir.Value:
        """`scalar` as a 0-d value of the dtype of `x`."""
        return self._like(x.dtype, scalar)

    def _like(self, dtype: ir.DataType, scalar: Scalar) -> ir.Value:
        if not isinstance(scalar, ir.Value):
            return self.op.const(scalar, dtype)
        return scalar if scalar.dtype == dtype else self.op.Cast(scalar, to=int(dtype))

    @functools.cached_property
    def _norm(self) -> ir.Value:
        return self._double(self._gradient_norm)

    @functools.cached_property
    def _scale(self) -> ir.Value | None:
        return None if self._gradient_scale is None else self._double(self._gradient_scale)

    @functools.cached_property
    def _started(self) -> ir.Value:
        return self.op.Greater(self.step, 0.0)

    @property
    def _one(self) -> ir.Value:
        return self.op.const(1.0, DOUBLE)

    def _double(self, x: ir.Value) -> ir.Value:
        return as_double(self.op, x)


def as_double(op: Builder, x: ir.Value) -> ir.Value:
    """`x`, of one element, as a 0-d float64 value."""
    x = x if x.dtype == DOUBLE else op.Cast(x, to=int(DOUBLE))
    return x if x.shape is not None and len(x.shape) == 0 else op.Squeeze(x, [0])
