"""`orttrainer::StopGradient`: the identity whose gradient is zero, for `detach` and what is like it.

ONNX has no such operator. Exporters write it, the driver stops at it, and this pass takes it
out before anything is run.
"""

from __future__ import annotations

import onnx_ir as ir

DOMAIN = "orttrainer"
STOP_GRADIENT = "StopGradient"


class RemoveStopGradientPass(ir.passes.InPlacePass):
    """StopGradient(x) -> x."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [n for n in model.graph.all_nodes() if (n.domain, n.op_type) == (DOMAIN, STOP_GRADIENT)]
        for node in nodes:
            (x,), (y,) = node.inputs, node.outputs
            if y.is_graph_output():  # an output keeps its name and a node that makes it
                identity = ir.Node("", "Identity", [x], num_outputs=1, name=node.name)
                node.graph.insert_before(node, identity)
                (x,) = identity.outputs
                x.name, x.type, x.shape = y.name, y.type, y.shape
                y.name = f"{y.name}/stopped"
            y.replace_all_uses_with(x, replace_graph_outputs=True)
            node.graph.remove(node, safe=True)
        model.opset_imports.pop(DOMAIN, None)
        return ir.passes.PassResult(model, bool(nodes))
