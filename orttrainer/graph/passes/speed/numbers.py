"""Numbers that are read at places along the last axis."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.scopes import put_all_in_place


class GatherNumbersPass(ir.passes.InPlacePass):
    """Gather(x, places) along the last axis -> GatherElements(x, Expand(places)).

    ONNX Runtime's Gather copies rows, which here are of one number each: 780 of 1,600 columns of 1,024 rows, 6.0 -> 0.9 ms.
    The places, repeated, are what the gradient needs in any case, here of half the size. To come before gradients, for the
    CPU.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "Gather" and not node.domain and _reads_numbers(node)]
        return put_all_in_place(model, "numbers", nodes, _by_elements)


def _reads_numbers(node: ir.Node) -> bool:
    x, places = node.inputs
    if x.shape is None or places.shape is None or len(x.shape) < 2 or not len(places.shape):
        return False
    known = constant_array(places)
    several = known is None or known.size > 1  # one that is known is a Slice, as good as
    return several and node.attributes.get_int("axis", 0) in (len(x.shape) - 1, -1)


def _by_elements(op: Builder, node: ir.Node) -> ir.Value:
    x, places = node.inputs
    before, size = [op.dim(x, axis) for axis in range(len(x.shape) - 1)], x.shape[-1]
    at = places if len(places.shape) == 1 else op.Reshape(places, [-1])
    if isinstance(size, int) and size < 2**31 and at.dtype == ir.DataType.INT64:
        at = op.Cast(op.Clip(at, -(2**31), 2**31 - 1), to=int(ir.DataType.INT32))  # a place that is not there stays one
    y = op.GatherElements(x, op.Expand(at, op.Concat(*before, np.array([1]), axis=0)), axis=len(before))
    if len(places.shape) == 1:
        return y
    sizes = (op.dim(places, axis) for axis in range(len(places.shape)))
    return op.Reshape(y, op.Concat(*before, *sizes, axis=0), allowzero=1)
