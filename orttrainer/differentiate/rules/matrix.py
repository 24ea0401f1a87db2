"""Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.registry import vjp


def swap_last_two(op, x: ir.Value) -> ir.Value:
    """x^T in its last two axes."""
    rank = len(x.shape)
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


@vjp("MatMul")
def matmul(op, node, dy):
    """Y = A @ B  ->  dA = dY @ B^T,  dB = A^T @ dY; a 1-d operand is a row or column vector."""
    a, b = node.inputs
    column, row = len(b.shape) == 1, len(a.shape) == 1
    if column:
        b, dy = op.Unsqueeze(b, [-1]), op.Unsqueeze(dy, [-1])
    if row:
        a, dy = op.Unsqueeze(a, [0]), op.Unsqueeze(dy, [-2])
    da = op.MatMul(dy, swap_last_two(op, b))
    db = op.MatMul(swap_last_two(op, a), dy)
    return op.Squeeze(da, [-2]) if row else da, op.Squeeze(db, [-1]) if column else db
