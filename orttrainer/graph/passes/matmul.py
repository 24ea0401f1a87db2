"""Matrix products that ONNX Runtime gets wrong."""

from __future__ import annotations

import math

import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.scopes import put_all_in_place


class VectorMatMulPass(ir.passes.InPlacePass):
    """MatMul(a, v), v of rank 1 -> Squeeze(MatMul(a, Unsqueeze(v))); likewise for a vector on the left.

    ONNX Runtime fuses MatMul(Transpose(a), v) into FusedMatMul(a, v, transA=1), which multiplies
    with a instead of its transpose where v has rank 1 (seen in 1.31.1): wrong numbers, no error.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "MatMul" and any(map(_is_vector, node.inputs))]
        op = Builder(model.graph, "vector") if nodes else None
        for node in nodes:
            a, b = node.inputs
            product = op.MatMul(
                op.Unsqueeze(a, [0]) if _is_vector(a) else a, op.Unsqueeze(b, [-1]) if _is_vector(b) else b
            )
            added = [axis for axis, x in ((-2, a), (-1, b)) if _is_vector(x)]
            (old,), new = node.outputs, op.Squeeze(product, added)
            new.name, new.type, new.shape, old.name = old.name, old.type, old.shape, f"{old.name}/vector"
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
        if nodes:
            TopologicalOrderPass()(model)
        return ir.passes.PassResult(model, bool(nodes))


def _is_vector(x: ir.Value) -> bool:
    return x.shape is not None and len(x.shape) == 1


class MultiplesPass(ir.passes.InPlacePass):
    """x * c * d -> x * cd for numbers c and d, where a matrix product reads x * c; transposes of these likewise.

    ONNX Runtime moves the numbers behind the products. Where one reads x * c and another, or the same, x * c * d, it removes
    x * c and reads it, and refuses the graph (seen in 1.31.1 and 1.32.0).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _is_multiple(node)]
        steps = dict.fromkeys(step for node in nodes for step in _steps(_scaled(node)))
        result = put_all_in_place(model, "multiples", nodes, _at_once)
        for (
            step
        ) in steps:  # of several in a row the last comes first; other nodes may be there for what they are called
            value = step.outputs[0]
            if step.graph is not None and not value.uses() and not value.is_graph_output():
                step.graph.remove(step, safe=True)
        return result


def _is_multiple(node: ir.Node) -> bool:
    """Whether it multiplies with a number again what a product of matrices reads."""
    return _factor(node) is not None and any(
        _factor(step) is not None and _is_multiplied(step.outputs[0]) for step in _steps(_scaled(node))
    )


def _is_multiplied(x: ir.Value) -> bool:
    readers = [use.node for use in x.uses()]
    return any(
        reader.op_type == "MatMul" or (reader.op_type == "Transpose" and _is_multiplied(reader.outputs[0]))
        for reader in readers
    )


def _steps(x: ir.Value) -> list[ir.Node]:
    """The products with numbers and the transposes, one after the other, that make `x`; the last comes first."""
    steps = []
    while (node := x.producer()) is not None and (node.op_type == "Transpose" or _factor(node) is not None):
        steps.append(node)
        x = _scaled(node)
    return steps


def _factor(node: ir.Node) -> float | None:
    """What a node multiplies a tensor with, if that is one number."""
    constants = [constant_array(x) for x in node.inputs] if node.op_type in ("Mul", "Div") else []
    numbers = [c for c in constants if c is not None]
    if len(numbers) != 1 or (node.op_type == "Div" and constants[1] is None):
        return None
    (number,) = numbers
    if number.size != 1 or number.ndim > 1 or number.dtype.kind != "f":
        return None
    factor = number.item()
    return factor if node.op_type == "Mul" else 1 / factor if factor else None


def _scaled(node: ir.Node) -> ir.Value:
    """What it multiplies or transposes."""
    return node.inputs[0] if constant_array(node.inputs[0]) is None else node.inputs[-1]


def _at_once(op: Builder, node: ir.Node) -> ir.Value:
    steps = [node, *_steps(_scaled(node))]
    while steps[-1].op_type == "Transpose":
        steps.pop()
    y = _scaled(steps[-1])
    for step in reversed(steps):
        if step.op_type == "Transpose":
            y = op.Transpose(y, **{name: attribute.value for name, attribute in step.attributes.items()})
    factor = math.prod(_factor(step) for step in steps if step.op_type != "Transpose")
    return op.Mul(y, op.scalar(factor, y))
