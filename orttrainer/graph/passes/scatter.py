"""Sums at repeated places: those that ONNX Runtime gets wrong, and those that cost a tensor of zeros."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims, take_place


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
                take_place(_by_rows(op, node), node)
            graph.sort()
            modified = True
        return ir.passes.PassResult(model, modified)


class ScatterIntoSumPass(ir.passes.InPlacePass):
    """Add(a, ScatterElements(zeros, i, u, "add")) -> ScatterElements(a, i, u, "add").

    The zeros cost a pass over a tensor as large as a, the sum another; this works in the memory of a, or in a copy where
    something else reads a: both in the same order, so that recomputation stays bit for bit the same. Such a sum is the
    gradient of a table that is looked up twice, or that is tied to the decoder.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in (model.graph, *model.graph.subgraphs()):
            nodes = [node for node in graph if not node.domain and node.op_type == "Add"]
            for node in nodes:
                scatter, a = next(((s, a) for s, a in _both_ways(node.inputs) if _joins(s, a)), (None, None))
                if scatter is None:
                    continue
                take_place(scatter, node)
                scatter.producer().replace_input_with(0, a)
                modified = True
            if modified:
                graph.sort()
        return ir.passes.PassResult(model, modified)


def added_to_zeros(y: ir.Value) -> bool:
    """Whether `y` is ScatterElements(zeros, ., ., "add")."""
    node = y.producer()
    if node is None or node.domain or node.op_type != "ScatterElements":
        return False
    if node.attributes.get_string("reduction", "none") != "add":
        return False
    zeros = node.inputs[0].producer()
    if zeros is None or zeros.op_type != "ConstantOfShape":
        return False
    value = zeros.attributes.get("value")
    return value is None or not value.value.numpy().any()


def _joins(y: ir.Value, a: ir.Value) -> bool:
    """Whether `y`, which only a sum with `a` reads, may be made in the memory of `a`."""
    if a is y or a.producer() is None or not (_read_once(y) and added_to_zeros(y)):
        return False
    return a.dtype == y.dtype and static_dims(y) is not None and static_dims(a) == static_dims(y)


def _read_once(x: ir.Value) -> bool:
    return len(x.uses()) == 1 and not x.is_graph_output()


def _both_ways(pair):
    return pair, pair[::-1]


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
    strides = [_size(op, x, range(axis + 1, depth)) for axis in range(depth)]
    row = op.ReduceSum(op.Mul(place, _joined(op, *strides)), [-1], keepdims=0)
    rows, length, number = (
        _size(op, *of) for of in ((x, range(depth)), (x, range(depth, rank)), (row, range(len(row.shape))))
    )
    flat = op.Reshape(updates, _joined(op, number, length), allowzero=1)
    column = op.Reshape(row, _joined(op, number, _size(op, x, [])), allowzero=1)
    target = op.Reshape(x, _joined(op, rows, length), allowzero=1)
    reduction = node.attributes.get_string("reduction")
    result = op.ScatterElements(target, op.expand_as(column, flat), flat, axis=0, reduction=reduction)
    dims = static_dims(x)
    return op.Reshape(result, op.shape(x), allowzero=1 if dims is None or 0 in dims else None)


def _size(op: Builder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Elements of `x` along `axes` as a 1-element int64 value."""
    if len(axes) == 1:
        return op.dim(x, axes[0])  # which the result of a Reshape has by name
    size = op.size(x, list(axes))
    return op.Reshape(size, [1]) if (known := op.constant_value(size)) is None else op.const(known.reshape(1))


def _joined(op: Builder, *parts: ir.Value) -> ir.Value:
    known = [op.constant_value(part) for part in parts]
    if all(value is not None for value in known):
        return op.const(np.concatenate(known))
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)
