"""SciPy's `linear_sum_assignment`, which matches predictions with targets (DETR and its heirs), of an exporter's tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import torch

from orttrainer.export.rewrites.by_value import has_tensors, stacked
from orttrainer.graph.passes.gradient_marks import DOMAIN

__all__ = ["LINEAR_SUM_ASSIGNMENT", "on_tensors"]

LINEAR_SUM_ASSIGNMENT = "LinearSumAssignment"


@contextlib.contextmanager
def on_tensors(scopes: Iterable[dict]) -> Iterator[None]:
    """Within the block the function takes an exporter's tensors, also under the names that it has in these globals."""
    optimize = sys.modules.get("scipy.optimize")
    if optimize is None:
        yield
        return
    theirs = optimize.linear_sum_assignment

    def linear_sum_assignment(cost_matrix, maximize=False):
        if torch.compiler.is_exporting() and has_tensors(cost_matrix):
            cost_matrix = stacked(cost_matrix)
        if not torch.compiler.is_exporting() or not isinstance(cost_matrix, torch.Tensor):
            return theirs(cost_matrix, maximize)
        cost = cost_matrix.detach().to("cpu", torch.float64)
        return _assigned(-cost if maximize else cost)

    named = [(scope, name) for scope in (vars(optimize), *scopes) for name in scope if scope[name] is theirs]
    for scope, name in named:
        scope[name] = linear_sum_assignment
    try:
        yield
    finally:
        for scope, name in named:
            scope[name] = theirs


def _assigned(cost: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows and their columns, int64 [min(n, m)], of a float64 [n, m]."""
    size = torch.sym_min(*cost.shape)
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{LINEAR_SUM_ASSIGNMENT}", (cost,), dtypes=[torch.int64] * 2, shapes=[[size]] * 2, version=1
    )
