"""Convolutions with strides, and 1 x 1, on tensors in blocks of channels that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.nchwc import (
    blocked_weight,
    depthwise_weight,
    has_many_positions,
    is_depthwise,
    out_in_blocks,
    turned_taps,
)
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, int64s, ints


class Phase(NamedTuple):
    """How every so many-th position of a transposed convolution is made along one axis: by a convolution.

    `taps` are those of its kernel, `begin` and `end` its pads; without taps the positions are 0.
    """

    taps: tuple[int, ...]
    begin: int
    end: int


class Interleaved(NamedTuple):
    """The positions of an image by their place in each stride: (row, column) -> value in blocks, missing where 0."""

    strides: tuple[int, int]
    parts: Mapping[tuple[int, int], ir.Value]


def is_pointwise(node: ir.Node) -> bool:
    """Whether this is a convolution in one group whose kernel is a matrix."""
    if node.op_type != "Conv" or node.attributes.get_int("group", 1) != 1 or not _explicit(node):
        return False
    weights = static_dims(node.inputs[1])
    matrix = weights is not None and weights[2:] == (1, 1) and not any(ints(node, "pads", 0, 4))
    return matrix and has_many_positions(node.outputs[0])


def is_subsampling(node: ir.Node) -> bool:
    """Whether this is an AveragePool of single positions."""
    single = node.op_type == "AveragePool" and list(node.attributes.get_ints("kernel_shape", ())) == [1, 1]
    return (
        single and _explicit(node) and not any(ints(node, "pads", 0, 4)) and not node.attributes.get_int("ceil_mode", 0)
    )


def pointwise(op: Builder, node: ir.Node, x: ir.Value, block: int) -> ir.Value:
    """A Conv by a matrix, of `x` in blocks."""
    w, *bias = node.inputs[1:]
    return op.node(
        "Conv", x, blocked_weight(op, w, block), *bias, domain=DOMAIN, like=node.outputs[0], kernel_shape=[1, 1],
        strides=ints(node, "strides", 1), dilations=[1, 1], pads=[0, 0, 0, 0],
    )  # fmt: skip


def subsampled(op: Builder, node: ir.Node, x: ir.Value) -> ir.Value:
    """An AveragePool of single positions, of `x` in blocks."""
    strides = ints(node, "strides", 1)
    return op.node("AveragePool", x, domain=DOMAIN, like=node.outputs[0], kernel_shape=[1, 1], strides=strides)


def phases(node: ir.Node) -> list[list[Phase]] | None:
    """How a ConvTranspose with strides is made of convolutions, for each axis; None if it is not.

    Row y of the result is the sum of w[t] * x[u] over all t and u with stride * u + t = y + pad. So rows that are one
    stride apart have the same taps, from neighbouring u: they are a convolution with every so many-th tap, turned round.
    """
    if node.op_type != "ConvTranspose" or (node.attributes.get_int("group", 1) != 1 and not is_depthwise(node)):
        return None
    if not _explicit(node) or "output_shape" in node.attributes or max(ints(node, "dilations", 1)) > 1:
        return None
    w = static_dims(node.inputs[1])
    y = node.outputs[0].shape
    sizes = None if node.inputs[0].shape is None else list(node.inputs[0].shape.dims[2:])
    if w is None or len(w) != 4 or sizes is None or y is None or len(y) != 4:
        return None
    if not is_depthwise(node) and not has_many_positions(node.inputs[0]):
        return None
    strides, pads = ints(node, "strides", 1), ints(node, "pads", 0, 4)
    axes = []
    for size, result, k, s, pad in zip(sizes, y.dims[2:], w[2:], strides, pads):
        if not isinstance(size, int) or not isinstance(result, int) or result % s:
            return None
        axes.append([_phase(a, size, result // s, k, s, pad) for a in range(s)])
    plain = strides == [1, 1] or any(min(p.begin, p.end) < 0 for axis in axes for p in axis if p.taps)
    only_bias = len(node.inputs) > 2 and not all(p.taps for axis in axes for p in axis)  # at some positions
    return None if plain or only_bias else axes


def _phase(place: int, size: int, results: int, kernel: int, stride: int, pad: int) -> Phase:
    reach, first = divmod(place + pad, stride)  # w[first] meets x[i + reach]
    taps = tuple(range(first, kernel, stride))[::-1]
    return Phase(taps, len(taps) - 1 - reach, results + reach - size)


def transposed(op: Builder, node: ir.Node, axes: list[list[Phase]], x: ir.Value, block: int) -> Interleaved:
    """A ConvTranspose of `x` in blocks, by its `phases`."""
    (w, *bias), y = node.inputs[1:], node.outputs[0]
    channels, _, height, width = static_dims(w)
    strides, parts = tuple(ints(node, "strides", 1)), {}
    if alone := is_depthwise(node):
        by_tap = op.Reshape(depthwise_weight(op, w, block, turned=False), int64s(-1, height * width, block))
    else:
        inner = out_in_blocks(op, w, block)
    for i, row in enumerate(axes[0]):
        for j, column in enumerate(axes[1]):
            if not row.taps or not column.taps:
                continue
            kernel = [len(row.taps), len(column.taps)]
            taps = [t * width + u for t in row.taps for u in column.taps]
            if alone:
                some = op.Gather(by_tap, np.array(taps, np.int64), axis=1)
                some = op.Reshape(some, int64s(channels, 1, *kernel))
            else:
                some = turned_taps(op, w, inner, block, taps, kernel)
            part = op.node(
                "Conv", x, some, *bias, domain=DOMAIN, like=y, kernel_shape=kernel, strides=[1, 1], dilations=[1, 1],
                pads=[row.begin, column.begin, row.end, column.end], group=channels if alone else 1,
            )  # fmt: skip
            part.shape = ir.Shape([*y.shape.dims[:2], *(size // s for size, s in zip(y.shape.dims[2:], strides))])
            parts[i, j] = part
    return Interleaved(strides, parts)


def added(op: Builder, a: Interleaved, b: Interleaved) -> Interleaved:
    """The sum of two of the same strides."""
    parts = dict(a.parts)
    for place, part in b.parts.items():
        parts[place] = op.node("Add", parts[place], part, like=part) if place in parts else part
    return Interleaved(a.strides, parts)


def joined(op: Builder, image: Interleaved, y: ir.Value, block: int) -> ir.Value:
    """The whole image in blocks, with the shape of `y`."""
    rows, columns = image.strides
    width = y.shape[3] // columns
    pixels = {place: op.Reshape(part, int64s(-1, block)) for place, part in image.parts.items()}
    some = next(iter(pixels.values()))
    zeros = None
    if len(pixels) < rows * columns:
        zeros = op.ConstantOfShape(op.Shape(some), value=ir.tensor(np.zeros(1, np.float32)))
    lines = []
    for i in range(rows):
        line = [pixels.get((i, j), zeros) for j in range(columns)]
        lines.append(op.Reshape(op.Concat(*line, axis=1), int64s(-1, width * columns * block)))
    whole = op.Reshape(op.Concat(*lines, axis=1), int64s(-1, *y.shape.dims[1:]))
    whole.shape = y.shape
    return whole


def _explicit(node: ir.Node) -> bool:
    return not node.domain and node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
