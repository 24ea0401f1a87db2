"""Matrix products that ONNX Runtime gets wrong."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import Builder


class VectorMatMulPass(ir.passes.InPlacePass):
    """MatMul(a, v), v of rank 1 -> Squeeze(MatMul(a, Unsqueeze(v))); likewise for a vector on the left.

    ONNX Runtime fuses MatMul(Transpose(a), v) into FusedMatMul(a, v, transA=1), which multiplies
    with a instead of its transpose where v has rank 1 (seen in 1.31.1): wrong numbers, no error.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "MatMul" and any(map(_is_vector, node.inputs))]
        op = Builder(model.graph, "vector") if nodes else None
        for node in nodes:
            a, b = node.inputs
            product = op.MatMul(
                op.Unsqueeze(a, [0]) if _is_vector(a) else a, op.Unsqueeze(b, [-1]) if _is_vector(b) else b
            )
            added = [axis for axis, x in ((-2, a), (-1, b)) if _is_vector(x)]
            (old,), new = node.outputs, op.Squeeze(product, added)
            new.name, new.type, new.shape, old.name = old.name, old.type, old.shape, f"{old.name}/vector"
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
        if nodes:
            common.TopologicalSortPass()(model)
        return ir.passes.PassResult(model, bool(nodes))


def _is_vector(x: ir.Value) -> bool:
    return x.shape is not None and len(x.shape) == 1
