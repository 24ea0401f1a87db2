"""Unique of types that ONNX Runtime has no kernel for."""

from __future__ import annotations

import onnx_ir as ir

_CAST = {ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.INT32}


class UniqueTypesPass(ir.passes.InPlacePass):
    """Unique(x) -> Cast(Unique(Cast(x))), by way of int64, of truth values and of small integers."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if node.op_type == "Unique" and not node.domain]
        nodes = [node for node in nodes if node.inputs[0].dtype in _CAST]
        for node in nodes:
            _as_int64(node)
        return ir.passes.PassResult(model, bool(nodes))


def _as_int64(node: ir.Node) -> None:
    (x,), found = node.inputs, node.outputs[0]
    new = ir.Value(name=found.name, type=ir.TensorType(x.dtype), shape=found.shape)
    found.replace_all_uses_with(new, replace_graph_outputs=True)
    found.name, found.type = found.name and f"{found.name}/int64", ir.TensorType(ir.DataType.INT64)
    there = ir.node("Cast", [x], {"to": ir.DataType.INT64}, metadata_props=node.metadata_props)
    there.outputs[0].type, there.outputs[0].shape = found.type, x.shape
    back = ir.node("Cast", [found], {"to": x.dtype}, outputs=[new], metadata_props=node.metadata_props)
    node.graph.insert_before(node, there)
    node.replace_input_with(0, there.outputs[0])
    node.graph.insert_after(node, back)
