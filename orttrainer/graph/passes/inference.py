"""What a training graph's forward is once nothing trains any more."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.passes.batch_norm import state_behind, without_copy


class InferenceBatchNormalizationPass(ir.passes.InPlacePass):
    """Training BatchNormalization -> the same with its running statistics; nothing moves them any more."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [
            node
            for node in model.graph.all_nodes()
            if node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx") and len(node.outputs) > 1
        ]
        for node in nodes:
            statistics = [state_behind(without_copy(value)) for value in node.inputs[3:5]]
            epsilon = ir.AttrFloat32("epsilon", node.attributes.get_float("epsilon", 1e-5))
            new = ir.Node("", "BatchNormalization", [*node.inputs[:3], *statistics], [epsilon], name=node.name)
            (y,) = new.outputs
            y.type, y.shape = node.outputs[0].type, node.outputs[0].shape
            node.graph.insert_before(node, new)
            for old, value in zip(node.outputs, (y, *statistics)):
                name = old.name
                old.replace_all_uses_with(value, replace_graph_outputs=value is y)
                if value is y:
                    y.name, old.name = name, None
            node.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, bool(nodes))
