"""Products of matrices in which there is nothing to add up."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.scopes import put_all_in_place
from orttrainer.graph.sizes import given_sizes, may_be_zero


class EmptyProductsPass(ir.passes.InPlacePass):
    """MatMul(a, b) -> Where(a has no columns, 0, MatMul(a, b)), where values say how many there are, and not sizes of inputs.

    Likewise FusedMatMul. ONNX Runtime zeroes the first matrix alone, and nothing where b is a vector: the others stay what the
    memory held (seen in 1.31.1).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        given = given_sizes(model.graph)
        nodes = [node for node in model.graph.all_nodes() if node.op_type in _PRODUCTS and _may_be_left(node, given)]
        return put_all_in_place(model, "empty_product", nodes, _or_zeros)


_PRODUCTS = {"MatMul", "FusedMatMul"}
_ONE_MATRIX = {(1, 1), (1, 2), (2, 2)}  # the ranks of which ONNX Runtime makes zeros


def _may_be_left(node: ir.Node, given: set[str]) -> bool:
    """Whether there may be nothing to add up, where ONNX Runtime does not make zeros of it."""
    a, b = node.inputs
    if a.shape is None or b.shape is None or (len(a.shape), len(b.shape)) in _ONE_MATRIX:
        return False
    return may_be_zero(a.shape[_columns(node)], given)


def _columns(node: ir.Node) -> int:
    """The axis of a along which is added up."""
    return -2 if node.attributes.get_int("transA", 0) and len(node.inputs[0].shape) > 1 else -1


def _or_zeros(op: Builder, node: ir.Node) -> ir.Value:
    (y,) = node.outputs
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    product = op.node(node.op_type, *node.inputs, domain=node.domain, like=y, **attributes)
    return op.Where(op.Equal(op.dim(node.inputs[0], _columns(node)), 0), op.scalar(0, y), product)
