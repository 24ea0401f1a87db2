"""What a training graph's forward is once nothing trains any more."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import take_place
from orttrainer.graph.optimizers import is_clip_of_relu
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


class ExactDoublePass(ir.passes.InPlacePass):
    """What ONNX Runtime's optimizations get wrong in float64, in operators that they pass over: who opens a file leaves none of them out.

    x^2, by which they find norms, is x * x, and a ReLU that is clipped max(x, 0); see `graph/optimizers.py`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [*model.graph.all_nodes()]
        squares = [node for node in nodes if _is_square_of_double(node)]
        clipped = {node.inputs[0].producer() for node in nodes if is_clip_of_relu(node)}
        for node in squares:
            _replace(node, ir.node("Mul", [node.inputs[0], node.inputs[0]]))
        for node in clipped:
            zero = ir.tensor(np.zeros((), node.inputs[0].dtype.numpy()))
            zero = ir.node("Constant", [], {"value": zero})
            node.graph.insert_before(node, zero)
            _replace(node, ir.node("Max", [node.inputs[0], zero.outputs[0]]))
        return ir.passes.PassResult(model, bool(squares or clipped))


def _is_square_of_double(node: ir.Node) -> bool:
    if node.op_type != "Pow" or node.inputs[0].dtype != ir.DataType.DOUBLE:
        return False
    power = ir.convenience.get_const_tensor(node.inputs[1])
    return power is not None and power.size == 1 and bool(power.numpy().reshape(()) == 2.0)


def _replace(node: ir.Node, new: ir.Node) -> None:
    node.graph.insert_before(node, new)
    take_place(new.outputs[0], node)


def _take_place(old: ir.Value, new: ir.Value) -> None:
    new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = old.name, None
