"""The gradient of SiLU, from its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from orttrainer.graph.builder import Builder, take_place
from orttrainer.graph.passes.speed.attention import PRECISE


class SiluGradientPass(ir.passes.InPlacePass):
    """The gradient of Y = X * S, S = sigmoid(X), from Y, which whatever multiplies with it keeps as well, and not from X:

        dY * S + (dY * X) * (S * (1 - S))  ->  dY * (S + Y * (1 - S))

    X is not kept for the backward, and there are two operators of its size less.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [match for node in graph if node.op_type == "Sigmoid" for match in _gradients(node)]
        op = Builder(graph, "silu") if found else None
        for dx, dy, y, s, rest in found:
            take_place(op.Mul(dy, op.Add(s, op.Mul(y, rest))), dx)
        if found:
            graph.sort()
        return ir.passes.PassResult(model, bool(found))


class _Gradient(NamedTuple):
    """The node that sums up dX, and what it is made of; `rest` is 1 - S."""

    dx: ir.Node
    dy: ir.Value
    y: ir.Value
    s: ir.Value
    rest: ir.Value


def _gradients(sigmoid: ir.Node) -> Iterator[_Gradient]:
    """Those that the backward takes through products of an X with this sigmoid of it."""
    (x,), (s,) = sigmoid.inputs, sigmoid.outputs
    products = _readers(s, "Mul") if s.dtype in PRECISE else []
    y = next((node.outputs[0] for node in products if _other(node, s) is x), None)
    for through in products if y is not None else ():
        dy = _other(through, s)
        for dx in _readers(through.outputs[0], "Add"):
            if (rest := _rest(_other(dx, through.outputs[0]), dy, x, s)) is not None:
                yield _Gradient(dx, dy, y, s, rest)


def _rest(gated: ir.Value, dy: ir.Value, x: ir.Value, s: ir.Value) -> ir.Value | None:
    """1 - S, if `gated` is (dY * X) * (S * (1 - S))."""
    for dgate, slope in _factors(gated), _factors(gated)[::-1]:
        if {dy, x} != {*_factors(dgate)} or s not in _factors(slope):
            continue
        rest = _other(slope.producer(), s)
        node = rest.producer()
        if node is not None and node.op_type == "Sub" and node.inputs[1] is s and _is_one(node.inputs[0]):
            return rest
    return None


def _factors(product: ir.Value) -> tuple[ir.Value, ir.Value] | tuple[None, None]:
    node = None if product is None else product.producer()
    return tuple(node.inputs) if node is not None and node.op_type == "Mul" and not node.domain else (None, None)


def _readers(value: ir.Value, op_type: str) -> list[ir.Node]:
    """Those in the graph of the node that makes it, whose subgraphs may read it as well."""
    nodes, graph = [use.node for use in value.uses()], value.producer().graph
    return [node for node in nodes if node.op_type == op_type and not node.domain and node.graph is graph]


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    """The operand that is not `value`."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _is_one(value: ir.Value) -> bool:
    constant = ir.convenience.get_const_tensor(value)
    return constant is not None and constant.size == 1 and constant.numpy().item() == 1.0
