"""Adam with decoupled weight decay (AdamW), in the two orders that legacy had."""

from __future__ import annotations

from typing import ClassVar, final

from orttrainer.optim import moments
from orttrainer.optim.optimizer import ZERO_OR_ONE, Attribute


@final
class Adam(moments.MomentOptimizer):
    """Adam (https://arxiv.org/abs/1412.6980) with decoupled decay (https://arxiv.org/abs/1711.05101).

        m <- alpha * m + (1 - alpha) * g;   v <- beta * v + (1 - beta) * g^2
        ac, bc = 1 - alpha^t, 1 - beta^t    (1, 1 without do_bias_correction)

    weight_decay_mode 0, decay before the update, as torch.optim.AdamW:
        x <- x - lr * lambda * x - lr * (m / ac) / (sqrt(v / bc) + epsilon)
    weight_decay_mode 1, decay after it, as Hugging Face's AdamW (epsilon is not bias-corrected):
        x <- (1 - lr * lambda) * (x - lr * sqrt(bc) / ac * m / (sqrt(v) + epsilon))

    g is scaled by max_norm_clip / norm where the global norm is above max_norm_clip.
    """

    name = "AdamOptimizer"
    count = "Update_Count"
    known: ClassVar = {
        **moments.attributes(epsilon=1e-8, do_bias_correction=1, shared=False),
        "weight_decay_mode": Attribute(0, *ZERO_OR_ONE),
    }

    def step(self, op, scalars, values, x, m, v):
        a, b = moments.corrections(scalars, values)
        late_decay = values["weight_decay_mode"] == 1
        d = moments.direction(op, scalars, m, v, scalars.product(1.0 if late_decay else b, values["epsilon"]))
        step = scalars.product(scalars.learning_rate, a)
        if values["lambda"]:
            keep = scalars.complement(scalars.product(scalars.learning_rate, values["lambda"]))
            step = scalars.product(step, keep) if late_decay else step
            x = op.Mul(x, scalars.like(x, keep))
        return op.Sub(x, op.Mul(d, scalars.like(d, step)))
