"""Where a gradient may be infinite: a mask there has to choose, since 0 times infinity is NaN.

PyTorch's `relu`, `clamp`, `maximum` and their like choose always. A product with a mask is several times as fast, and the
same for all that is finite; so it stays where no operator of infinite slope follows on a value as it comes, as in
`relu(x).sqrt()`, `log(clamp(p, 0, 1))` or the square root of clamped distances.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["is_backward", "may_be_infinite"]

_INFINITE = {"Acos", "Acosh", "Asin", "Atanh", "Log", "Reciprocal", "ReduceLogSum", "Sqrt"}  # their slope, somewhere
# What is 0 of 0, or moves, sums and chooses elements. Not products with weights: they are rarely 0, and nearly everything
# lies behind one.
_PASSED = {
    *(
        "Abs",
        "Add",
        "Cast",
        "Clip",
        "Div",
        "Dropout",
        "Identity",
        "Max",
        "Mean",
        "Min",
        "Mul",
        "Neg",
        "Pow",
        "Sub",
        "Sum",
    ),
    *("Asinh", "Atan", "Celu", "Elu", "Erf", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Selu", "Shrink", "Sin"),
    *("Sinh", "Softsign", "Tan", "Tanh", "ThresholdedRelu", "Where"),
    *("AveragePool", "CumSum", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "TopK"),
    *("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    *("Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Pad", "Reshape", "Slice"),
    *("ScatterElements", "ScatterND", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"),
}

_BACKWARD = ("grad/", "step/")  # how names of nodes begin that are not the forward's


def may_be_infinite(value: ir.Value) -> bool:
    """Whether the gradient of `value`, of the forward, may have infinite elements where `value` is finite."""
    seen, waiting = {value}, [value]
    while waiting:
        for node, index in waiting.pop().uses():
            if node.domain or is_backward(node):
                continue
            if node.op_type in _INFINITE or (node.op_type == "Div" and index == 1):
                return True
            if node.op_type == "Pow" and (index == 1 or not _at_least_1(node.inputs[1])):
                return True
            if node.op_type in _PASSED:
                waiting += [y for y in node.outputs if y not in seen]
                seen.update(node.outputs)
    return False


def is_backward(node: ir.Node) -> bool:
    """Whether a node of a training graph is no part of its forward, by its name."""
    return (node.name or "").startswith(_BACKWARD)


def _at_least_1(exponent: ir.Value) -> bool:
    known = exponent.const_value
    return known is not None and not exponent.is_graph_input() and bool((known.numpy() >= 1).all())
