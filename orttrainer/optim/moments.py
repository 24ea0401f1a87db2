"""First and second moment of the gradient, which Adam and LAMB share."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import onnx_ir as ir

from orttrainer.errors import OptimizerError
from orttrainer.graph import Builder
from orttrainer.optim.optimizer import CLIP, DECAY_RATE, NON_NEGATIVE, ZERO_OR_ONE, Attribute, Optimizer, Slot
from orttrainer.optim.scalars import Scalar, Scalars, sign


def attributes(epsilon: float, do_bias_correction: int, shared: bool) -> dict[str, Attribute]:
    """The attributes that both have, with their defaults."""
    return {
        "alpha": Attribute(0.9, *DECAY_RATE),
        "beta": Attribute(0.999, *DECAY_RATE),
        "lambda": Attribute(0.0, *NON_NEGATIVE),
        "epsilon": Attribute(epsilon, *NON_NEGATIVE),
        "max_norm_clip": Attribute(1.0, *CLIP),
        "max_norm_epsilon": Attribute(0.0, *NON_NEGATIVE),
        "do_bias_correction": Attribute(do_bias_correction, *ZERO_OR_ONE, shared=shared),
    }


def check_bias_correction(optimizer: str, parameter: str, values: Mapping[str, float | int]) -> None:
    for key in ("alpha", "beta"):
        if values.get("do_bias_correction") and values[key] == 1.0:
            raise OptimizerError(
                f"{optimizer}: attribute {key!r} of parameter {parameter!r} is 1, which leaves its moment at 0, and "
                f"bias correction divides by 1 - {key}; it must be below 1, or 'do_bias_correction' 0."
            )


def slots(name: str, shape: tuple[int, ...], dtype: ir.DataType) -> tuple[Slot, ...]:
    return tuple(Slot(f"Moment_{i}_{name}", tuple(shape), dtype, 0.0, name) for i in (1, 2))


def new_moments(
    op: Builder, scalars: Scalars, values: Mapping[str, float | int], g: ir.Value, x: ir.Value, m: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """h = s * g + weight_decay * x;  m <- alpha * m + (1 - alpha) * h;  v <- beta * v + (1 - beta) * h^2.

    s scales, clips and, with maximize, turns g round. It stays out of h, which is held as h / s. Where s is 0, because the norm has overflowed, h is 0.
    """
    alpha, beta, s = values["alpha"], values["beta"], scalars.gradient(values)
    if values.get("weight_decay"):
        decay = scalars.product(values["weight_decay"], sign(values))
        g = op.Add(g, op.Mul(x, scalars.like(x, scalars.quotient(decay, scalars.positive(s)))))
    m_share = scalars.like(g, scalars.product(s, scalars.complement(alpha), sign(values)))
    v_share = scalars.like(g, scalars.product(s, s, scalars.complement(beta)))
    m = op.Add(op.Mul(m, scalars.like(m, alpha)), op.Mul(g, m_share))
    v = op.Add(op.Mul(v, scalars.like(v, beta)), op.Mul(op.Mul(g, g), v_share))
    return m, v


def corrections(scalars: Scalars, values: Mapping[str, float | int]) -> tuple[Scalar, Scalar]:
    """(a, b) such that (m / ac) / (sqrt(v / bc) + epsilon) = a * m / (sqrt(v) + b * epsilon)."""
    enabled = bool(values["do_bias_correction"])
    ac, bc = (scalars.bias_correction(values[key], enabled) for key in ("alpha", "beta"))
    b = scalars.sqrt(bc)
    return scalars.quotient(b, ac), b


def direction(op: Builder, scalars: Scalars, m: ir.Value, v: ir.Value, epsilon: Scalar) -> ir.Value:
    """m / (sqrt(v) + epsilon)."""
    return op.Div(m, op.Add(op.Sqrt(v), scalars.like(v, epsilon)))


class MomentOptimizer(Optimizer):
    """What Adam and LAMB share: both moments of every parameter, a count, and their update; not the step itself."""

    always = ("Moment_1", "Moment_2")

    def slots(self, name, shape, dtype):
        self._check_dtype(name, dtype)
        greatest = (Slot(_greatest(name), tuple(shape), dtype, 0.0, name),) if self._keeps_greatest(name) else ()
        return slots(name, shape, dtype) + greatest

    def update(self, op, learning_rates, gradient_norm, gradient_scale, parameters, gradients, state):
        updated, scalars_of = self._begun(op, learning_rates, gradient_norm, gradient_scale, parameters, state)
        for name in sorted(parameters):
            x, values, scalars = parameters[name], self.attributes[name], scalars_of[self.counter_of(name)]
            m, v = (state[f"Moment_{i}_{name}"] for i in (1, 2))
            m, v = new_moments(op, scalars, values, gradients[name], x, m, v)
            updated[f"Moment_1_{name}"], updated[f"Moment_2_{name}"] = m, v
            if self._keeps_greatest(name):
                v = updated[_greatest(name)] = op.Max(state[_greatest(name)], v)
            updated[name] = self.step(op, scalars, values, scalars.learning_rate(name), x, m, v)
        return updated

    @abc.abstractmethod
    def step(self, op: Builder, scalars: Scalars, values: Mapping[str, float | int], rate, x, m, v) -> ir.Value:
        """The new value of parameter `x`, from its learning rate, its new moments `m` and `v` and its attributes."""

    def _counts(self, parameter):
        return True

    def _keeps_greatest(self, parameter: str) -> bool:
        """Whether the step takes the greatest second moment so far."""
        return bool(self.attributes[parameter].get("amsgrad"))

    def _check_together(self, parameter, values):
        check_bias_correction(self.name, parameter, values)


def _greatest(parameter: str) -> str:
    return f"Max_Moment_2_{parameter}"
