"""Operators that pick or place by index. What picks has a gradient that adds to zeros at the index, and the reverse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import non_differentiable, vjp
from orttrainer.differentiate.rules.tools import (
    add_to_zeros,
    attribute,
    axis_of,
    constant,
    join,
    output,
    positions,
    rank,
    scatter_along,
    shaped,
    widened,
    zeros,
)

non_differentiable("ArgMax", "ArgMin", "NonZero")


@vjp("Gather")
def gather(op, node, dy):
    """Y = X[..., indices, ...]  ->  dX = zeros, dY added at the indices; a Pad for one known index."""
    x, indices = node.inputs
    axis = axis_of(node, x, 0)
    if 0 in x.shape:  # of which no shape with another size that is open could be inferred
        return zeros(op, op.shape(x), x.dtype)
    size = op.dim(x, axis)
    known, length = constant(indices), constant(size)
    if known is not None and known.size == 1 and length is not None:
        before = int(known.reshape(())) % int(length[0])
        slab = dy if known.ndim == 1 else _slab(op, node, dy, axis, known.ndim)
        return shaped(op.Pad(slab, [before, int(length[0]) - 1 - before], None, [axis]), x)
    if rank(node, indices) != 1:
        dy = _slab(op, node, dy, axis, rank(node, indices))
    flat = op.cast_as(indices, size)
    flat = flat if rank(node, indices) == 1 else op.Reshape(flat, [-1])
    return scatter_along(op, dy, flat, axis, size, unique=False, like=x)


def _slab(op, node: ir.Node, dy: ir.Value, axis: int, index_rank: int) -> ir.Value:
    """`dy` with the axes of the indices as one: [before..., number of indices, after...]."""
    x, indices = node.inputs
    if index_rank == 0:
        return op.Unsqueeze(dy, [axis])
    count = op.Reshape(op.size(indices), [1])
    sizes = [op.dim(x, k) if k != axis else count for k in range(rank(node, x))]
    unknown = [k for k, size in enumerate(sizes) if constant(size) is None]
    if len(unknown) == 1 and 0 not in indices.shape.dims:  # then no Shape node is needed
        sizes[unknown[0]] = -1
    return op.Reshape(dy, join(op, *sizes), allowzero=1)


@vjp("GatherElements")
def gather_elements(op, node, dy):
    """Y[i, j] = X[indices[i, j], j]  ->  dX = zeros, dY added at the indices."""
    x, indices = node.inputs
    axis = attribute(node, "axis", 0)
    return add_to_zeros(op, x, dy, lambda zeros, dy: op.ScatterElements(zeros, indices, dy, axis=axis, reduction="add"))


@vjp("GatherND")
def gather_nd(op, node, dy):
    """Y[i] = X[indices[i]]  ->  dX = zeros, dY added at the indices."""
    x, indices = node.inputs
    if batch_dims := attribute(node, "batch_dims", 0):
        indices = _with_batch_coordinates(op, node, indices, batch_dims)
    return add_to_zeros(op, x, dy, lambda zeros, dy: op.ScatterND(zeros, indices, dy, reduction="add"))


def _with_batch_coordinates(op, node: ir.Node, indices: ir.Value, batch_dims: int) -> ir.Value:
    """Full indices of GatherND: each tuple preceded by its place along the batch axes."""
    dims = rank(node, indices)
    column = op.Slice(indices, [0], [1], [dims - 1])
    coordinates = [
        op.expand_as(op.Unsqueeze(positions(op, op.dim(indices, k)), [a for a in range(dims) if a != k]), column)
        for k in range(batch_dims)
    ]
    return op.Concat(*coordinates, indices, axis=-1)


@vjp("ScatterElements")
def scatter_elements(op, node, dy):
    """Y = X with updates placed at the indices: see `_scattered`."""
    indices, axis = node.inputs[1], attribute(node, "axis", 0)

    def pick(x: ir.Value) -> ir.Value:
        return op.GatherElements(x, indices, axis=axis)

    def place(x: ir.Value, updates: ir.Value, reduction: str | None) -> ir.Value:
        return op.ScatterElements(x, indices, updates, axis=axis, reduction=reduction)

    return _scattered(op, node, dy, pick, place)


@vjp("ScatterND")
def scatter_nd(op, node, dy):
    """Y = X with slices placed at the indices: see `_scattered`."""
    indices = node.inputs[1]

    def pick(x: ir.Value) -> ir.Value:
        return op.GatherND(x, indices)

    def place(x: ir.Value, updates: ir.Value, reduction: str | None) -> ir.Value:
        return op.ScatterND(x, indices, updates, reduction=reduction)

    return _scattered(op, node, dy, pick, place)


def _scattered(op, node: ir.Node, dy: ir.Value, pick: Callable, place: Callable) -> tuple:
    """The gradients of X and of the updates U, for what each reduction computes at an index.

    none: U (the specification wants unique indices)  ->  dX = dY with 0 there,  dU = dY there.
    add:  X + sum(U)         ->  dX = dY,  dU = dY there.
    mul:  X * prod(U)        ->  dX = dY * prod(U),  dU = dY * X * the product of the other U.
    max, min:  ties share dY evenly, as in PyTorch.
    """
    x, _, updates = node.inputs
    reduction = attribute(node, "reduction", "none")
    if reduction == "none":
        dx, du = place(dy, op.zeros_like(updates), None), pick(dy)
    elif reduction == "add":
        dx, du = dy, pick(dy)
    elif reduction == "mul":
        product = place(op.full_like(x, 1.0), updates, "mul")
        dx, du = op.Mul(dy, product), op.Mul(pick(op.Mul(dy, x)), _product_of_others(op, x, updates, pick, place))
    else:
        (y,) = node.outputs
        x_wins = op.cast_as(op.Equal(x, y), x)
        u_wins = op.cast_as(op.Equal(updates, pick(y)), x)
        winners = place(*widened(op, x_wins, u_wins), "add")
        share = op.Div(dy, op.cast_as(winners, x))
        dx, du = op.Mul(share, x_wins), op.Mul(pick(share), u_wins)
    return shaped(dx, x), None, shaped(du, updates)


def _product_of_others(op, x: ir.Value, updates: ir.Value, pick: Callable, place: Callable) -> ir.Value:
    """For each update, the product of the others that go to its place: exact with zeros among them.

    If just one of them is 0, that factor is the update itself, so that the gradient of the gradient is right too.
    """
    zero = op.Equal(updates, op.scalar(0.0, updates))
    is_zero = op.cast_as(zero, updates)
    others = op.Sub(pick(place(op.zeros_like(x), is_zero, "add")), is_zero)  # zeros among the others
    value = op.Mul(updates, is_zero)  # 0, but the update to whoever differentiates it
    factor = op.Sub(pick(place(op.zeros_like(x), value, "add")), value)
    nonzero = op.Where(zero, op.scalar(1.0, updates), updates)
    product = op.Div(pick(place(op.full_like(x, 1.0), nonzero, "mul")), nonzero)
    of_one_zero = op.Where(op.Equal(others, op.scalar(1.0, updates)), op.Mul(product, factor), op.scalar(0.0, updates))
    return op.Where(op.Equal(others, op.scalar(0.0, updates)), product, of_one_zero)


@vjp("TopK")
def top_k(op, node, dy, _=None):
    """Y = X[the k places of the largest]  ->  dX = dY at these places of zeros; at a tie, at those chosen."""
    x = node.inputs[0]
    axis = attribute(node, "axis", -1)
    dx = op.ScatterElements(op.zeros_like(x), output(op, node, 1), dy, axis=axis)
    return shaped(dx, x), None


@vjp("Compress")
def compress(op, node, dy):
    """Y = the slices of X whose condition is true  ->  dX = dY at these slices of zeros."""
    x, condition = node.inputs
    chosen = op.Reshape(op.NonZero(condition), [-1])
    if attribute(node, "axis", None) is None:
        return _scatter_flat(op, x, chosen, dy), None
    axis = axis_of(node, x, 0)
    return scatter_along(op, dy, chosen, axis, op.dim(x, axis), unique=True, like=x), None


@vjp("Unique")
def unique(op, node, dy, *_):
    """Y = the different slices of X  ->  dX = dY at the first place of each; at a tie, there only."""
    (x,) = node.inputs
    first = output(op, node, 1)
    if attribute(node, "axis", None) is None:
        return _scatter_flat(op, x, first, dy)
    axis = axis_of(node, x, 0)
    return scatter_along(op, dy, first, axis, op.dim(x, axis), unique=True, like=x)


def _scatter_flat(op, x: ir.Value, indices: ir.Value, dy: ir.Value) -> ir.Value:
    """`dy` at places of the flattened zeros_like(x)."""
    size = op.Reshape(op.size(x), [1])
    return op.reshape_as(scatter_along(op, dy, indices, 0, size, unique=True, like=None), x)


@vjp("OneHot")
def one_hot(op, node, dy):
    """Y = on where the class is the index, off elsewhere  ->  d on = the sum of dY there,  d off = elsewhere."""
    indices, depth, values = node.inputs
    axis = attribute(node, "axis", -1)
    picked = [
        op.ReduceSum(op.Mul(dy, op.OneHot(indices, depth, np.array(pair, values.dtype.numpy()), axis=axis)), keepdims=0)
        for pair in ([1.0, 0.0], [0.0, 1.0])
    ]
    return None, None, shaped(op.Concat(*(op.Reshape(p, [1]) for p in picked), axis=0), values)
