"""Det of small matrices."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.rules.matrix import cofactors

__all__ = ["FORMS"]


def det(op, node: ir.Node) -> ir.Value | None:
    """The first row times its cofactors; larger matrices are factorized before they are exported."""
    (x,) = node.inputs
    size = None if x.shape is None else next((size for size in x.shape[-2:] if isinstance(size, int)), None)
    if size is None or not 0 < size <= 3:
        return None
    first, its_cofactors = (op.Gather(v, 0, axis=-2) for v in (x, cofactors(op, x, size)))
    return op.ReduceSum(op.Mul(first, its_cofactors), [-1], keepdims=0)


FORMS = {"Det": det}
