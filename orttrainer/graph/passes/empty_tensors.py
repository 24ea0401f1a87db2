"""Operators that ONNX Runtime cannot run on tensors with nothing along an axis, as of a mask that picks no row."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.counter_hash import replace
from orttrainer.graph.sizes import given_sizes, may_be_zero


class EmptyTensorsPass(ir.passes.InPlacePass):
    """Other forms where values say how large a tensor is, and not sizes of inputs (all seen in ONNX Runtime 1.31.1).

    - Reshape(x, [0, n, -1]) -> Reshape(x, [0, n, m]): of nothing it does not find out what -1 is.
    - MatMul(matrix, x), MatMul(Transpose(x), matrix) -> one product of all columns of x: it refuses an x of no matrices. A vector
      from the left is a matrix of one row.
    - LSTM, GRU, RNN -> of one sequence more, of zeros, which is taken off behind: of none it ends the process.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, given = model.graph, given_sizes(model.graph)
        op, modified = Builder(graph, "empty"), False
        for node in list(graph):
            write = _FORMS.get(node.op_type) if not node.domain else None
            if write is None or any(x is not None and x.shape is None for x in node.inputs):
                continue
            if any(may_be_zero(size, given) for x in node.inputs if x is not None for size in x.shape.dims):
                with op.scope(node.name):
                    modified |= write(op, node, given)
        if modified:
            graph.sort()
        return ir.passes.PassResult(model, modified)


def _reshape(op: Builder, node: ir.Node, given: set[str]) -> bool:
    x, target = node.inputs[0], op.constant_value(node.inputs[1])
    if target is None or list(target).count(-1) != 1 or node.attributes.get_int("allowzero", 0):
        return False
    kept = {axis for axis, size in enumerate(target) if size == 0}
    others = [size for axis, size in enumerate(x.shape.dims) if axis not in kept]
    known = math.prod(int(size) for size in target if size > 0)
    if not all(isinstance(size, int) and size for size in others) or math.prod(others) % known:
        return False  # a 0 would be the size of x there
    node.replace_input_with(1, op.const(np.where(target == -1, math.prod(others) // known, target)))
    return True


def _matmul(op: Builder, node: ir.Node, given: set[str]) -> bool:
    left, right = node.inputs
    of_none = len(left.shape) <= len(right.shape) and any(may_be_zero(size, given) for size in right.shape.dims[:-2])
    if of_none and len(left.shape) == 1:
        new = op.Squeeze(product_from_left(op, op.Unsqueeze(left, [0]), right), [-2])
    elif of_none and all(size == 1 for size in left.shape.dims[:-2]):
        ones = [*range(len(left.shape) - 2)]
        new = product_from_left(op, op.Squeeze(left, ones) if ones else left, right)
    elif len(right.shape) == 2 and _is_turned(left) and any(may_be_zero(size, given) for size in left.shape.dims[:-2]):
        new = product_of_rows(op, left, right)
    else:
        return False
    _put(op, node, [new])
    return True


def _is_turned(x: ir.Value) -> bool:
    return x.producer() is not None and x.producer().op_type == "Transpose"


def product_from_left(op: Builder, matrix: ir.Value, x: ir.Value) -> ir.Value:
    """A matrix times each of the matrices of x, of which there may be none."""
    rank = len(x.shape)
    swap = [*range(rank - 2), rank - 1, rank - 2]
    return op.Transpose(product_of_rows(op, op.Transpose(x, perm=swap), op.Transpose(matrix, perm=[1, 0])), perm=swap)


def product_of_rows(op: Builder, x: ir.Value, matrix: ir.Value) -> ir.Value:
    """Each of the matrices of x, of which there may be none, times a matrix: the rows of all of them at once."""
    last = len(x.shape) - 1
    rows = op.Reshape(x, op.Concat(op.const(np.array([-1])), op.dim(matrix, 0), axis=0))
    shape = op.Concat(op.Shape(x, end=last), op.dim(matrix, 1), axis=0)
    return op.Reshape(op.MatMul(rows, matrix), shape, allowzero=1)


def _recurrent(op: Builder, node: ir.Node, given: set[str]) -> bool:
    x, w, r, bias, lengths, *states = [*node.inputs, *[None] * 8][:8]
    if node.attributes.get_int("layout", 0) or not may_be_zero(x.shape[1], given):
        return False
    *before, peepholes = states
    one_more = np.array([0, 0, 0, 0, 1, 0])
    lengths = None if lengths is None else op.Pad(lengths, [0, 1], np.int32(1))
    before = [None if state is None else op.Pad(state, one_more) for state in before]
    inputs = [op.Pad(x, one_more), w, r, bias, lengths, *before, peepholes][: len(node.inputs)]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    longer = op.node(node.op_type, *inputs, outputs=len(node.outputs), **attributes)
    longer = [longer] if len(node.outputs) == 1 else longer
    _put(op, node, [op.Slice(y, [0], [-1], [axis]) for y, axis in zip(longer, (2, 1, 1))])
    return True


def _put(op: Builder, node: ir.Node, values: list[ir.Value]) -> None:
    """`values` in the place of the results of `node`, and of their type."""
    for old, new in zip(node.outputs, values):
        new.type, new.shape = old.type, old.shape
        new.producer().metadata_props.update(node.metadata_props)
        replace(old, new)
    op.graph.remove(node, safe=True)


_FORMS = {"Reshape": _reshape, "MatMul": _matmul, "LSTM": _recurrent, "GRU": _recurrent, "RNN": _recurrent}
