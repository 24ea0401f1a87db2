"""A gradient that is made as an optimizer's moments need it."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.sparse_update import sums_squares

DOMAIN = "com.microsoft"
LEAST_ELEMENTS = 2**16  # of a gradient: below, a pass over it costs less than a node
LEAST_FACTOR = 2**-8  # so that a square does not underflow before its share in a moment would


class ScaledGradientPass(ir.passes.InPlacePass):
    """Mul(g, c) and Mul(Mul(g, g), d) with g = MatMul(a, b) -> h = FusedMatMul(a, b, alpha=c) and Mul(Mul(h, h), d / c^2).

    c and d are constants, as 1 - alpha and 1 - beta of Adam: the update has one pass over memory less. The operator is
    ONNX Runtime's own; a Gemm would take in transposes that are better left outside. Between product
    and g may be what only moves elements, or adds rows to it (ScatterElements), which are multiplied then. Sums of
    squares of g are those of h, over c^2.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        op = Builder(graph, "scaled")
        for node in [node for node in graph if node.op_type == "Mul" and not node.domain]:
            found = _share(op, node)
            if found is None or not _is_large(found[0]):
                continue
            g, c = found
            readers = _readers(op, g, node)
            path = _path(g)
            if readers is None or path is None:
                continue
            squares, sums = readers
            h = _scaled(op, g, path, c)
            for products in squares.values():
                for product, k in products:
                    d = product.inputs[k]
                    product.replace_input_with(k, op.const(_known(op, d) / np.float64(c) ** 2, d.dtype))
            for total in sums:
                uses = list(total.uses())
                back = op.Mul(total, op.scalar(1.0 / c**2, g))
                for reader, k in uses:
                    reader.replace_input_with(k, back)
            node.outputs[0].replace_all_uses_with(h)
            graph.remove(node, safe=True)
            modified = True
        if modified:
            graph.opset_imports.setdefault(DOMAIN, 1)
            graph.sort()
        return ir.passes.PassResult(model, modified)


def _share(op: Builder, node: ir.Node) -> tuple[ir.Value, float] | None:
    """The gradient that `node` multiplies with a constant, and the constant."""
    for g, c in (node.inputs, node.inputs[::-1]):
        known = _known(op, c)
        if known is not None and known.size == 1 and LEAST_FACTOR <= known.item() < 1.0 and g.producer() is not None:
            return None if node.outputs[0].is_graph_output() else (g, known.item())
    return None


def _known(op: Builder, x: ir.Value) -> np.ndarray | None:
    value = op.constant_value(x)
    return None if value is None else value.astype(np.float64)


def _is_large(g: ir.Value) -> bool:
    dims = static_dims(g)
    return g.dtype == ir.DataType.FLOAT and dims is not None and math.prod(dims) >= LEAST_ELEMENTS


def _readers(op: Builder, g: ir.Value, node: ir.Node):
    """What else reads `g`.

    Returns:
        Its squares, each with the products with a constant that read it as (node, index of the constant); the sums of all
        of its squares. None where it has another reader than these and `node`, or no square.
    """
    squares, sums = {}, []
    if g.is_graph_output():
        return None
    for reader in dict.fromkeys(reader for reader, _ in g.uses()):
        if reader is node:
            continue
        if len(reader.outputs) != 1:
            return None
        (y,) = reader.outputs
        if sums_squares(reader) and not y.is_graph_output():
            sums += [y] if not y.shape else [adds.outputs[0] for adds, _ in y.uses()]
            continue
        if reader.op_type != "Mul" or reader.domain or any(x is not g for x in reader.inputs) or y.is_graph_output():
            return None
        squares[reader] = [(product, 1 - k) for product, k in y.uses()]
        for product, k in squares[reader]:
            known = _known(op, product.inputs[k]) if product.op_type == "Mul" and not product.domain else None
            if known is None or known.size != 1:
                return None
    return (squares, sums) if squares and not any(total.is_graph_output() for total in sums) else None


def _path(g: ir.Value) -> list[ir.Node] | None:
    """The nodes from a product to `g`, each read by the next one only; None where there is another node between."""
    path, x = [], g
    while (node := x.producer()) is not None and not node.domain:
        if x is not g and (len(x.uses()) != 1 or x.is_graph_output()):
            return None
        path.insert(0, node)
        if node.op_type == "MatMul":
            return path
        added = node.op_type == "ScatterElements" and node.attributes.get_string("reduction", "none") == "add"
        if not added and node.op_type not in ("Identity", "Reshape", "Transpose"):
            return None
        x = node.inputs[0]
    return None


def _scaled(op: Builder, g: ir.Value, path: list[ir.Node], c: float) -> ir.Value:
    """`g` times c, made by the product that the path to it begins with; all its readers read that."""
    product, *rest = path
    (y,) = product.outputs
    scaled = ir.Node(DOMAIN, "FusedMatMul", product.inputs, [ir.AttrFloat32("alpha", c)], name=f"{product.name}/scaled")
    (h,) = scaled.outputs
    h.type, h.shape = y.type, y.shape
    op.graph.insert_after(product, scaled)  # where it was: what it reads need not be kept for longer
    y.replace_all_uses_with(h)
    op.graph.remove(product, safe=True)
    h.name = y.name
    for node in rest:
        if node.op_type == "ScatterElements":
            node.replace_input_with(2, op.Mul(node.inputs[2], op.scalar(c, y)))
    return g if rest else h
