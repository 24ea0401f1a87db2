"""Operators on truth values that ONNX Runtime has no kernel for."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

BOOL, INT32 = ir.DataType.BOOL, ir.DataType.INT32


class BoolOperatorsPass(ir.passes.InPlacePass):
    """Where(c, a, b) -> (c and a) or (not c and b); the largest and smallest of truth values as those of numbers.

    ONNX Runtime 1.31 has neither for bool, and ONNX the second from opset 20 on. New values have no names.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if not node.domain and node.op_type in _SPELLED_OUT]
        nodes = [node for node in nodes if any(x is not None and x.dtype == BOOL for x in _values(node))]
        for node in nodes:
            _SPELLED_OUT[node.op_type](node)
        return ir.passes.PassResult(model, bool(nodes))


def _values(node: ir.Node) -> Sequence[ir.Value | None]:
    """What would have to be a number for ONNX Runtime."""
    return (*node.outputs, *(node.inputs[1:] if node.op_type == "Where" else node.inputs[:1]))


def _where(node: ir.Node) -> None:
    condition, yes, no = node.inputs
    others = _before(node, "And", [_before(node, "Not", [condition]), no])
    _replace(node, "Or", [_before(node, "And", [condition, yes]), others])


def _extreme(node: ir.Node) -> None:
    numbers = _before(node, "Cast", [node.inputs[0]], INT32, to=INT32)
    found = _before(node, node.op_type, [numbers, *node.inputs[1:]], INT32, **node.attributes)
    _replace(node, "Cast", [found], to=BOOL)


_SPELLED_OUT = {"Where": _where, "ReduceMax": _extreme, "ReduceMin": _extreme}


def _before(node: ir.Node, op_type: str, inputs, dtype: ir.DataType = BOOL, **attributes) -> ir.Value:
    new = ir.node(op_type, inputs, attributes, metadata_props=node.metadata_props)
    new.outputs[0].type = ir.TensorType(dtype)
    node.graph.insert_before(node, new)
    return new.outputs[0]


def _replace(node: ir.Node, op_type: str, inputs, **attributes) -> None:
    new, (old,) = _before(node, op_type, inputs, **attributes), node.outputs
    new.shape = old.shape
    new.name, old.name = old.name, None
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
