"""Adam: decoupled weight decay in the two orders that legacy had, and PyTorch's coupled one."""

from __future__ import annotations

import math
from typing import ClassVar, final

from orttrainer.optim import moments
from orttrainer.optim.optimizer import CLIP, NON_NEGATIVE, ZERO_OR_ONE, Attribute


class AdamUpdate(moments.MomentOptimizer):
    """Adam (https://arxiv.org/abs/1412.6980), with weight decay of every kind.

        h = g + weight_decay * x
        m <- alpha * m + (1 - alpha) * h;   v <- beta * v + (1 - beta) * h^2
        ac, bc = 1 - alpha^t, 1 - beta^t    (1, 1 without do_bias_correction)

    With amsgrad (https://openreview.net/forum?id=ryQu7f-RZ) the greatest v so far takes the place of v below.

    weight_decay, coupled, is torch.optim.Adam's; lambda, decoupled, is that of AdamW
    (https://arxiv.org/abs/1711.05101).

    weight_decay_mode 0, decay before the update, as torch.optim.AdamW:
        x <- x - lr * lambda * x - lr * (m / ac) / (sqrt(v / bc) + epsilon)
    weight_decay_mode 1, decay after it, as Hugging Face's AdamW (epsilon is not bias-corrected):
        x <- (1 - lr * lambda) * (x - lr * sqrt(bc) / ac * m / (sqrt(v) + epsilon))

    g is scaled by max_norm_clip / norm where the global norm is above max_norm_clip, and by -1 with maximize.
    """

    slot_names, count = ("Moment_1", "Moment_2", "Max_Moment_2", "Update_Count"), "Update_Count"

    def step(self, op, scalars, values, rate, x, m, v):
        a, b = moments.corrections(scalars, values)
        late_decay = values["weight_decay_mode"] == 1
        d = moments.direction(op, scalars, m, v, scalars.product(1.0 if late_decay else b, values["epsilon"]))
        step = scalars.product(rate, a)
        if values["lambda"]:
            keep = scalars.complement(scalars.product(rate, values["lambda"]))
            step = scalars.product(step, keep) if late_decay else step
            x = op.Mul(x, scalars.like(x, keep))
        return op.Sub(x, op.Mul(d, scalars.like(d, step)))


@final
class Adam(AdamUpdate):
    """Adam with the legacy defaults: no decay, gradients clipped to a global norm of 1. Update: `AdamUpdate`."""

    name = "AdamOptimizer"
    known: ClassVar = {
        **moments.attributes(epsilon=1e-8, do_bias_correction=1, shared=False),
        "weight_decay_mode": Attribute(0, *ZERO_OR_ONE),
        "weight_decay": Attribute(0.0, *NON_NEGATIVE),
        "maximize": Attribute(0, *ZERO_OR_ONE),
        "amsgrad": Attribute(0, *ZERO_OR_ONE),
    }


@final
class AdamW(AdamUpdate):
    """Adam with the defaults of torch.optim.AdamW: lambda 0.01, no clipping. Update: `AdamUpdate`."""

    name = "AdamWOptimizer"
    known: ClassVar = {
        **Adam.known,
        "lambda": Attribute(0.01, *NON_NEGATIVE),
        "max_norm_clip": Attribute(math.inf, *CLIP),
    }
