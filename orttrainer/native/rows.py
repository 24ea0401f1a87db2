"""Sums of rows at places that repeat, the gradient of an embedding, by several threads."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import same_dim
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import DOMAIN


class FuseRowsPass(ir.passes.InPlacePass):
    """ScatterElements(table, Expand(places), rows, axis=0, "add") -> a custom operator, to the same bits.

    ONNX Runtime's works on one element after the other, in one thread, and wants a place for each; of zeros it has a tensor
    made first.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self):
        super().__init__()
        self.kernels: list[RowsKernel] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for node in list(graph):
            if not _adds_rows(node):
                continue
            table, index, rows = node.inputs
            is_zeros = added_to_zeros(node.outputs[0])
            self.kernels.append(RowsKernel(is_zeros))
            inputs = [table.producer().inputs[0] if is_zeros else table, index.producer().inputs[0], rows]
            new = ir.Node(DOMAIN, self.kernels[-1].name, inputs, name=node.name)
            new.metadata_props.update(node.metadata_props)
            (old,), (value,) = node.outputs, new.outputs
            value.type, value.shape, name = old.type, old.shape, old.name
            graph.insert_before(node, new)
            old.replace_all_uses_with(value, replace_graph_outputs=True)
            old.name, value.name = None, name
            graph.remove(node, safe=True)
        if self.kernels:
            graph.opset_imports[DOMAIN] = 1
        return ir.passes.PassResult(model, bool(self.kernels))


@dataclass(frozen=True)
class RowsKernel:
    """The line of rows.c in the table of kernels: for zeros, of which it reads the shape, or for a table."""

    is_zeros: bool

    @property
    def name(self) -> str:
        return "Rows_of_zeros" if self.is_zeros else "Rows_of_table"

    def declaration(self) -> str:
        first = ir.DataType.INT64 if self.is_zeros else ir.DataType.FLOAT
        types = ", ".join(str(int(dtype)) for dtype in (first, ir.DataType.INT64, ir.DataType.FLOAT))
        return (
            f"static const int {self.name}_input_types[] = {{{types}}};\n"
            f"static const int {self.name}_output_types[] = {{{int(ir.DataType.FLOAT)}}};\n"
        )

    def entry(self) -> str:
        fields = {"name": f'"{self.name}"', "inputs": 3, "outputs": 1, "other": "add_rows"}
        fields |= {key: f"{self.name}_{key}" for key in ("input_types", "output_types")}
        return initializer(fields if self.is_zeros else {**fields, "inplace": "table_inplace"}) + ","


def _adds_rows(node: ir.Node) -> bool:
    if node.op_type != "ScatterElements" or node.domain or node.attributes.get_string("reduction", "none") != "add":
        return False
    table, index, rows = node.inputs
    expand = index.producer()
    if node.attributes.get_int("axis", 0) != 0 or expand is None or expand.op_type != "Expand":
        return False
    column = expand.inputs[0]
    if any(x.shape is None or x.dtype is None for x in (table, column, index, rows)):
        return False
    if len({len(x.shape) for x in (table, column, index, rows)}) != 1 or any(d != 1 for d in column.shape.dims[1:]):
        return False
    if not all(same_dim(a, b) for a, b in zip(table.shape.dims[1:], rows.shape.dims[1:])):
        return False  # some of their columns only
    return (table.dtype, column.dtype, rows.dtype) == (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.FLOAT)
