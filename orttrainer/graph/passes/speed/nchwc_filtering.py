"""Convolutions with three taps along an axis by fewer products, on tensors in blocks of channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, int64s, ints, scaled

TAPS = 3
MOVE = 16  # products and sums in the time that a number takes to be read or written, by all threads
NODE = 600_000  # the same, for a node; there are some 11 for each point
USUAL_BATCH = 8  # where its size is only known at run time


class Tile:
    """F(m, 3) of Winograd, "Arithmetic Complexity of Computations", 1980: m results of three taps by m + 2 products.

    It is how polynomials are multiplied by their values at m + 2 points, here 0, pairs p and -p, and infinity, the other way
    round: results and the numbers that they read change places. At p the taps are g0 + p g1 + p^2 g2.

    Args:
        results: m, even.
        points: p of the pairs.
    """

    def __init__(self, results: int, *points: Fraction):
        self.results, self.pairs = results, [float(p) for p in points]
        self.reads = results + TAPS - 1
        self._points = [0.0, *(point for p in self.pairs for point in (p, -p))]

    @cached_property
    def of_numbers(self) -> np.ndarray:
        """D [points, numbers read]."""
        return np.linalg.inv(self.powers(self.reads)).T

    def powers(self, count: int) -> np.ndarray:
        """The first powers of each point; of infinity the last of them alone."""
        finite = np.power.outer(np.array(self._points), np.arange(count))
        return np.vstack([finite, np.eye(count)[-1]])


# Of more results and points the sums round more: by these the root mean square error is twice that of the plain form.
TILES = (Tile(4, Fraction(3, 4), Fraction(4, 3)), Tile(2, Fraction(1)))


class _Choice(NamedTuple):
    """How a convolution is made: by which tiles, so many of them along which axis of its images."""

    tile: Tile
    axis: int
    tiles: int


class MinimalFilteringPass(ir.passes.InPlacePass):
    """com.microsoft.nchwc.Conv with three rows of taps -> six Conv with one, over a row of each four; or four, of each two.

    So 1/2 or 2/3 of the products are left, along the rows or the columns. Images are brought to each point by a depthwise
    convolution with a stride, weights by sums of their rows; of the results the rows are summed up, and put side by side.
    These are passes over memory, which the pass counts against the products. To come before convolutions add what is
    there already.

    Args:
        block: how many channels make a block.
        sizes: of symbolic dimensions, in the batch at hand; others work as well.
        always: also where it does not pay.
    """

    def __init__(self, block: int, sizes: Mapping[str, int] | None = None, always: bool = False):
        super().__init__()
        self.block, self.sizes, self.always = block, sizes or {}, always

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op = Builder(graph, "filter")
        found = [(node, choice) for node in graph if (choice := self._choice(node)) is not None]
        for node, choice in found:
            (y,) = node.outputs
            with op.scope(node.name):
                new = _Filtering(op, node, choice, self.block).result()
            new.producer().metadata_props.update(node.metadata_props)
            new.name, y.name = y.name, f"{y.name}/taps"
            y.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        if found:
            graph.sort()
        return ir.passes.PassResult(model, bool(found))

    def _choice(self, node: ir.Node) -> _Choice | None:
        """The way that takes the least time; None where that is the convolution as it is, or there is no other."""
        if (node.domain, node.op_type) != (DOMAIN, "Conv") or "auto_pad" in node.attributes or len(node.inputs) > 3:
            return None
        x, w, y = *node.inputs[:2], node.outputs[0]
        weights = static_dims(w)
        if weights is None or any(v.shape is None or len(v.shape) != 4 for v in (x, y)):
            return None
        known = all(isinstance(size, int) for v in (x, y) for size in v.shape.dims[1:])
        if not known or any(channels % self.block for channels in (*weights[:2], x.shape[1])):
            return None
        choices = [
            (self._time(node, choice), choice)
            for axis in (0, 1)
            if weights[2 + axis] == TAPS and _slides_by_one(node, axis)
            for tile in TILES
            for choice in [_Choice(tile, axis, -(-y.shape[2 + axis] // tile.results))]
        ]
        if not choices:
            return None
        time, choice = min(choices, key=lambda found: found[0])
        return choice if self.always or time < self._time(node, None) else None

    def _time(self, node: ir.Node, choice: _Choice | None) -> float:
        """The time that a convolution takes, in that of a product and a sum, twice."""
        x, w, y = (self._elements(v) for v in (*node.inputs[:2], node.outputs[0]))
        products = y * math.prod(static_dims(node.inputs[1])[1:])
        if choice is None:
            return 2 * products
        (tile, axis, tiles), size = choice, node.outputs[0].shape[2 + choice.axis]
        points, padded = tile.reads, y * tiles * tile.results / size
        of_points = products * tiles / size * points / TAPS
        pairs = len(tile.pairs)
        transformed = points * x * (1 + tiles / node.inputs[0].shape[2 + axis]) + (6 + 11 * pairs) * w / TAPS
        passes = 6 * pairs + 5 * (pairs - 1) * tile.results + 2  # over a row of each tile
        finished = 2 * y * ((padded > y) + _is_more(node))
        moved = transformed + padded / tile.results * passes + 2 * padded + finished
        return 2 * of_points + MOVE * moved + NODE * 11 * points

    def _elements(self, x: ir.Value) -> int:
        sizes = (size if isinstance(size, int) else self.sizes.get(size.value, USUAL_BATCH) for size in x.shape)
        return math.prod(sizes)


def _slides_by_one(node: ir.Node, axis: int) -> bool:
    pads = ints(node, "pads", 0, 4)
    steps = (ints(node, "strides", 1)[axis], ints(node, "dilations", 1)[axis])
    return steps == (1, 1) and max(pads[axis], pads[axis + 2]) < TAPS


def _is_more(node: ir.Node) -> bool:
    """Whether a convolution adds a bias or activates."""
    return len(node.inputs) > 2 or node.attributes.get_string("activation", None) is not None


class _Filtering:
    """One convolution while it is written in the other form."""

    def __init__(self, op: Builder, node: ir.Node, choice: _Choice, block: int):
        self.op, self.node, self.block = op, node, block
        self.tile, self.axis, self.tiles = choice
        self.x, self.w, *_ = node.inputs
        (self.y,) = node.outputs

    def result(self) -> ir.Value:
        op, pairs = self.op, self.tile.pairs
        products = range(1, self.tile.reads - 1)
        at_points = dict(zip(products, map(self._product, products)))
        sums, differences = (
            [op.node(kind, at_points[2 * k + 1], at_points[2 * k + 2], like=at_points[1]) for k in range(len(pairs))]
            for kind in ("Add", "Sub")
        )
        parts = []
        for i in range(self.tile.results):  # Sum of p^i times the values at p, and (-p)^i times those at -p
            part = summed(op, {v: p**i for p, v in zip(pairs, differences if i % 2 else sums)})
            at_end = {0: 0, self.tile.results - 1: self.tile.reads - 1}.get(i)  # values at 0 and at infinity
            parts.append(part if at_end is None else self._product(at_end, part))
        whole = self._joined(parts)
        if not _is_more(self.node):
            return whole
        bias = self.node.inputs[2] if len(self.node.inputs) > 2 else None
        return scaled(op, whole, None, bias, self.node.attributes.get_string("activation", None))

    def _product(self, point: int, added: ir.Value | None = None) -> ir.Value:
        """The convolution of the images by the weights, both at a point."""
        op, node, axis = self.op, self.node, self.axis
        attributes = {name: ints(node, name, 1) for name in ("strides", "dilations")}
        kernel, pads = list(static_dims(self.w)[2:]), ints(node, "pads", 0, 4)
        kernel[axis] = 1
        pads[axis] = pads[axis + 2] = 0
        inputs = [self._images(point), self._weights[point], None, added]
        product = op.node(
            "Conv", *(inputs if added is not None else inputs[:2]), domain=DOMAIN, like=self.y, kernel_shape=kernel,
            pads=pads, group=node.attributes.get_int("group", 1), **attributes,
        )  # fmt: skip
        product.shape = ir.Shape(_replaced(self.y.shape.dims, 2 + axis, self.tiles))
        return product

    def _images(self, point: int) -> ir.Value:
        begin = ints(self.node, "pads", 0, 4)[self.axis]
        return at_point(self.op, self.x, self.tile, point, self.tiles, self.block, begin, self.axis)

    @cached_property
    def _weights(self) -> list[ir.Value]:
        """The weights at each point: sums of rows of taps, or of columns."""
        op, block, (outputs, channels, *kernel) = self.op, self.block, static_dims(self.w)
        length = block**2 * (kernel[1] if self.axis == 0 else 1)
        lines = op.Reshape(self.w, int64s(-1, TAPS, length))
        first, middle, last = (op.Gather(lines, np.array(tap), axis=1) for tap in range(TAPS))
        found = [first]
        for p in self.tile.pairs:
            even, odd = op.Add(first, times(op, last, p * p)), times(op, middle, p)
            found += [op.Add(even, odd), op.Sub(even, odd)]
        return [
            op.Reshape(value, int64s(outputs, channels, *_replaced(kernel, self.axis, 1))) for value in [*found, last]
        ]

    def _joined(self, parts: Sequence[ir.Value]) -> ir.Value:
        """The rows of all tiles, or columns, side by side, without those that reach beyond the image."""
        op, axis, size = self.op, self.axis, self.y.shape[2 + self.axis]
        length = self.block * (self.y.shape[3] if axis == 0 else 1)
        lines = op.Concat(*(op.Reshape(part, int64s(-1, length)) for part in parts), axis=1)
        padded = _replaced(self.y.shape.dims, 2 + axis, self.tiles * self.tile.results)
        whole = op.Reshape(lines, int64s(-1, *padded[1:]))
        whole.shape = ir.Shape(padded)
        if padded[2 + axis] > size:  # Slice would use one thread
            whole = depthwise(op, whole, [1, 0], self.block, axis, dilations=padded[2 + axis] - size)
            whole.shape = self.y.shape
        return whole


def summed(op: Builder, factors: Mapping[ir.Value, float]) -> ir.Value:
    """The sum of tensors in blocks, each times a factor."""
    (first, factor), *rest = factors.items()
    total = times(op, first, factor)
    for x, factor in rest:
        if factor == 1:
            total = op.node("Add", total, x, like=x)
        else:
            by_channel = op.const(np.full((x.shape[1], 1, 1, 1), factor, np.float32))
            total = scaled(op, x, by_channel, added=total)
    return total


def times(op: Builder, x: ir.Value, factor: float) -> ir.Value:
    return x if factor == 1 else op.node("Mul", x, op.const(np.float32(factor)), like=x)


def at_point(
    op: Builder, x: ir.Value, tile: Tile, point: int, tiles: int, block: int, begin: int, axis: int = 0,
    across: tuple[int, int] = (0, 0),
) -> ir.Value:  # fmt: skip
    """What a row of each tile, or a column, is of images at a point: a depthwise convolution with a stride.

    Args:
        begin: pads before the images, along the axis.
        across: zeros to put at both ends of the other one.
    """
    factors = tile.of_numbers[point]
    read = [k for k, factor in enumerate(factors) if abs(factor) > 1e-9]
    first = min(read[0], begin)
    step = math.gcd(*(k - first for k in read))
    reach = (tiles - 1) * tile.results + read[-1] - first + 1  # along the axis, of all tiles
    left = begin - first
    pads = left, max(0, reach - left - x.shape[2 + axis])
    images = depthwise(
        op, x, factors[first : read[-1] + 1 : step], block, axis, tile.results, step, pads=pads, across=across
    )
    sizes = _replaced(x.shape.dims, 2 + axis, tiles)
    images.shape = ir.Shape(_replaced(sizes, 3 - axis, sizes[3 - axis] + sum(across)))
    return images


def depthwise(
    op: Builder, x: ir.Value, taps: Sequence[float], block: int, axis: int = 0, strides: int = 1, dilations: int = 1,
    pads: tuple[int, int] = (0, 0), across: tuple[int, int] = (0, 0),
) -> ir.Value:  # fmt: skip
    """Each channel of x by the same taps along an axis; its shape is to be told."""

    def along(value: int, other: int) -> list[int]:
        return [value, other] if axis == 0 else [other, value]

    kernel, channels = along(len(taps), 1), x.shape[1]
    in_blocks = np.tile(np.array(taps, np.float32)[:, None], (channels // block, 1, block))
    return op.node(
        "Conv", x, op.const(in_blocks.reshape(channels, 1, *kernel)), domain=DOMAIN, like=x, group=channels,
        kernel_shape=kernel, strides=along(strides, 1), dilations=along(dilations, 1),
        pads=[*along(pads[0], across[0]), *along(pads[1], across[1])],
    )  # fmt: skip


def _replaced(sizes: Sequence, place: int, size: int) -> list:
    return [*sizes[:place], size, *sizes[place + 1 :]]
