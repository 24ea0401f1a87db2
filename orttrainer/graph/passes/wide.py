"""What float64 is needed for in graphs of float32."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.passes.fourier import of_half_a_spectrum, transformed
from orttrainer.graph.scopes import put_all_in_place

__all__ = ["WidePass"]

_LONG = 1024  # numbers in a row, of which the float32 of ONNX Runtime and PyTorch are alike


class WidePass(ir.passes.InPlacePass):
    """F(x) of float32 -> F(x as float64) as float32, where ONNX Runtime's F (1.31.1) loses digits that PyTorch's keeps.

    - DFT, unless it is known to be of a power of two of points. Others are a convolution with angles that grow with the square
      of the number of points: of 1,000 they are off by 2e-4 of the largest value, of 5,000 by 1e-3, of 16,000 by 1e-2. In
      float64 they take 1.1 to 1.4 times as long. And half a spectrum that is cut or padded first, which the operator gets
      wrong, and `DoubleKernelsPass` writes out.
    - CumSum of many numbers, which are added one by one. PyTorch does it in float64: of 100,000 the last is off by 1e-5, of a
      million by 1e-2, and of a sum of phases whole turns are nothing.

    To come before gradients, which are of float64 then, too.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _loses_digits(node, model.graph)]
        return put_all_in_place(model, "wide", nodes, _in_float64)


def _loses_digits(node: ir.Node, graph: ir.Graph) -> bool:
    if node.domain or node.op_type not in ("DFT", "CumSum") or node.inputs[0].dtype != ir.DataType.FLOAT:
        return False
    return _is_inexact(node, graph) if node.op_type == "DFT" else _is_long(node)


def _is_inexact(node: ir.Node, graph: ir.Graph) -> bool:
    if (found := transformed(node, graph)) is None:
        return True
    _, points, size = found
    return bool(size & (size - 1)) or (of_half_a_spectrum(node) and points != size // 2 + 1)


def _is_long(node: ir.Node) -> bool:
    x, axis = node.inputs[0], constant_array(node.inputs[1])
    size = None if x.shape is None or axis is None else x.shape[int(axis.item())]
    return not isinstance(size, int) or size > _LONG


def _in_float64(op: Builder, node: ir.Node) -> ir.Value:
    x, *others = node.inputs
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    y = op.node(node.op_type, op.Cast(x, to=ir.DataType.DOUBLE), *others, **attributes)
    return op.Cast(y, to=ir.DataType.FLOAT)
