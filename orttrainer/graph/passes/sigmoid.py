"""The logistic function where small values of it matter."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

_LARGEST = {ir.DataType.FLOAT: 88.0, ir.DataType.DOUBLE: 709.0}  # of which the exponential is finite
_THROUGH = {  # as small as what goes in; of a sum, as of all pixels in a Dice loss, not all are
    "Cast", "Clip", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min", "ReduceMax",
    "ReduceMin", "ReduceProd", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


class SmallSigmoidPass(ir.passes.InPlacePass):
    """Sigmoid(x) -> 1 / (1 + Exp(Min(-x, 88))), where its logarithm, root or reciprocal is taken.

    ONNX Runtime's is 0 below -18, in double below -37, and at -16 half of what it should be (seen in 1.31.1, on the CPU):
    log(sigmoid(x)) of a loss is -inf there, binary cross-entropy has no gradient. Elsewhere 6e-8 is nothing, and it is
    faster: an output of the graph stays what it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "Sigmoid" and not node.domain]
        nodes = [node for node in nodes if node.inputs[0].dtype in _LARGEST and _matters(node.outputs[0], set())]
        op = Builder(model.graph, "sigmoid") if nodes else None
        for node in nodes:
            (x,), (y,) = node.inputs, node.outputs
            readers = [use for use in y.uses() if not y.is_graph_output() or _reads_small(*use, set())]
            with op.scope(node.name):
                power = op.Exp(op.Min(op.Neg(x), op.scalar(_LARGEST[x.dtype], x)))
                new = op.Div(op.scalar(1.0, x), op.Add(op.scalar(1.0, x), power))
            new.type, new.shape = y.type, y.shape
            new.producer().metadata_props.update(node.metadata_props)
            for reader, index in readers:
                reader.replace_input_with(index, new)
        if nodes:
            RemoveUnusedNodesPass()(model)
            TopologicalOrderPass()(model)
        return ir.passes.PassResult(model, bool(nodes))


def _matters(value: ir.Value, seen: set[ir.Value]) -> bool:
    """Whether something reads `value`, or what is made of it and as small, to which 0 is not near 1e-9."""
    if value in seen:
        return False
    seen.add(value)
    return any(_reads_small(node, index, seen) for node, index in value.uses())


def _reads_small(node: ir.Node, index: int, seen: set[ir.Value]) -> bool:
    match node.op_type if not node.domain else None:
        case "Log" | "Sqrt" | "Reciprocal" | "ReduceLogSum":
            return True
        case "Div" if index == 1 or constant_array(node.inputs[1]) is None:  # by what may be as small
            return True
        case "Pow" if index == 0:
            exponent = constant_array(node.inputs[1])
            return exponent is None or bool((exponent < 1).any()) or _matters(node.outputs[0], seen)
        case "Add" | "Mul":  # of a number; what else there is may be large
            other = constant_array(node.inputs[1 - index])
            return other is not None and other.size == 1 and _matters(node.outputs[0], seen)
        case "Sub" | "Div":
            return index == 0 and _matters(node.outputs[0], seen)
        case name if name in _THROUGH:
            return any(_matters(output, seen) for output in node.outputs)
    return False
