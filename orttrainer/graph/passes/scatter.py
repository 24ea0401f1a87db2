"""Sums at repeated places that ONNX Runtime gets wrong."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims


class ScatterReductionPass(ir.passes.InPlacePass):
    """ScatterND(x, indices, updates) with a reduction -> ScatterElements on the rows of x.

    ONNX Runtime's CPU kernel of ScatterND goes through the updates with all its threads at once (seen in 1.31.1): two that go
    to one place race, and one of them is lost, now and then. Its ScatterElements uses one thread. Where the rank of x or
    the length of an index is unknown the node stays as it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in (model.graph, *model.graph.subgraphs()):
            nodes = [node for node in graph if _races(node)]
            if not nodes:
                continue
            graph.opset_imports.update(model.opset_imports)
            op = Builder(graph, "scatter" if graph is model.graph else f"{graph.name}/scatter")
            for node in nodes:
                y = node.outputs[0]
                new = _by_rows(op, node)
                new.type, new.shape, name = y.type, y.shape, y.name
                y.replace_all_uses_with(new, replace_graph_outputs=True)
                y.name, new.name = f"{name}/racing", name
                graph.remove(node, safe=True)
            graph.sort()
            modified = True
        return ir.passes.PassResult(model, modified)


def _races(node: ir.Node) -> bool:
    if node.domain or node.op_type != "ScatterND" or node.attributes.get_string("reduction", "none") == "none":
        return False
    x, indices, _ = node.inputs
    return x.shape is not None and indices.shape is not None and isinstance(indices.shape[-1], int)


def _by_rows(op: Builder, node: ir.Node) -> ir.Value:
    """x as [rows, elements of a row]; an index of several numbers is the number of a row."""
    x, indices, updates = node.inputs
    depth, rank = indices.shape[-1], len(x.shape)
    count = _joined(op, *(op.dim(x, axis) for axis in range(depth)))
    place = op.Where(op.Less(indices, np.int64(0)), op.Add(indices, count), indices)
    one = op.const(np.ones(1, np.int64))
    strides = [one]
    for axis in range(depth - 1, 0, -1):
        strides.insert(0, op.Mul(strides[0], op.dim(x, axis)))
    row = op.ReduceSum(op.Mul(place, _joined(op, *strides)), [-1], keepdims=0)
    rows = op.Mul(strides[0], op.dim(x, 0))
    length = op.Reshape(op.size(x, list(range(depth, rank))), [1]) if depth < rank else one
    number = op.Reshape(op.size(row), [1])
    flat = op.Reshape(updates, _joined(op, number, length), allowzero=1)
    column = op.Expand(op.Reshape(row, _joined(op, number, one), allowzero=1), op.shape(flat))
    reduction = node.attributes.get_string("reduction")
    target = op.Reshape(x, _joined(op, rows, length), allowzero=1)
    result = op.ScatterElements(target, column, flat, axis=0, reduction=reduction)
    dims = static_dims(x)
    return op.Reshape(result, op.shape(x), allowzero=1 if dims is None or 0 in dims else None)


def _joined(op: Builder, *parts: ir.Value) -> ir.Value:
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)
