"""Stochastic gradient descent, with momentum if asked for."""

from __future__ import annotations

import math
from typing import ClassVar, final

from orttrainer.optim.optimizer import CLIP, FINITE, NON_NEGATIVE, ZERO_OR_ONE, Attribute, Optimizer, Slot
from orttrainer.optim.scalars import sign


@final
class SGD(Optimizer):
    """SGD as torch.optim.SGD, Nesterov's momentum as in https://proceedings.mlr.press/v28/sutskever13.html.

        h = g + weight_decay * x
        u <- momentum * u + (1 - dampening) * h      (without momentum there is no u, and d = h)
        d = h + momentum * u  if nesterov, else  u
        x <- x - lr * d

    The first u of a parameter is h, whatever the dampening. g is scaled by -1 with maximize, and by max_norm_clip / norm
    where the global norm is above max_norm_clip; by default it never is, as in legacy. The decay is added to the
    gradient, not taken off x by a factor 1 - lr * weight_decay, which float32 rounds to 1 where it is small: one pass
    over x for that.
    """

    name = "SGDOptimizer"
    slot_names, count = ("Momentum", "Update_Count"), "Update_Count"
    known: ClassVar = {
        "momentum": Attribute(0.0, *NON_NEGATIVE),
        "nesterov": Attribute(0, *ZERO_OR_ONE),
        "weight_decay": Attribute(0.0, *NON_NEGATIVE),
        "max_norm_clip": Attribute(math.inf, *CLIP),
        "max_norm_epsilon": Attribute(0.0, *NON_NEGATIVE),
        "maximize": Attribute(0, *ZERO_OR_ONE),
        "dampening": Attribute(0.0, *FINITE),
    }

    def slots(self, name, shape, dtype):
        self._check_dtype(name, dtype)
        return (Slot(_slot(name), tuple(shape), dtype, 0.0, name),) if self.attributes[name]["momentum"] else ()

    def update(self, op, learning_rates, gradient_norm, gradient_scale, parameters, gradients, state):
        updated, scalars_of = self._begun(op, learning_rates, gradient_norm, gradient_scale, parameters, state)
        for name in sorted(parameters):
            scalars = scalars_of[self.counter_of(name)]
            x, g, values, rate = parameters[name], gradients[name], self.attributes[name], scalars.learning_rate(name)
            momentum, decay = values["momentum"], values["weight_decay"]
            if not momentum:
                s = scalars.product(scalars.gradient(values), sign(values))
                step = op.Mul(g, scalars.like(x, scalars.product(rate, s)))
                if decay:
                    step = op.Add(step, op.Mul(x, scalars.like(x, scalars.product(rate, decay))))
                updated[name] = op.Sub(x, step)
                continue
            mu, h = scalars.like(x, momentum), scalars.decayed(values, x, g)
            share = scalars.undamped(values["dampening"])
            u = op.Add(op.Mul(state[_slot(name)], mu), h if share == 1.0 else op.Mul(h, scalars.like(h, share)))
            d = op.Add(h, op.Mul(u, mu)) if values["nesterov"] else u
            updated[name], updated[_slot(name)] = op.Sub(x, op.Mul(d, scalars.like(x, rate))), u
        return updated

    def _counts(self, parameter):
        return bool(self.attributes[parameter]["momentum"] and self.attributes[parameter]["dampening"])

    def _check_together(self, parameter, values):
        if values["nesterov"] and not values["momentum"]:
            raise self._error(parameter, "nesterov", values["nesterov"], "0 where 'momentum' is 0")


def _slot(parameter: str) -> str:
    return f"Momentum_{parameter}"
