"""Transposes that undo each other."""

from __future__ import annotations

import onnx_ir as ir


class CancelTransposePairsPass(ir.passes.InPlacePass):
    """Transpose(Transpose(x, p), q) -> x, where q undoes p.

    The gradient of `x @ Transpose(W)` transposes the transposed weight once more: a copy of
    the largest matrix of a language model in every step.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph:
            inner = node.inputs[0].producer() if node.op_type == "Transpose" else None
            if inner is None or inner.op_type != "Transpose" or node.outputs[0].is_graph_output():
                continue
            p, q = (n.attributes.get_ints("perm") for n in (inner, node))
            if p and q and [p[i] for i in q] == list(range(len(p))):
                node.outputs[0].replace_all_uses_with(inner.inputs[0])
                model.graph.remove(node, safe=True)
                modified = True
        return ir.passes.PassResult(model, modified)
