"""RAdam: Adam whose first steps, while the second moment says little, are those of a momentum."""

from __future__ import annotations

import math
from typing import ClassVar, final

from orttrainer.optim import moments
from orttrainer.optim.optimizer import BELOW_ONE, CLIP, NON_NEGATIVE, ZERO_OR_ONE, Attribute


@final
class RAdam(moments.MomentOptimizer):
    """Rectified Adam (https://arxiv.org/abs/1908.03265), as torch.optim.RAdam.

        h = g + weight_decay * x
        m <- alpha * m + (1 - alpha) * h;   v <- beta * v + (1 - beta) * h^2
        ac, bc = 1 - alpha^t, 1 - beta^t;   longest = 2 / (1 - beta) - 1;   length = longest - 2 t beta^t / bc
        x <- x - lr * lambda * x - lr * m / ac * (r * sqrt(bc) / (sqrt(v) + epsilon)  if length > 5, else  1)
        r = sqrt((length - 4) (length - 2) longest / ((longest - 4) (longest - 2) length))

    weight_decay is PyTorch's, lambda that with decoupled_weight_decay. g is scaled by max_norm_clip / norm where the global norm is
    above max_norm_clip, and by -1 with maximize; by default it is not.
    """

    name = "RAdamOptimizer"
    slot_names, count = ("Moment_1", "Moment_2", "Update_Count"), "Update_Count"
    known: ClassVar = {
        "alpha": Attribute(0.9, *BELOW_ONE),
        "beta": Attribute(0.999, *BELOW_ONE),
        "epsilon": Attribute(1e-8, *NON_NEGATIVE),
        "lambda": Attribute(0.0, *NON_NEGATIVE),
        "weight_decay": Attribute(0.0, *NON_NEGATIVE),
        "max_norm_clip": Attribute(math.inf, *CLIP),
        "max_norm_epsilon": Attribute(0.0, *NON_NEGATIVE),
        "maximize": Attribute(0, *ZERO_OR_ONE),
    }

    def step(self, op, scalars, values, rate, x, m, v):
        ac, bc = (scalars.bias_correction(values[key], True) for key in ("alpha", "beta"))
        rectified, r = scalars.rectification(values["beta"])
        step = scalars.quotient(rate, ac)
        adaptive = scalars.where(rectified, scalars.product(step, scalars.sqrt(bc), r), 0.0)
        plain, one = scalars.where(rectified, 0.0, step), scalars.where(rectified, 0.0, 1.0)
        # Where it is not adaptive 1 is added to the divisor, so that 0 / 0 is not NaN without an epsilon.
        divisor = op.Add(op.Add(op.Sqrt(v), scalars.like(v, values["epsilon"])), scalars.like(v, one))
        factor = op.Add(op.Div(scalars.like(v, adaptive), divisor), scalars.like(v, plain))
        if values["lambda"]:
            x = op.Mul(x, scalars.like(x, scalars.complement(scalars.product(rate, values["lambda"]))))
        return op.Sub(x, op.Mul(m, factor))
