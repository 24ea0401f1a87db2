"""Optimizers that divide each gradient by what they keep of earlier ones: RMSprop, Adagrad, Adadelta, Adamax; as in torch.optim."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import ClassVar, final

import onnx_ir as ir

from orttrainer.graph import Builder
from orttrainer.optim.optimizer import (
    BELOW_ONE,
    CLIP,
    DECAY_RATE,
    NON_NEGATIVE,
    ZERO_OR_ONE,
    Attribute,
    Optimizer,
    Slot,
)
from orttrainer.optim.scalars import Scalars

State = dict[str, ir.Value]  # slot, without the parameter's name -> its tensor

_OF_ALL: Mapping[str, Attribute] = {
    "weight_decay": Attribute(0.0, *NON_NEGATIVE),
    "max_norm_clip": Attribute(math.inf, *CLIP),
    "max_norm_epsilon": Attribute(0.0, *NON_NEGATIVE),
    "maximize": Attribute(0, *ZERO_OR_ONE),
}


class AveragingOptimizer(Optimizer):
    """What these share: a state that begins with zeros, a count of updates, and the gradient that they take.

        h = g + weight_decay * x

    g is scaled by max_norm_clip / norm where the global norm is above max_norm_clip, and by -1 with maximize; by default it is not.
    """

    count = "Update_Count"

    def slots(self, name, shape, dtype):
        self._check_dtype(name, dtype)
        kept = self.kept(self.attributes[name])
        return tuple(Slot(f"{slot}_{name}", tuple(shape), dtype, 0.0, name) for slot in kept)

    def kept(self, values: Mapping[str, float | int]) -> tuple[str, ...]:
        """The slots of a parameter with these attributes."""
        return self.always

    def update(self, op, learning_rates, gradient_norm, gradient_scale, parameters, gradients, state):
        updated, scalars_of = self._begun(op, learning_rates, gradient_norm, gradient_scale, parameters, state)
        for name in sorted(parameters):
            x, values, scalars = parameters[name], self.attributes[name], scalars_of[self.counter_of(name)]
            before = {slot: state[f"{slot}_{name}"] for slot in self.kept(values)}
            h = scalars.decayed(values, x, gradients[name])
            updated[name], after = self.step(op, scalars, values, scalars.learning_rate(name), x, h, before)
            updated |= {f"{slot}_{name}": value for slot, value in after.items()}
        return updated

    @abc.abstractmethod
    def step(
        self, op: Builder, scalars: Scalars, values: Mapping[str, float | int], rate, x, h, before: State
    ) -> tuple[ir.Value, State]:
        """The new value of parameter `x`, from its learning rate and the gradient `h`, and its new state."""

    def _counts(self, parameter):
        return True


@final
class RMSprop(AveragingOptimizer):
    """RMSprop (lecture 6 of https://www.cs.toronto.edu/~hinton/coursera_lectures.html), as torch.optim.RMSprop.

    v <- alpha * v + (1 - alpha) * h^2
    a <- alpha * a + (1 - alpha) * h      (with centered, else a = 0)
    d = h / (sqrt(v - a^2) + epsilon)
    u <- momentum * u + d                 (without momentum there is no u, and d is taken)
    x <- x - lr * u
    """

    name = "RMSpropOptimizer"
    always = ("Square_Average",)
    slot_names = (*always, "Gradient_Average", "Momentum", "Update_Count")
    known: ClassVar = {
        "alpha": Attribute(0.99, *DECAY_RATE),
        "epsilon": Attribute(1e-8, *NON_NEGATIVE),
        "momentum": Attribute(0.0, *NON_NEGATIVE),
        "centered": Attribute(0, *ZERO_OR_ONE),
        **_OF_ALL,
    }

    def kept(self, values):
        centered = ("Gradient_Average",) if values["centered"] else ()
        return self.always + centered + (("Momentum",) if values["momentum"] else ())

    def step(self, op, scalars, values, rate, x, h, before):
        alpha, after = values["alpha"], {}
        v = after["Square_Average"] = _average(op, scalars, alpha, before["Square_Average"], op.Mul(h, h))
        if values["centered"]:
            a = after["Gradient_Average"] = _average(op, scalars, alpha, before["Gradient_Average"], h)
            v = op.Sub(v, op.Mul(a, a))
        d = op.Div(h, op.Add(op.Sqrt(v), scalars.like(v, values["epsilon"])))
        if values["momentum"]:
            d = op.Add(op.Mul(before["Momentum"], scalars.like(x, values["momentum"])), d)
            after["Momentum"] = d
        return op.Sub(x, op.Mul(d, scalars.like(x, rate))), after


@final
class Adagrad(AveragingOptimizer):
    """Adagrad (https://jmlr.org/papers/v12/duchi11a.html), as torch.optim.Adagrad without an initial_accumulator_value.

    v <- v + h^2
    x <- x - lr / (1 + (t - 1) * lr_decay) * h / (sqrt(v) + epsilon)
    """

    name = "AdagradOptimizer"
    always = ("Square_Sum",)
    slot_names = (*always, "Update_Count")
    known: ClassVar = {
        "lr_decay": Attribute(0.0, *NON_NEGATIVE),
        "epsilon": Attribute(1e-10, *NON_NEGATIVE),
        **_OF_ALL,
    }

    def step(self, op, scalars, values, rate, x, h, before):
        v = op.Add(before["Square_Sum"], op.Mul(h, h))
        d = op.Div(h, op.Add(op.Sqrt(v), scalars.like(v, values["epsilon"])))
        step = scalars.like(x, scalars.slowed(rate, values["lr_decay"]))
        return op.Sub(x, op.Mul(d, step)), {"Square_Sum": v}


@final
class Adadelta(AveragingOptimizer):
    """Adadelta (https://arxiv.org/abs/1212.5701), as torch.optim.Adadelta.

    v <- rho * v + (1 - rho) * h^2
    d = sqrt(u + epsilon) / sqrt(v + epsilon) * h
    u <- rho * u + (1 - rho) * d^2
    x <- x - lr * d
    """

    name = "AdadeltaOptimizer"
    always = ("Square_Average", "Delta_Average")
    slot_names = (*always, "Update_Count")
    known: ClassVar = {"rho": Attribute(0.9, *DECAY_RATE), "epsilon": Attribute(1e-6, *NON_NEGATIVE), **_OF_ALL}

    def step(self, op, scalars, values, rate, x, h, before):
        rho, u = values["rho"], before["Delta_Average"]
        v = _average(op, scalars, rho, before["Square_Average"], op.Mul(h, h))
        above, below = (op.Sqrt(op.Add(y, scalars.like(y, values["epsilon"]))) for y in (u, v))
        d = op.Mul(op.Div(above, below), h)
        u = _average(op, scalars, rho, u, op.Mul(d, d))
        return op.Sub(x, op.Mul(d, scalars.like(x, rate))), {"Square_Average": v, "Delta_Average": u}


@final
class Adamax(AveragingOptimizer):
    """Adamax (https://arxiv.org/abs/1412.6980, section 7.1), as torch.optim.Adamax.

    m <- alpha * m + (1 - alpha) * h
    u <- max(beta * u, |h| + epsilon)
    x <- x - lr / (1 - alpha^t) * m / u
    """

    name = "AdamaxOptimizer"
    always = ("Moment_1", "Infinity_Norm")
    slot_names = (*always, "Update_Count")
    known: ClassVar = {
        "alpha": Attribute(0.9, *BELOW_ONE),
        "beta": Attribute(0.999, *DECAY_RATE),
        "epsilon": Attribute(1e-8, *NON_NEGATIVE),
        **_OF_ALL,
    }

    def step(self, op, scalars, values, rate, x, h, before):
        alpha, u = values["alpha"], before["Infinity_Norm"]
        m = _average(op, scalars, alpha, before["Moment_1"], h)
        u = op.Max(op.Mul(u, scalars.like(u, values["beta"])), op.Add(op.Abs(h), scalars.like(h, values["epsilon"])))
        step = scalars.like(x, scalars.quotient(rate, scalars.bias_correction(alpha, True)))
        return op.Sub(x, op.Mul(op.Div(m, u), step)), {"Moment_1": m, "Infinity_Norm": u}


def _average(op: Builder, scalars: Scalars, decay, old: ir.Value, new: ir.Value) -> ir.Value:
    """decay * old + (1 - decay) * new."""
    share = scalars.like(new, scalars.complement(decay))
    return op.Add(op.Mul(old, scalars.like(old, decay)), op.Mul(new, share))
