"""Axes of a scalar: PyTorch takes 0 and -1 for them, ONNX has none."""

from __future__ import annotations

import onnx_ir as ir


class ReduceScalarPass(ir.passes.InPlacePass):
    """ReduceSum(x, [0]) -> ReduceSum(x), where x is 0-d; and the other reductions."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph.all_nodes():
            if node.domain or not node.op_type.startswith("Reduce") or len(node.inputs) < 2 or node.inputs[1] is None:
                continue
            shape = _shape(node.inputs[0])
            if shape is None or len(shape) or node.attributes.get_int("noop_with_empty_axes", 0):
                continue
            node.resize_inputs(1)
            modified = True
        return ir.passes.PassResult(model, modified)


def _shape(x: ir.Value | None) -> ir.Shape | None:
    """The shape of `x`, looked up behind operators that leave it as it is: exporters omit some between two nodes."""
    while x is not None and x.shape is None and (node := x.producer()) is not None and node.op_type in _UNARY:
        x = node.inputs[0]
    return None if x is None else x.shape


_UNARY = {"Abs", "Cast", "Identity", "Neg"}
