"""Bounds, such as those of ReLU6, without Where, which uses one thread."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_shape
from orttrainer.graph.infinite import may_be_infinite
from orttrainer.graph.passes.counter_hash import replace
from orttrainer.graph.scopes import copy_scope


class ThresholdPass(ir.passes.InPlacePass):
    """Where(x >= k, k, x) -> Clip(x, max k); Where(x >= k, 0, dy) -> dy * HardSigmoid(3e38 (k - x)); likewise for <=.

    For constants k and float32. The mask is 1 or 0, but between them where x is a denormal number away from k. It stays
    a choice where dy may be infinite.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        op = Builder(graph, "thresholds")
        for node in [node for node in graph if node.op_type == "Where" and not node.domain]:
            before = set(graph)
            if (y := _bounded(op, node) or _masked(op, node)) is None:
                continue
            y.shape = node.outputs[0].shape
            for new in graph:
                if new not in before:
                    copy_scope(node, new)
            replace(node.outputs[0], y)
            graph.remove(node, safe=True)
            modified = True
        if modified:
            graph.sort()
        return ir.passes.PassResult(model, modified)


def _bounded(op: Builder, node: ir.Node) -> ir.Value | None:
    """Where(x >= k, k, x) in another form."""
    if (found := _threshold(op, node)) is None or node.inputs[2] is not found[1]:
        return None
    relation, x, k = found
    if _scalar(op, node.inputs[1]) != _scalar(op, k):
        return None
    none = op.scalar(-np.inf if relation == "GreaterOrEqual" else np.inf, x)
    k = op.scalar(_scalar(op, k), x)
    return op.Clip(x, none, k) if relation == "GreaterOrEqual" else op.Clip(x, k, none)


def _masked(op: Builder, node: ir.Node) -> ir.Value | None:
    """Where(x >= k, 0, dy) in another form."""
    if (found := _threshold(op, node)) is None or _scalar(op, node.inputs[1]) != 0:
        return None
    (relation, x, k), dy = found, node.inputs[2]
    if not same_shape(dy, x) or dy.dtype != x.dtype or may_be_infinite(x):
        return None
    inside = op.Sub(k, x) if relation == "GreaterOrEqual" else op.Sub(x, k)
    return op.Mul(dy, op.HardSigmoid(inside, alpha=3e38, beta=0.0))


def _threshold(op: Builder, node: ir.Node) -> tuple[str, ir.Value, ir.Value] | None:
    """The comparison that `node` chooses by: its operator, the tensor and the constant."""
    compare = node.inputs[0].producer()
    if compare is None or compare.domain or compare.op_type not in ("GreaterOrEqual", "LessOrEqual"):
        return None
    x, k = compare.inputs
    return (compare.op_type, x, k) if x.dtype == ir.DataType.FLOAT and _scalar(op, k) is not None else None


def _scalar(op: Builder, x: ir.Value) -> float | None:
    value = op.constant_value(x)
    return value.item() if value is not None and value.size == 1 and value.ndim == 0 else None
