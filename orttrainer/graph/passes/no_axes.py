"""Reductions that are given no axes."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.scopes import put_all_in_place

REDUCTIONS = frozenset(
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)
NOOP = "noop_with_empty_axes"


class NoAxesPass(ir.passes.InPlacePass):
    """ReduceSum(x, no axes), noop_with_empty_axes -> x; of ReduceL1 Abs(x), and so on: of each number by itself.

    Without that attribute no axes are all, and are left out. Behind this pass there is the attribute only where the run alone
    knows the axes, so that whoever meets a reduction without them knows that it is of all.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if node.op_type in REDUCTIONS and not node.domain]
        alone = [node for node in nodes if node.attributes.get_int(NOOP, 0) and _are_none(node) and _has_form(node)]
        simplified = [_simplify(node) for node in nodes if node not in alone]
        replaced = put_all_in_place(model, "no_axes", alone, _of_each).modified
        return ir.passes.PassResult(model, replaced or any(simplified))


def _are_none(node: ir.Node) -> bool:
    """Whether there surely are no axes."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    return axes is None or (axes.shape is not None and axes.shape == (0,))


def _has_form(node: ir.Node) -> bool:
    """Whether there is an operator for each number; there is no logarithm of integers."""
    dtype = node.inputs[0].dtype
    return node.op_type != "ReduceLogSum" or dtype is None or dtype.is_floating_point()


def _of_each(op: Builder, node: ir.Node) -> ir.Value:
    x = node.inputs[0]
    match node.op_type:
        case "ReduceL1" | "ReduceL2":
            return op.Abs(x)
        case "ReduceLogSum":
            return op.Log(x)
        case "ReduceSumSquare":
            return op.Mul(x, x)
    return op.Identity(x)


def _simplify(node: ir.Node) -> bool:
    """Leave out axes or the attribute where they say nothing; whether there were any."""
    if _are_none(node):
        if node.attributes.get_int(NOOP, 0) or len(node.inputs) < 2:
            return False
        node.resize_inputs(1)
        return True
    shape = node.inputs[1].shape
    if NOOP not in node.attributes or shape is None or not shape.is_static():
        return False
    del node.attributes[NOOP]
    return True
