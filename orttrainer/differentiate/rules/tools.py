"""What several rules need: constants behind inputs, more outputs of a forward node, shape vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from orttrainer.differentiate.driver import unknown_rank
from orttrainer.errors import GradientError
from orttrainer.graph.builder import infer_outputs
from orttrainer.graph.passes.empty_tensors import product_from_left, product_of_rows
from orttrainer.graph.sizes import given_sizes, may_be_zero

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """Input `index` of `node`; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def attribute(node: ir.Node, name: str, default):
    """The value of an attribute, or `default`; strings come decoded."""
    if (found := node.attributes.get(name)) is None:
        return default
    return found.as_string() if found.type == ir.AttributeType.STRING else found.value


def constant(x: ir.Value | None) -> np.ndarray | None:
    """The number that `x` always has, or None; a graph input with a default is no constant."""
    if x is None or x.const_value is None or x.is_graph_input():
        return None
    return x.const_value.numpy()


def rank(node: ir.Node, x: ir.Value) -> int:
    """The rank of `x`.

    Raises:
        GradientError: it is not known, and the rule cannot do without it.
    """
    if x.shape is None:
        raise unknown_rank(node, x.name)
    return len(x.shape)


def axis_of(node: ir.Node, x: ir.Value, default: int) -> int:
    """The attribute `axis`, counted from the front."""
    axis = attribute(node, "axis", default)
    return axis + rank(node, x) if axis < 0 else axis


def output(op, node: ir.Node, index: int) -> ir.Value:
    """Output `index` of a forward node, added to the node if it has not got it yet."""
    if index >= len(node.outputs):
        node.resize_outputs(index + 1)
    value = node.outputs[index]
    if value.type is None or not value.name:
        value.name = value.name or f"{node.name or node.outputs[0].name}:{index}"
        known = [(y, y.type, y.shape) for y in node.outputs if y is not value]
        schema = onnx.defs.get_schema(node.op_type, op.graph.opset_imports[node.domain], node.domain)
        unnamed = [y for y in node.outputs if not y.name]
        infer_outputs(node, schema, op.graph.opset_imports)
        for y in unnamed:
            y.name = ""
        for y, dtype, shape in known:
            y.type, y.shape = dtype, shape
    return value


def refuse_gradient_by(op, node: ir.Node, index: int, name: str) -> None:
    """Raise if input `index` depends on what is differentiated by; it says how to compute, as an attribute does."""
    x = operand(node, index)
    if x is not None and x in op.active:
        raise GradientError(
            f"no gradient of {node.op_type!r} node {node.name!r} by its {name} ({x.name!r}); leave out of what is "
            "differentiated whatever it comes from"
        )


def shaped(value: ir.Value, x: ir.Value) -> ir.Value:
    """`value`, now known to have the shape of `x`: the driver then has no broadcasting to look for."""
    if x.shape is not None:
        value.shape = x.shape.copy()
    return value


def around_axis(op, x: ir.Value, axis: ir.Value, count: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """How many elements the first `count` axes of `x` have before an axis that is known at run time only, along it, behind it."""
    sizes, places = op.Slice(op.shape(x), [0], [count]), np.arange(count)
    axis = op.Reshape(op.Cast(axis, to=int(ir.DataType.INT64)), [1])
    axis = op.Where(op.Less(axis, np.int64(0)), op.Add(axis, np.int64(len(x.shape))), axis)
    before, behind = (
        op.ReduceProd(op.Where(picked, sizes, np.int64(1)), [0], keepdims=1)
        for picked in (op.Less(places, axis), op.Greater(places, axis))
    )
    return before, op.Gather(sizes, axis), behind


def join(op, *parts: ir.Value | int | Sequence[int]) -> ir.Value:
    """One 1-d int64 value of several, numbers included; a constant where all are."""
    parts = [op.const(np.atleast_1d(np.asarray(p, np.int64))) if not isinstance(p, ir.Value) else p for p in parts]
    merged: list = []
    for part in parts:
        value = constant(part)
        if value is not None and merged and (before := constant(merged[-1])) is not None:
            merged[-1] = op.const(np.concatenate([before, value]))
        elif value is None or value.size:
            merged.append(part)
    if not merged:
        return op.const(np.empty(0, np.int64))
    return merged[0] if len(merged) == 1 else op.Concat(*merged, axis=0)


def zeros(op, shape: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Zeros of a shape that may be known at run time only."""
    if dtype == ir.DataType.BFLOAT16 and op.opset < 20:  # before, ConstantOfShape makes no bfloat16
        return op.Cast(zeros(op, shape, ir.DataType.FLOAT), to=int(dtype))
    return op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype.numpy()), dtype=dtype))


def positions(op, size: ir.Value) -> ir.Value:
    """0, 1, ... size - 1 for a 1-element int64 `size`: a constant where it is known."""
    if (known := constant(size)) is not None:
        return op.const(np.arange(int(known.reshape(())), dtype=np.int64))
    return op.Range(np.int64(0), op.Squeeze(size, [0]), np.int64(1))


def scatter_along(
    op, dy: ir.Value, indices: ir.Value, axis: int, size: ir.Value, unique: bool, like: ir.Value | None
) -> ir.Value:
    """Add slice i of `dy` to slice indices[i] of zeros with `size` slices along `axis`.

    Args:
        indices: 1-d int64; negative ones count from the back.
        size: 1-element int64: how many slices the result has along `axis`.
        unique: no index comes twice, so nothing needs to be added.
        like: a value that has the shape of the result, if there is one.
    """
    dims, reduction = len(dy.shape), None if unique else "add"
    if like is not None:
        shape = op.shape(like)
    else:
        shape = join(op, *(op.dim(dy, k) if k != axis else size for k in range(dims)))
    kept = dy.dtype
    if not unique:
        (dy,) = widened(op, dy)
    target = zeros(op, shape, dy.dtype) if like is None else shaped(zeros(op, shape, dy.dtype), like)
    if axis == 0 and unique:  # with a reduction ONNX Runtime's ScatterND races, see ScatterReductionPass
        result = op.ScatterND(target, op.Unsqueeze(indices, [-1]), dy)
    else:
        column = indices if dims == 1 else op.Unsqueeze(indices, [k for k in range(dims) if k != axis])
        places = op.expand_as(column, dy)
        result = op.ScatterElements(target, places, dy, axis=axis, reduction=reduction)
    if result.dtype != kept:
        result = op.Cast(result, to=int(kept))
    return shaped(result, like) if like is not None else result


def along(op, dy: ir.Value, axis: int, matrix: ir.Value) -> ir.Value:
    """M^T dY along one axis."""
    last = len(dy.shape) - 1
    given = given_sizes(op.graph)
    empty = any(may_be_zero(size, given) for size in dy.shape.dims[:-2])
    if axis == last - 1:
        turned = op.Transpose(matrix, perm=[1, 0])
        return product_from_left(op, turned, dy) if empty else op.MatMul(turned, dy)
    if axis == last:
        return product_of_rows(op, dy, matrix) if empty else op.MatMul(dy, matrix)
    swap = list(range(last + 1))
    swap[axis], swap[last] = last, axis
    return op.Transpose(op.MatMul(op.Transpose(dy, perm=swap), matrix), perm=swap)


def add_to_zeros(op, x: ir.Value, dy: ir.Value, place: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """place(zeros in the shape of `x`, `dy`); in float32 for half precision, which ORT's CPU kernels do not add."""
    (wide,) = widened(op, dy)
    return shaped(op.cast_as(place(shaped(zeros(op, op.shape(x), wide.dtype), x), wide), x), x)


def widened(op, *values: ir.Value | None) -> list[ir.Value | None]:
    """Half-precision values as float32, for sums that need its range; others as they are."""
    return [op.Cast(v, to=int(ir.DataType.FLOAT)) if v is not None and v.dtype in HALVES else v for v in values]
