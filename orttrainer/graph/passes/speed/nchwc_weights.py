"""The weight gradients of convolutions, from tensors in blocks of channels as they lie."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc import has_many_positions
from orttrainer.graph.passes.speed.nchwc_filtering import MOVE, NODE, TAPS, TILES, Tile, at_point, depthwise, summed
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, int64s, reordered
from orttrainer.graph.passes.speed.usual_batch import UsualBatch, batch_at_hand
from orttrainer.graph.passes.speed.weight_gradients import WeightGradient, Window
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

FEWEST_TAPS = 5  # of a kernel; of fewer, the ways to the layout and back take longer than is saved
AT_ONCE = 4  # blocks of outputs that one pass over the images makes
PLACE = 1 << 20  # bytes of dY that it reads again and again, and that should stay near the processor
SHARES = 3  # rows of results for each thread, at least: they are what threads share


class WeightGradientsPass(ir.passes.InPlacePass, abc.ABC):
    """Weight gradients by another form, from x and dY in blocks.

    To come before the passes that bring convolutions into blocks: they take away the way to the blocks where x and dY are
    there already.

    Args:
        block: how many channels make a block.
    """

    def __init__(self, block: int):
        super().__init__()
        self.block = block

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [(node, gradient) for node in graph if (gradient := self._fitting(node)) is not None]
        if not found:
            return ir.passes.PassResult(model, modified=False)
        op, blocked = Builder(graph, "weights"), reordered(graph)
        for node, gradient in found:
            (y,) = node.outputs
            with op.scope(node.name):
                for v in (gradient.x, gradient.dy):
                    if v not in blocked:
                        blocked[v] = op.node("ReorderInput", v, domain=DOMAIN, like=v)
                new = self.written(op, node, gradient, blocked[gradient.x], blocked[gradient.dy])
            new.producer().metadata_props.update(node.metadata_props)
            new.name, y.name = y.name, f"{y.name}/plain"
            y.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        graph.sort()
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def _fitting(self, node: ir.Node) -> WeightGradient | None:
        """The gradient that a node makes, where the channels on both sides fill their blocks and the form is for it."""
        found = WeightGradient.of(node)
        if found is None or any(v.shape[1] % self.block for v in (found.x, found.dy)):
            return None
        return found if self.fits(found) else None

    @abc.abstractmethod
    def fits(self, gradient: WeightGradient) -> bool:
        """Whether the form is for this gradient."""

    @abc.abstractmethod
    def written(self, op: Builder, node: ir.Node, gradient: WeightGradient, x: ir.Value, dy: ir.Value) -> ir.Value:
        """What `node` makes, from x and dY in blocks."""


class BlockedWeightGradientsPass(WeightGradientsPass):
    """The convolution of x with dY as its kernel -> the same by ONNX Runtime's convolution in blocks.

    Its images are the blocks of channels of x, with these in the width as in the other form; its channels are the images
    of the batch, in blocks. So nothing is unfolded, and there are no products of few rows, which cost as much to
    pack as to multiply. dY should stay near the processor while it is read once for each row of taps and some pixels of
    x: images are cut into bands of rows, which count as images of their own. Three rows of taps go by tiles of rows, as in
    `MinimalFilteringPass`, where that pays. Of one size of batch; an `If` has the other form for any other.

    Args:
        block: how many channels make a block.
        threads: that share the work.
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def __init__(self, block: int, threads: int, sizes: Mapping[str, int] | None = None):
        super().__init__(block)
        self.threads, self.sizes = threads, sizes or {}

    def fits(self, gradient: WeightGradient) -> bool:
        x, dy, window = gradient.x, gradient.dy, gradient.window
        known = all(isinstance(size, int) for v in (x, dy) for size in v.shape.dims[1:])
        if not known or window.dilations != (1, 1) or math.prod(window.kernel) < FEWEST_TAPS:
            return False
        outputs = dy.shape[1] // self.block
        rows = x.shape[1] // self.block * math.ceil(outputs / AT_ONCE) * window.kernel[0]
        if outputs < 2 or rows < SHARES * self.threads or not has_many_positions(dy):
            return False
        return bool(self._ways(gradient))

    def written(self, op: Builder, node: ir.Node, gradient: WeightGradient, x: ir.Value, dy: ir.Value) -> ir.Value:
        form, way = _Form(gradient, self.block), min(self._ways(gradient), key=lambda way: way.time)
        usual = functools.partial(form.convolved, x=x, dy=dy, cut=way.cut)
        if way.tile is not None:
            usual = functools.partial(form.filtered, x=x, dy=dy, cut=way.cut, tile=way.tile)
        # Each asks for the size of its own dY: that of another may come late, and all would wait for it.
        return UsualBatch(op, self.sizes).either(
            dy, node.outputs[0].shape.dims, usual, other=lambda op: _copied(op, node, gradient, x, dy)
        )

    def _ways(self, gradient: WeightGradient) -> list[_Way]:
        """Without tiles of rows, and with those of each size; none that are not for this gradient."""
        dy, window = gradient.dy, gradient.window
        rows = gradient.x.shape[1] // self.block * math.ceil(dy.shape[1] // self.block / AT_ONCE)  # of one row of taps
        shared = rows >= SHARES * self.threads or rows % self.threads == 0
        filtered = window.kernel[0] == TAPS and window.strides[0] == 1 and _unread(gradient) >= 0 and shared
        ways = []
        for tile in (None, *(TILES if filtered else ())):
            cut = self._cut(dy, dy.shape[2] if tile is None else _tiles(dy, tile))
            if cut is not None:
                ways.append(_Way(self._time(gradient, tile), tile, cut))
        return ways

    def _time(self, gradient: WeightGradient, tile: Tile | None) -> float:
        """The time that a form takes, as `nchwc_filtering` counts it."""
        images = batch_at_hand(gradient.dy, self.sizes)
        x, dy = (images * math.prod(v.shape.dims[1:]) for v in (gradient.x, gradient.dy))
        products = dy * gradient.x.shape[1] * math.prod(gradient.window.kernel)
        if tile is None:
            return 2 * products + MOVE * (6 * x + 2 * dy)
        points, share = tile.reads, _tiles(gradient.dy, tile) / gradient.dy.shape[2]  # of the rows, at each point
        weights = gradient.x.shape[1] * gradient.dy.shape[1] * math.prod(gradient.window.kernel)
        moved = points * (x * (1 + 5 * share) + dy * (1 + 3 * share)) + 12 * weights
        return 2 * products * share * points / TAPS + MOVE * moved + NODE * 16 * points

    def _cut(self, dy: ir.Value, height: int) -> _Cut | None:
        """The largest bands that fill the blocks and stay near; None where there are none, or the size of the batch is not known.

        `height`: rows of dY, or of what is made of it.
        """
        outputs, width = dy.shape[1], dy.shape[3]
        if not (images := batch_at_hand(dy, self.sizes)):
            return None
        together = math.gcd(images, self.block)
        row = width * self.block * min(outputs, AT_ONCE * self.block) * dy.dtype.itemsize
        for bands in range(self.block // together, height + 1, self.block // together):
            if height % bands == 0 and height // bands * row <= PLACE:
                return _Cut(images, bands, together)
        return None


class _Cut(NamedTuple):
    """How the images of a batch fill blocks.

    Attributes:
        images: in the batch.
        bands: of rows, that each image is cut into.
        together: images, of which a band each is in a block.
    """

    images: int
    bands: int
    together: int


class _Way(NamedTuple):
    """How a gradient is made: the time that it takes, by which tiles of rows, if any, of images that are cut so."""

    time: float
    tile: Tile | None
    cut: _Cut


class _Form:
    """dW[o, c, i, j] = sum over n, p, q of dY[n, o, p, q] X[n, c, stride * p + i - pad, stride * q + j - pad]."""

    def __init__(self, gradient: WeightGradient, block: int):
        self.gradient, self.block = gradient, block

    def convolved(self, op: Builder, x: ir.Value, dy: ir.Value, cut: _Cut) -> ir.Value:
        return self._weights(op, _taps(op, self.gradient, x, dy, cut, self.block))

    def filtered(self, op: Builder, x: ir.Value, dy: ir.Value, cut: _Cut, tile: Tile) -> ir.Value:
        """By Winograd's filtering turned about: a row of taps at each point, from a row of each tile of x and of dY there.

        With y = sum over k of p_k^i (g0 + p_k g1 + p_k^2 g2) (D x)_k, the gradient for g is that sum over i with dY.
        """
        gradient, block = self.gradient, self.block
        window, powers, points = gradient.window, tile.powers(tile.results), range(tile.reads)
        tiles = _tiles(gradient.dy, tile)
        flat = Window((1, window.kernel[1]), window.strides, window.dilations, (0, 0))

        def taps_at(point: int, added: ir.Value | None = None) -> ir.Value:
            across = window.begin[1], _unread(gradient)
            images = at_point(op, x, tile, point, tiles, block, window.begin[0], across=across)
            end = tiles * tile.results - gradient.dy.shape[2]
            results = depthwise(op, dy, powers[point], block, strides=tile.results, pads=(0, end))
            results.shape = ir.Shape([*gradient.dy.shape.dims[:2], tiles, gradient.dy.shape[3]])
            return _taps(op, WeightGradient(images, results, flat), images, results, cut, block, added)

        pairs = [(taps_at(k), taps_at(k + 1)) for k in points[1:-1:2]]
        sums, differences = ([op.node(kind, *pair, like=pair[0]) for pair in pairs] for kind in ("Add", "Sub"))
        of_power = [dict(zip(values, np.power(tile.pairs, k))) for k, values in enumerate((sums, differences, sums))]
        first, middle, last = (summed(op, factors) for factors in of_power)
        lines = taps_at(points[0], first), middle, taps_at(points[-1], last)
        rows = [op.Reshape(line, int64s(-1, window.kernel[1] * block**2)) for line in lines]
        taps = op.Reshape(op.Concat(*rows, axis=1), int64s(*_taps_shape(gradient, block)))
        taps.shape = ir.Shape(_taps_shape(gradient, block))
        return self._weights(op, taps)

    def _weights(self, op: Builder, taps: ir.Value) -> ir.Value:
        """[blocks of channels, blocks of outputs, taps, channels, outputs] -> [outputs, channels, taps]: the blocks change places,
        then they are undone."""
        channels, outputs = self.gradient.x.shape[1], self.gradient.dy.shape[1]
        kernel, block = self.gradient.window.kernel, self.block
        blocks = np.arange(channels * outputs // block**2).reshape(channels // block, -1).T.reshape(-1)
        swapped = op.Gather(op.Reshape(taps, int64s(len(blocks), math.prod(kernel) * block**2)), blocks, axis=0)
        by_output = _undone(op, swapped, [outputs // block, block, channels * math.prod(kernel), 1])
        return _undone(op, by_output, [outputs, channels, *kernel])


def _taps(
    op: Builder, gradient: WeightGradient, x: ir.Value, dy: ir.Value, cut: _Cut, block: int, added: ir.Value | None = None
) -> ir.Value:  # fmt: skip
    """The gradient as [blocks of channels, outputs, rows of taps, taps and channels], in blocks of outputs; and what is `added`."""
    (_, _, height, width), window = gradient.dy.shape.dims, gradient.window
    convolved = op.node(
        "Conv", _bands(op, gradient, x, cut, block), _kernel(op, gradient, dy, cut, block),
        *([] if added is None else [None, added]), domain=DOMAIN, like=x, group=1, kernel_shape=[height // cut.bands, width], strides=[1, 1],
        dilations=[window.strides[0], window.strides[1] * block], pads=[0, 0, 0, 0],
    )  # fmt: skip
    convolved.shape = ir.Shape(_taps_shape(gradient, block))
    return convolved


def _taps_shape(gradient: WeightGradient, block: int) -> list[int]:
    rows, columns = gradient.window.kernel
    return [gradient.x.shape[1] // block, gradient.dy.shape[1], rows, columns * block]


def _tiles(dy: ir.Value, tile: Tile) -> int:
    """How many the rows of dY fill, the last of them perhaps in part."""
    return -(-dy.shape[2] // tile.results)


def _unread(gradient: WeightGradient) -> int:
    """How many columns of zeros the windows read behind the image; below 0, how many of the image they do not."""
    window, columns = gradient.window, gradient.dy.shape[3]
    return window.strides[1] * (columns - 1) + window.kernel[1] - window.begin[1] - gradient.x.shape[3]


def _undone(op: Builder, x: ir.Value, shape: Sequence[int]) -> ir.Value:
    """`x`, whose second axis is in blocks behind the others, as it would lie without."""
    blocked = op.Reshape(x, int64s(*shape))
    return op.node("ReorderOutput", blocked, domain=DOMAIN, like=blocked, channels=shape[1])


def _bands(op: Builder, gradient: WeightGradient, x: ir.Value, cut: _Cut, block: int) -> ir.Value:
    """x as images: [blocks of channels, bands of all images, the rows that a band reads, pixels and their channels], in blocks."""
    (_, channels, height, width), (_, _, rows, columns) = gradient.x.shape.dims, gradient.dy.shape.dims
    window, blocks = gradient.window, channels // block
    row = window.strides[1] * (columns - 1) + window.kernel[1]
    first = window.strides[0] * (rows // cut.bands) * np.arange(cut.bands) - window.begin[0]
    read = first[:, None] + np.arange(window.strides[0] * (rows // cut.bands - 1) + window.kernel[0])
    inside = (read >= 0) & (read < height)
    behind = int(not inside.all())  # a row of zeros
    left = window.begin[1]
    if (right := _unread(gradient)) >= 0:
        images = _padded(op, x, [0, left, behind, right])
    else:  # pixels that no window reads
        rows_of = op.Reshape(x, int64s(cut.images, blocks, height, width * block))
        images = op.Pad(rows_of, int64s(0, 0, 0, left * block, 0, 0, behind, right * block))
    image = (np.arange(cut.images) * blocks + np.arange(blocks)[:, None]) * (height + behind)  # its first row
    image = image.reshape(blocks, -1, 1, cut.together, 1)
    index = image + np.where(inside, read, height)[:, None, :]  # [blocks, images, bands, images together, rows]
    # Bands count up before the images that are together do.
    gathered = op.Gather(op.Reshape(images, int64s(-1, row * block)), index.reshape(-1), axis=0)
    bands = op.Reshape(gathered, int64s(blocks, cut.images * cut.bands, read.shape[1], row * block))
    return op.node("ReorderInput", bands, domain=DOMAIN, like=bands)


def _padded(op: Builder, x: ir.Value, pads: Sequence[int]) -> ir.Value:
    """Images in blocks with zeros around them, by a convolution with ones: Pad uses one thread."""
    if not any(pads):
        return x
    images, channels, height, width = x.shape.dims
    ones = op.const(np.ones((channels, 1, 1, 1), np.float32))
    same = {"group": channels, "kernel_shape": [1, 1], "strides": [1, 1], "dilations": [1, 1]}
    padded = op.node("Conv", x, ones, domain=DOMAIN, like=x, pads=pads, **same)
    padded.shape = ir.Shape([images, channels, pads[0] + height + pads[2], pads[1] + width + pads[3]])
    return padded


def _kernel(op: Builder, gradient: WeightGradient, dy: ir.Value, cut: _Cut, block: int) -> ir.Value:
    """dY as a kernel: [blocks of outputs, blocks of bands of images, pixels of a band, these bands, outputs of a block]."""
    _, outputs, height, width = gradient.dy.shape.dims
    several = block // cut.together  # bands of an image in a block
    pixels = height // cut.bands * width
    lie = (cut.images // cut.together, cut.together, outputs // block, cut.bands // several, several, pixels)
    rows = np.arange(math.prod(lie), dtype=np.int32).reshape(lie).transpose(2, 0, 3, 5, 4, 1)
    # A Transpose takes longer: it uses one thread.
    gathered = op.Gather(op.Reshape(dy, int64s(-1, block)), rows.reshape(-1), axis=0)
    return op.Reshape(gathered, int64s(outputs, cut.images * cut.bands, height // cut.bands, width))


def _copied(op: Builder, last: ir.Node, gradient: WeightGradient, x: ir.Value, dy: ir.Value) -> ir.Value:
    """What `last` makes, by copies of the nodes between it and x and dY, which are read from the blocks."""
    copies = {
        plain: op.node("ReorderOutput", blocked, domain=DOMAIN, like=plain, channels=plain.shape[1])
        for plain, blocked in ((gradient.x, x), (gradient.dy, dy))
    }
    between, waiting = {last}, [last]
    while waiting:
        for value in waiting.pop().inputs:
            node = value.producer() if value is not None and value not in copies else None
            if node is not None and node not in between:
                between.add(node)
                waiting.append(node)
    for node in last.graph:
        if node in between and any(value in copies for value in node.inputs):
            inputs = [copies.get(value, value) for value in node.inputs]
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                node.attributes.values(),
                num_outputs=1,
                name=op.new_name(node.op_type),
            )
            (made,), (y,) = copy.outputs, node.outputs
            made.name, made.type, made.shape = copy.name, y.type, y.shape
            op.graph.append(copy)
            copies[y] = made
    return copies[last.outputs[0]]
