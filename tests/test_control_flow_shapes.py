"""Sizes, ranks and types in branches and bodies, which may differ from those around them, or be said nowhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_control_flow import check, randoms


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("other", ["Sin", "Sub", "Mul"])
def test_branches_of_other_sizes_share_a_cotangent(taken, other):
    """Each undoes the broadcasting of an operand of its own."""
    operands = "x" if other == "Sin" else "x, v"
    body = f"""g (bool c, real[B,4] x, real[4,2] w, real[1,2] b, real[1,4] v) => (real[B,C] y) {{
      z = If (c) <then_branch = t () => (real[B,2] o) {{ a = MatMul(x, w) o = Add(a, b) }},
                  else_branch = e () => (real[B,4] p) {{ p = {other}({operands}) }}>
      y = Sin(z) }}"""

    def twin(x, w, b, v):
        there = {"Sin": torch.sin(x), "Sub": x - v, "Mul": x * v}[other]
        return torch.sin(x @ w + b if taken else there)

    check(body, {"c": np.array(taken), **randoms(x=(3, 4), w=(4, 2), b=(1, 2), v=(1, 4))}, twin)
