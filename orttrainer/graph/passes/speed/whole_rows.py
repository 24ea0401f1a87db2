"""Rows that are read at a place each, given once for every element of the row."""

from __future__ import annotations

import functools
import math

import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim
from orttrainer.graph.passes.speed.rows import LEAST_ROW
from orttrainer.graph.passes.speed.tuples import starts
from orttrainer.graph.scopes import put_all_in_place


class WholeRowsPass(ir.passes.InPlacePass):
    """GatherElements(Expand(x), Expand(places)) -> Gather(rows of x, places + row 0 of each), where it reads whole rows.

    So torch's `gather` reads the neighbours of points, which it wants repeated for each of them: `x[:, :, None].expand(..)`,
    at places that are repeated for each channel. The gradient of rows adds rows, without x repeated: 4 times 256 points,
    each with 8 neighbours of 48 channels, both ways and with two linear layers 5.1 -> 1.5 ms. What is outside of x is an
    error still. To come before gradients.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "GatherElements" and not node.domain]
        return put_all_in_place(model, "whole", [node for node in nodes if _depth(node) is not None], _by_rows)


def _depth(node: ir.Node) -> int | None:
    """How many axes lie before those of a row; None where it reads no whole rows of known sizes."""
    x, places = node.inputs
    given = _source(places)
    if given is places or given.shape is None or x.shape is None or len(x.shape) != len(given.shape):
        return None
    wanted, source, axis, rank = places.shape.dims, _source(x).shape.dims, _axis(node), len(x.shape)
    depth = next((k + 1 for k in reversed(range(axis, rank)) if given.shape[k] != 1 or k == axis), rank)
    if depth == rank or not all(isinstance(n, int) and n > 0 for n in source[1:]):
        return None
    each = all(map(same_dim, given.shape.dims[:depth], wanted[:depth]))  # a place, but for the elements of a row
    beside = all(same_dim(x.shape[k], wanted[k]) for k in range(rank) if k != axis)
    whole = all(same_dim(source[k], x.shape[k]) for k in (axis, *range(depth, rank)))
    pays = not all(map(same_dim, source, x.shape.dims)) or math.prod(source[depth:]) >= LEAST_ROW
    return depth if each and beside and whole and pays else None


def _by_rows(op: Builder, node: ir.Node) -> ir.Value:
    (x, places), depth = node.inputs, _depth(node)
    x, given, axis = _source(x), _source(places), _axis(node)
    numbers = []
    for k, size in enumerate(x.shape.dims[:depth]):
        if k == axis:  # looked up, so that what is outside is an error, and counts from the back
            at = op.Squeeze(given, list(range(depth, len(x.shape))))
            numbers.append(op.Gather(starts(op, x, k, depth), at, axis=0))
        elif size != 1:
            numbers.append(op.Reshape(starts(op, x, k, depth), [-1] + [1] * (depth - k - 1)))
    row = functools.reduce(op.Add, numbers)
    row.shape = ir.Shape(places.shape.dims[:depth])
    return op.Gather(op.Reshape(x, [-1, *x.shape.dims[depth:]]), row, axis=0)


def _source(x: ir.Value) -> ir.Value:
    """What an Expand repeats along axes that it has."""
    node = x.producer()
    if node is None or node.op_type != "Expand" or node.domain or x.shape is None:
        return x
    source = node.inputs[0]
    return source if source.shape is not None and len(source.shape) == len(x.shape) else x


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get_int("axis", 0)
    return axis if axis >= 0 else axis + len(node.inputs[0].shape)
