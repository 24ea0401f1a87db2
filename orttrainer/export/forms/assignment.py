"""SciPy's `linear_sum_assignment` as loops of a graph.

The algorithm is SciPy's (Crouse, "On implementing 2D rectangular assignment algorithms", 2016), so that of assignments that
cost the same it finds the same one. Where SciPy raises an error, since a cost is NaN or no assignment is finite, it finds some.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import BOOL, DOUBLE, script
from onnxscript import opset18 as op

from orttrainer.export.rewrites.assignment import LINEAR_SUM_ASSIGNMENT
from orttrainer.graph.passes.gradient_marks import DOMAIN

__all__ = ["define_assignments"]

_BOOL, _DOUBLE = BOOL.dtype.value, DOUBLE.dtype.value


@script(default_opset=op)
def _linear_sum_assignment(cost):
    """One row after the other gets a column, by the shortest path of exchanges; u and v are the dual variables."""
    zero, one, nothing = op.Constant(value_ints=[0]), op.Constant(value_ints=[1]), op.Constant(value_ints=[-1])
    true = op.Cast(one, to=_BOOL)
    infinite = op.Cast(op.Constant(value_floats=[float("inf")]), to=_DOUBLE)
    most = op.Cast(op.Constant(value_float=1e38), to=_DOUBLE)
    finite = op.Clip(op.Where(op.IsNaN(cost), most, cost), op.Neg(most), most)
    sizes = op.Shape(cost)
    tall = op.Squeeze(op.Gather(sizes, zero) > op.Gather(sizes, one))
    if tall:
        costs = op.Transpose(finite, perm=[1, 0])
    else:
        costs = op.Identity(finite)
    n, m = op.Split(op.Shape(costs), num_outputs=2)
    nought = op.Cast(op.Constant(value_floats=[0.0]), to=_DOUBLE)
    u, v = op.Expand(nought, n), op.Expand(nought, m)
    row_of, column_of = op.Expand(nothing, m), op.Expand(nothing, n)
    places = op.Range(op.Squeeze(zero), op.Squeeze(m), 1)
    for current in range(op.Squeeze(n)):
        row = op.Reshape(current, one)
        shortest, path = op.Expand(infinite, m), op.Expand(nothing, m)
        seen_rows, seen = op.Cast(op.Expand(zero, n), to=_BOOL), op.Cast(op.Expand(zero, m), to=_BOOL)
        left, count = op.Squeeze(m) - 1 - places, op.Identity(m)  # the columns that are not seen, in SciPy's order
        least, i, sink = op.Identity(nought), op.Identity(row), op.Identity(nothing)
        searching = op.Squeeze(sink < 0)
        while searching:
            seen_rows = op.ScatterElements(seen_rows, i, true)
            reduced = least + op.Squeeze(op.Gather(costs, i), zero) - op.Gather(u, i) - v
            better = op.And(op.Not(seen), reduced < shortest)
            path = op.Where(better, i, path)
            shortest = op.Where(better, reduced, shortest)
            lengths = op.Where(places < count, op.Gather(shortest, left), infinite)
            least = op.ReduceMin(lengths, keepdims=1)
            nearest = op.And(lengths == least, places < count)
            free = op.And(nearest, op.Gather(row_of, left) < 0)
            last_free = op.ReduceMax(op.Where(free, places, nothing), keepdims=1)
            first = op.ReduceMin(op.Where(nearest, places, m), keepdims=1)
            at = op.Where(last_free < 0, first, last_free)
            j = op.Gather(left, at)
            count = count - 1
            left = op.ScatterElements(left, at, op.Gather(left, count))
            seen = op.ScatterElements(seen, j, true)
            i = op.Gather(row_of, j)
            sink = op.Where(i < 0, j, nothing)
            searching = op.Squeeze(sink < 0)
        to_sink = op.Gather(shortest, sink)
        u = op.Where(seen_rows, u + least - op.Gather(shortest, op.Where(column_of < 0, sink, column_of)), u)
        u = op.ScatterElements(u, row, op.Gather(u, row) + to_sink)
        v = op.Where(seen, v - least + shortest, v)
        j, back = op.Identity(sink), op.Identity(nothing)
        exchanging = op.Squeeze(back != row)
        while exchanging:
            back = op.Gather(path, j)
            row_of = op.ScatterElements(row_of, j, back)
            following = op.Gather(column_of, back)
            column_of = op.ScatterElements(column_of, back, j)
            j = op.Identity(following)
            exchanging = op.Squeeze(back != row)
    ordered, order = op.TopK(column_of, n, largest=0)
    if tall:
        rows, columns = op.Identity(ordered), op.Identity(order)
    else:
        rows, columns = op.Range(op.Squeeze(zero), op.Squeeze(n), 1), op.Identity(column_of)
    return rows, columns


def define_assignments(model: ir.Model) -> None:
    """Give the model the function of its nodes that assign, if there are some."""
    if not any(node.op_type == LINEAR_SUM_ASSIGNMENT for node in model.graph.all_nodes()):
        return
    proto = _linear_sum_assignment.to_function_proto()
    proto.domain, proto.name = DOMAIN, LINEAR_SUM_ASSIGNMENT
    function = ir.from_proto(proto)
    function.opset_imports[""] = model.opset_imports[""]
    model.functions[function.identifier()] = function
