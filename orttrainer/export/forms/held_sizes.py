"""What a graph takes for granted of the sizes within it, as nodes that fail where it does not hold."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from orttrainer.export.values.granted import Granted
from orttrainer.graph.builder import Builder
from orttrainer.graph.guard import OTHER_SIZES

__all__ = ["hold_sizes"]

_OPERATORS = {
    ast.Add: "Add",
    ast.Sub: "Sub",
    ast.Mult: "Mul",
    ast.Mod: "Mod",
    ast.Eq: "Equal",
    ast.Lt: "Less",
    ast.LtE: "LessOrEqual",
    ast.Gt: "Greater",
    ast.GtE: "GreaterOrEqual",
    ast.And: "And",
    ast.Or: "Or",
}


def hold_sizes(graph: ir.Graph, statements: Mapping[str, Granted]) -> list[str]:
    """Have the first output of a graph, and its gradients, wait for statements, and fail where one is not true.

    Args:
        statements: by what a failure says of them; of inputs of the graph.

    Returns:
        Those that have no form in ONNX.
    """
    op, left = Builder(graph, "sizes"), []
    inputs = {value.name: value for value in graph.inputs}
    result = given = graph.outputs[0]
    for text, statement in statements.items():
        sizes = [op.dim(inputs[name], axis) for name, axis in statement.sizes]
        try:
            holds = _nodes(op, ast.parse(statement.text, mode="eval").body, sizes)
        except KeyError:
            left.append(text)
            continue
        one = op.Gather(op.const([1.0], given.dtype), op.Cast(op.Not(holds), to=ir.DataType.INT64))
        one.producer().name += f" | {text}{OTHER_SIZES}"
        result = op.Mul(result, op.Squeeze(one))
    if result is not given:
        graph.outputs[0] = result
        given.name, result.name = f"{given.name}/without_sizes", given.name
    return left


def _nodes(op: Builder, expression: ast.expr, sizes: Sequence[ir.Value]) -> ir.Value:
    """An expression of Python's of `size0`, `size1` and so on, int64 or bool [1]; KeyError: there are no nodes for it."""

    def nodes(part: ast.expr) -> ir.Value:
        return _nodes(op, part, sizes)

    match expression:
        case ast.Name(id=name):
            return sizes[int(name.removeprefix("size"))]
        case ast.Constant(value=int(number)):
            return op.const([number])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return op.Neg(nodes(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return op.Not(nodes(operand))
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            a, b = nodes(left), nodes(right)
            return op.Div(op.Sub(a, op.Mod(a, b)), b)  # ONNX's Div cuts towards 0, its Mod is Python's
        case (
            ast.BinOp(left=left, op=operator, right=right) | ast.Compare(left=left, ops=[operator], comparators=[right])
        ) if not isinstance(operator, ast.NotEq):
            return op.node(_OPERATORS[type(operator)], nodes(left), nodes(right))
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            return op.Not(op.Equal(nodes(left), nodes(right)))
        case ast.BoolOp(op=operator, values=[first, *rest]):
            result = nodes(first)
            for other in rest:
                result = op.node(_OPERATORS[type(operator)], result, nodes(other))
            return result
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[first, *rest], keywords=[]):
            return op.node(name.capitalize(), *map(nodes, (first, *rest)))
    raise KeyError(ast.dump(expression))
