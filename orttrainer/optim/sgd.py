"""Stochastic gradient descent, without momentum."""

from __future__ import annotations

from typing import final

from orttrainer.optim.optimizer import Optimizer
from orttrainer.optim.scalars import Scalars


@final
class SGD(Optimizer):
    """x <- x - learning_rate * g. Never clips; has no attributes and no state."""

    name = "SGDOptimizer"

    def update(self, op, learning_rate, gradient_norm, parameters, gradients, state):
        scalars = Scalars(op, learning_rate)
        updated = {}
        for name in sorted(parameters):
            x, g = parameters[name], gradients[name]
            updated[name] = op.Sub(x, op.Mul(g, scalars.like(x, scalars.learning_rate)))
        return updated
