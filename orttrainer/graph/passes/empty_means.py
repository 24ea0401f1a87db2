"""The mean of what a batch may leave nothing of, as `x[mask].mean()`."""

from __future__ import annotations

import math
import re

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.order import TopologicalOrderPass


class EmptyMeansPass(ir.passes.InPlacePass):
    """ReduceMean(x) -> Where(Size(x) = 0, NaN, ReduceMean(x)), where values say how large x is, and not sizes of inputs.

    Also where x is a part that is none whatever the batch, as w[:0]. So it is in PyTorch; ONNX leaves it open, and ONNX Runtime
    gives 0. What has a mean has a shape of named sizes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        known = {name for x in model.graph.inputs for size in x.shape or () for name in _names(size)}
        means = [node for node in model.graph if node.op_type == "ReduceMean"]
        nodes = [node for node in means if any(size == 0 or _names(size) - known for size in _reduced(node))]
        op = Builder(model.graph, "mean") if nodes else None
        for node in nodes:
            (mean,) = node.outputs
            readers = list(mean.uses())
            found = op.Where(op.Equal(op.Size(node.inputs[0]), 0), op.scalar(math.nan, mean), mean)
            found.type, found.shape = mean.type, mean.shape
            for reader, index in readers:
                reader.replace_input_with(index, found)
            if mean.is_graph_output():
                outputs, name = model.graph.outputs, mean.name
                outputs[:] = [found if value is mean else value for value in outputs]
                mean.name, found.name = found.name, name
        if nodes:
            TopologicalOrderPass()(model)
        return ir.passes.PassResult(model, bool(nodes))


def _reduced(node: ir.Node) -> list[int | ir.SymbolicDim]:
    """The sizes over which a ReduceMean goes."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    shape = [] if x.shape is None else list(x.shape)
    chosen = None if axes is None else ir.convenience.get_const_tensor(axes)
    return shape if chosen is None or not chosen.size else [shape[axis] for axis in chosen.numpy() if shape]


def _names(size: int | ir.SymbolicDim) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", str(size)))
