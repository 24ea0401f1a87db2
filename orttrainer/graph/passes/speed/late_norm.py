"""A norm of the gradients that is not needed before the update."""

from __future__ import annotations

import math

import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.sparse_update import sums_squares

LEAST_ELEMENTS = 2**19  # of a gradient


def let_norm_be_late(op: Builder, norm: ir.Value, least: int | None = None) -> bool:
    """fence(rate, [norm]) -> fence(rate, [an element of each gradient]), if nothing else is made of the norm.

    So large gradients may be squared and summed up in passes that the update makes over them. The fence lets through the
    rate alone, and only once every gradient is there, as before.

    Args:
        norm: output of the graph, sqrt(sum of the sums of squares of all gradients).
        least: elements of a gradient whose squares are late; by default `LEAST_ELEMENTS`.

    Returns:
        Whether the norm may be late now.
    """
    least = LEAST_ELEMENTS if least is None else least
    chain, total = _chain(norm)
    if total is None:
        return False
    fences = [(reader, k) for y in chain for reader, k in y.uses() if reader.outputs[0] not in chain]
    pieces = [_piece(reader) for reader, _ in fences]
    gradients = [_gradient(square) for square in total.inputs]
    if not pieces or None in pieces or not any(g is not None and _is_large(g, least) for g in gradients):
        return False
    elements = []
    for square, g in zip(total.inputs, gradients):
        if g is not None and _is_large(g, least):
            elements.append(op.cast_as(op.Slice(op.Reshape(g, [-1]), [0], [1]), norm))
        else:
            elements.append(op.cast_as(op.Reshape(square, [1]), norm))
    behind = op.Concat(*elements, axis=0)
    for concat, k in pieces:
        concat.replace_input_with(k, op.cast_as(behind, concat.inputs[0]))
    write_lengths(behind)
    return True


def write_lengths(vector: ir.Value) -> None:
    """Write down the lengths of what casts and joins a vector that is longer now: ONNX Runtime takes memory by these."""
    for reader, _ in vector.uses():
        if reader.op_type in ("Cast", "Concat"):
            sizes = [static_dims(x) for x in reader.inputs]
            reader.outputs[0].shape = None if None in sizes else ir.Shape([sum(size for (size,) in sizes)])
            write_lengths(reader.outputs[0])


def _is_large(g: ir.Value, least: int) -> bool:
    dims = static_dims(g)
    return dims is not None and math.prod(dims) >= least


def _chain(norm: ir.Value) -> tuple[list[ir.Value], ir.Node | None]:
    """What lies between the sum of all squares and the norm, both of them included, and the node of that sum."""
    chain, value = [norm], norm
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Identity", "Sqrt"):
        value = node.inputs[0]
        chain.append(value)
    return chain, node if node is not None and node.op_type == "Sum" and not node.domain else None


def _piece(node: ir.Node) -> tuple[ir.Node, int] | None:
    """The Concat of a fence, and its input that `node` begins: Gather(Concat(value, Slice(Reshape(x)), ...), places)."""
    for op_type in ("Reshape", "Slice", "Cast"):
        if node.op_type != op_type and op_type != "Cast":
            return None
        if node.op_type == op_type:
            uses = list(node.outputs[0].uses())
            if len(uses) != 1:
                return None
            ((node, k),) = uses
    if node.op_type != "Concat" or k == 0 or (value := static_dims(node.inputs[0])) is None:
        return None
    for reader, place in node.outputs[0].uses():
        places = reader.inputs[1].const_value if reader.op_type == "Gather" and place == 0 else None
        if places is None or places.numpy().max() >= value[0]:
            return None
    return node, k


def _gradient(total: ir.Value) -> ir.Value | None:
    """What the sum of squares `total` is of: ReduceSumSquare, or the sum of that of rows, times a constant perhaps."""
    node = total.producer()
    for op_type in ("Mul", "ReduceSum", "ReduceSumSquare"):
        if node is None or node.domain or len(node.outputs[0].uses()) != 1:
            return None
        if node.op_type == op_type == "ReduceSumSquare":
            return node.inputs[0] if sums_squares(node) else None
        if node.op_type == op_type and (op_type == "ReduceSum" or node.inputs[1].const_value is not None):
            node = node.inputs[0].producer()
    return None
