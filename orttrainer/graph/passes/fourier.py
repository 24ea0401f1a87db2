"""Fourier transforms whose number of points is no power of two."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.scopes import put_all_in_place

__all__ = ["WideFourierPass", "transformed"]


class WideFourierPass(ir.passes.InPlacePass):
    """DFT(x) of float32 -> DFT(x as float64) as float32, unless it is known to be of a power of two of points.

    And a half spectrum that is cut or padded first, which the operator gets wrong, and `DoubleKernelsPass` writes out.

    ONNX Runtime (1.31.1) writes others as a convolution with angles that grow with the square of the number of points: of
    1,000 it is off by 2e-4 of the largest value, of 5,000 by 1e-3, of 16,000 by 1e-2. In float64 it takes 1.1 to 1.4 times as
    long. To come before gradients, which are of float64 then, too.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _loses_digits(node, model.graph)]
        return put_all_in_place(model, "wide", nodes, _in_float64)


def _loses_digits(node: ir.Node, graph: ir.Graph) -> bool:
    if node.op_type != "DFT" or node.domain or node.inputs[0].dtype != ir.DataType.FLOAT:
        return False
    if (found := transformed(node, graph)) is None:
        return True
    _, points, size = found
    return bool(size & (size - 1)) or (_halved(node) and points != size // 2 + 1)


def _in_float64(op: Builder, node: ir.Node) -> ir.Value:
    x, *others = node.inputs
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    y = op.DFT(op.Cast(x, to=ir.DataType.DOUBLE), *others, **attributes)
    return op.Cast(y, to=ir.DataType.FLOAT)


def transformed(node: ir.Node, graph: ir.Graph) -> tuple[int, int, int] | None:
    """The axis of a DFT, how many points there are along it, and how many it transforms; None where these are not known."""
    x, length, given = (*node.inputs, None, None)[:3]
    if x.shape is None:
        return None
    axis = node.attributes.get_int("axis", 1) if graph.opset_imports[""] < 20 else -2
    if given is not None and (axis := _number(given)) is None:
        return None
    axis %= len(x.shape)
    points = x.shape[axis]
    if not isinstance(points, int):
        return None
    size = 2 * (points - 1) if _halved(node) else points
    if length is not None and (size := _number(length)) is None:
        return None
    return axis, points, size


def _halved(node: ir.Node) -> bool:
    """Whether half a spectrum is what is given."""
    return bool(node.attributes.get_int("inverse", 0) and node.attributes.get_int("onesided", 0))


def _number(value: ir.Value) -> int | None:
    tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else int(tensor.numpy().item())
