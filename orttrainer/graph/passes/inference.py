"""What a training graph's forward is once nothing trains any more."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.passes.batch_norm import corrected_variance, without_copy


class InferenceBatchNormalizationPass(ir.passes.InPlacePass):
    """Training BatchNormalization -> the same with its running statistics; nothing moves them any more."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [
            node
            for node in model.graph.all_nodes()
            if node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx") and len(node.outputs) > 1
        ]
        for node in nodes:
            statistics = [without_copy(value) for value in node.inputs[3:5]]
            if (corrected := corrected_variance(node)) is not None and not corrected.is_graph_output():
                corrected.replace_all_uses_with(statistics[1])
            epsilon = ir.AttrFloat32("epsilon", node.attributes.get_float("epsilon", 1e-5))
            new = ir.Node("", "BatchNormalization", [*node.inputs[:3], *statistics], [epsilon], name=node.name)
            node.graph.insert_before(node, new)
            _take_place(node.outputs[0], new.outputs[0])
            for old, statistic in zip(node.outputs[1:], statistics):
                if old.is_graph_output():
                    copy = ir.node("Identity", [statistic])
                    node.graph.insert_before(node, copy)
                    _take_place(old, copy.outputs[0])
                else:
                    old.replace_all_uses_with(statistic)
            node.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, bool(nodes))


def _take_place(old: ir.Value, new: ir.Value) -> None:
    new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = old.name, None
