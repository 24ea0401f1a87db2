"""Products with large matrices: of few rows, as of a small batch with the weights of a large model, or of long sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.sized import SizedPass
from orttrainer.graph.passes.speed.tile_products import length_at_hand
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import DOMAIN

FLOAT = ir.DataType.FLOAT
FEW_ROWS, LONG_SUMS = range(8, 257), range(1024, 8193)  # one of the two; else ONNX Runtime's are as fast
LEAST_DEPTH, LEAST_COLUMNS, LEAST_ELEMENTS = 256, 96, 2**18  # of the second matrix


class FuseProductsPass(SizedPass):
    """MatMul(a, b), MatMul(a, Transpose(b)), Gemm -> a custom operator of products.c, where b is large.

    ONNX Runtime copies all of b into another order first, which few rows do not make good; and where sums are long it adds
    parts of them to y more often than it has to. What a Gemm adds is an Add, for a kernel that works element by element. To
    come before these are made.

    Args:
        sizes: of symbolic dimensions, in the batch at hand; others work as well.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None):
        super().__init__(sizes)
        self.kernels: list[ProductKernel] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op = Builder(graph, "products")
        for node in list(graph):
            if (operands := _operands(node)) is None or not self._fits(*operands[:3]):
                continue
            (a, b, turned, added), (y,) = operands, node.outputs
            self.kernels.append(ProductKernel(turned))
            new, _ = op.node(self.kernels[-1].name, a, b, domain=DOMAIN, outputs=2, like=y)
            new.producer().metadata_props.update(node.metadata_props)
            new.producer().name, node.name = node.name, None
            if added is not None:
                new = op.Add(new, added)
                new.producer().metadata_props.update(node.metadata_props)
            new.name, y.name, new.shape = y.name, f"{y.name}/product", y.shape
            y.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        if self.kernels:
            graph.sort()
        return ir.passes.PassResult(model, bool(self.kernels))

    def _fits(self, a: ir.Value, b: ir.Value, turned: bool) -> bool:
        if (a.dtype, b.dtype) != (FLOAT, FLOAT) or None in (a.shape, b.shape) or len(a.shape) < 2 or len(b.shape) != 2:
            return False
        *others, depth = (length_at_hand(a, axis, self.sizes) for axis in range(len(a.shape)))
        columns = length_at_hand(b, 0 if turned else 1, self.sizes)
        if None in (*others, depth, columns) or depth < LEAST_DEPTH or columns < LEAST_COLUMNS:
            return False
        return depth * columns >= LEAST_ELEMENTS and (math.prod(others) in FEW_ROWS or depth in LONG_SUMS)


@dataclass(frozen=True)
class ProductKernel:
    """The line of products.c in the table of kernels: with the second matrix as it is, or given turned."""

    turned: bool

    @property
    def name(self) -> str:
        return "Product_by_turned" if self.turned else "Product"

    def declaration(self) -> str:
        return f"static const int {self.name}_types[] = {{{int(FLOAT)}, {int(FLOAT)}}};\n"

    def entry(self) -> str:
        types, function = f"{self.name}_types", "multiply_by_turned" if self.turned else "multiply_plain"
        fields = {"name": f'"{self.name}"', "inputs": 2, "outputs": 2, "input_types": types, "output_types": types}
        return initializer({**fields, "other": function}) + ","


def _operands(node: ir.Node) -> tuple[ir.Value, ir.Value, bool, ir.Value | None] | None:
    """a, b, whether b is given turned, and what is added to their product, which `node` is."""
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    a, b, added = (*node.inputs, None)[:3]
    if node.op_type == "MatMul":
        made = b.producer()
        turned = (
            made is not None and made.op_type == "Transpose" and list(made.attributes.get_ints("perm", [])) == [1, 0]
        )
        return a, made.inputs[0] if turned else b, turned, None
    factors = (
        node.attributes.get_float("alpha", 1.0),
        node.attributes.get_float("beta", 1.0) if added is not None else 1.0,
    )
    if factors != (1.0, 1.0) or node.attributes.get_int("transA", 0):
        return None
    return a, b, bool(node.attributes.get_int("transB", 0)), added
