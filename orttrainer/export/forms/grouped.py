"""The nodes of `rewrites/grouped.py`, as functions of the graph: sizes of groups are those of each batch."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import tape

from orttrainer.export.rewrites.grouped import GROUPED_PRODUCTS
from orttrainer.graph.guard import ENDS_DECREASE
from orttrainer.graph.passes.gradient_marks import DOMAIN

__all__ = ["define_grouped_products"]


def define_grouped_products(model: ir.Model) -> None:
    """Give the model a function for each number of groups that its nodes have."""
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) == (DOMAIN, GROUPED_PRODUCTS):
            groups, turned = node.inputs[1].shape[0], bool(node.attributes.pop("turned").as_int())
            node.op_type += f"{groups}{'Turned' if turned else ''}"
            if node.op_identifier() not in model.functions:
                model.functions[node.op_identifier()] = _products(node.op_type, groups, turned, model.opset_imports[""])


def _products(name: str, groups: int, turned: bool, opset: int) -> ir.Function:
    """rows [N, K], weight [groups, K, M] or, turned, [groups, M, K], ends of the groups [groups] -> [N, M]."""
    made = tape.Tape()
    rows, weight, offs = (ir.val(name) for name in ("rows", "weight", "offs"))

    def op(op_type: str, *inputs: ir.Value, **attributes) -> ir.Value:
        return made.op(op_type, inputs, attributes)

    def constant(*values: int) -> ir.Value:
        return op("Constant", value_ints=list(values))

    def split(x: ir.Value, sizes: ir.Value, pieces: int) -> Sequence[ir.Value]:
        return made.op_multi_out("Split", [x, sizes], {"axis": 0}, num_outputs=pieces, name=name + ENDS_DECREASE)

    count, last = op("Shape", rows, start=0, end=1), constant(groups - 1)
    ends = op("Min", op("Cast", offs, to=ir.DataType.INT64), count)
    starts = op("Concat", constant(0), op("Slice", ends, constant(0), last), axis=0)
    behind = op("Sub", count, op("Gather", ends, last))
    *pieces, _ = split(rows, op("Concat", op("Sub", ends, starts), behind, axis=0), groups + 1)
    matrices = [op("Squeeze", matrix, constant(0)) for matrix in split(weight, constant(*[1] * groups), groups)]
    if turned:
        matrices = [op("Transpose", matrix, perm=[1, 0]) for matrix in matrices]
    products = [op("MatMul", piece, matrix) for piece, matrix in zip(pieces, matrices)]
    width = op("Shape", products[0], start=1, end=2)
    zeros = op("Expand", op("CastLike", op("Constant", value_float=0.0), rows), op("Concat", behind, width, axis=0))
    product = op("Concat", *products, zeros, axis=0)
    graph = ir.Graph([rows, weight, offs], [product], nodes=made.nodes, opset_imports={"": opset}, name=name)
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])
