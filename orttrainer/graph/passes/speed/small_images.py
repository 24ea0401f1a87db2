"""Convolutions of small images, as one product of the pixels of all of them with the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.sized import SizedPass
from orttrainer.graph.passes.speed.nchwc import LARGEST_KERNEL, has_many_positions
from orttrainer.graph.passes.speed.nchwc_nodes import int64s, ints
from orttrainer.graph.passes.speed.weight_gradients import WeightGradient, Window
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

FEWEST_WEIGHTS = 1 << 13  # below, the operators around a product take as long
MOST_PIXELS = 16  # of an image, up to which reading the weights for it takes longer than its product
MOST_UNFOLDED = 4  # of an image whose pixels are unfolded here, which takes the runtime less time
LARGE_WEIGHTS = (
    1 << 21
)  # which no cache keeps from one image to the next: more images then, any number of so few pixels


class SmallImagesPass(SizedPass):
    """Conv, its input gradient (ConvTranspose) and its weight gradient: of all images at once.

    ONNX Runtime multiplies image by image and reads the weights anew for each; where an image is a few pixels, that is
    most of the work: 16 images of 2 x 2 pixels, 512 to 512 channels, 3 x 3, input gradient 27 -> 4.8 ms, Conv 12 -> 5.8 (one
    thread). The pixels under each tap are gathered, [batch * pixels, in * taps], and multiplied with the weights as they
    lie; Col2Im adds an input gradient up. Taps that read nothing but pads, as eight of nine do of a single pixel, are
    left out. For float32 in one group, and what is not worth to be brought into blocks. To come before
    `BlockedConvolutionPass`, for the CPU.

    Args:
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        products = _Products(Builder(graph, "small_images"))
        modified = False
        for node in list(graph) if products.op.opset >= 18 else ():  # Col2Im's first
            with products.op.scope(node.name):
                new = self._product(products, node)
            if new is None:
                continue
            (y,) = node.outputs
            new.shape = y.shape
            new.producer().metadata_props.update(node.metadata_props)
            new.name, y.name = y.name, f"{y.name}/plain"
            y.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
            modified = True
        if modified:
            graph.sort()  # the builder appends
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified)

    def _product(self, products: _Products, node: ir.Node) -> ir.Value | None:
        """What `node` makes, made by a product; None where it is to stay as it is."""
        if (window := _window(node)) is not None:
            if node.op_type == "Conv" and self._pays(node.outputs[0], node.inputs[1], MOST_UNFOLDED):
                return products.convolution(node, window)
            if node.op_type == "ConvTranspose" and self._pays(node.inputs[0], node.inputs[1]):
                return products.input_gradient(node, window)
        elif node.op_type == "Transpose":
            found = WeightGradient.of(node)
            if found is not None and _are_known(found.x, found.dy) and self._pays(found.dy, node.outputs[0]):
                return products.weight_gradient(found, node.outputs[0])
        return None

    def _pays(self, images: ir.Value, w: ir.Value, most: int = MOST_PIXELS) -> bool:
        """Whether several images of few pixels meet a few weights at least: few images, but of one pixel or with many weights."""
        batch, _, *size = images.shape.dims
        number = self.sizes.get(batch.value) if isinstance(batch, ir.SymbolicDim) else batch
        if number == 1:
            return False
        pixels, (out, channels, *kernel) = int(np.prod(size)), static_dims(w)
        if (weights := out * channels * int(np.prod(kernel))) < FEWEST_WEIGHTS:
            return False
        if pixels == 1 or (pixels <= most and not has_many_positions(images)):
            return True
        # Blocks take a few passes over the weights, this form over as many pixels under each tap.
        fewer = pixels <= MOST_PIXELS and number is not None and 2 * number * pixels <= min(out, channels)
        return weights >= LARGE_WEIGHTS and (pixels <= MOST_UNFOLDED or fewer)


class _Products:
    """One graph while its convolutions become products; and the pixels that are gathered already."""

    def __init__(self, op: Builder):
        self.op = op
        self.gathered: dict[tuple, ir.Value] = {}

    def convolution(self, node: ir.Node, window: Window) -> ir.Value | None:
        op, (x, w, *bias), size = self.op, _given(node), node.outputs[0].shape.dims[2:]
        if (read := _taps_read(window, x, size)) is None:
            return None
        window, taps = read
        out = static_dims(w)[0]
        rows = op.Gemm(self._columns(x, window, size), self._matrix(w, window, taps), *bias, transB=1)
        last = op.Reshape(rows, int64s(-1, int(np.prod(size)), out))
        return op.Reshape(op.Transpose(last, perm=[0, 2, 1]), int64s(-1, out, *size))

    def input_gradient(self, node: ir.Node, window: Window) -> ir.Value | None:
        op, (dy, w, *bias), y = self.op, _given(node), node.outputs[0]
        size, image = dy.shape.dims[2:], y.shape.dims[2:]
        if (read := _taps_read(window, y, size)) is None:
            return None
        window, taps = read
        reach = [
            (n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(size, window.strides, window.kernel, window.dilations)
        ]
        behind = [r - n - b for r, n, b in zip(reach, image, window.begin)]
        if min(window.begin) < 0 or any(b <= -s for b, s in zip(behind, window.strides)):
            return None  # Col2Im has pads of zero and more, and as many windows as there is room for
        channels, pixels = dy.shape[1], int(np.prod(size))
        rows = op.Transpose(op.Reshape(dy, int64s(-1, channels, pixels)), perm=[0, 2, 1])
        columns = op.MatMul(op.Reshape(rows, int64s(-1, channels)), self._matrix(w, window, taps))
        columns = op.Transpose(op.Reshape(columns, int64s(-1, pixels, columns.shape[1])), perm=[0, 2, 1])
        images = op.node(
            "Col2Im", columns, int64s(*image), int64s(*window.kernel), like=y, strides=list(window.strides),
            dilations=list(window.dilations), pads=[*window.begin, *(max(0, b) for b in behind)],
        )  # fmt: skip
        return op.Add(images, op.Reshape(bias[0], int64s(-1, 1, 1))) if bias else images

    def weight_gradient(self, gradient: WeightGradient, dw: ir.Value) -> ir.Value | None:
        op, x, dy = self.op, gradient.x, gradient.dy
        size = dy.shape.dims[2:]
        if (read := _taps_read(gradient.window, x, size)) is None:
            return None
        window, taps = read
        out, channels, *kernel = static_dims(dw)
        rows = op.Reshape(op.Transpose(dy, perm=[1, 0, 2, 3]), int64s(out, -1))
        weights = op.MatMul(rows, self._columns(x, window, size))
        weights = op.Reshape(weights, int64s(out, channels, *window.kernel))
        if window.kernel == tuple(kernel):
            return weights
        after = [k - tap.stop for k, tap in zip(kernel, taps)]
        return op.Pad(weights, int64s(0, 0, *(tap.start for tap in taps), 0, 0, *after))

    def _matrix(self, w: ir.Value, window: Window, taps: Sequence[range]) -> ir.Value:
        """The weights of the taps that are read: [first axis, second axis * taps]."""
        rows, _, *kernel = static_dims(w)
        if window.kernel != tuple(kernel):
            w = self.op.Slice(w, [tap.start for tap in taps], [tap.stop for tap in taps], [2, 3])
        return self.op.Reshape(w, int64s(rows, -1))

    def _columns(self, x: ir.Value, window: Window, size: Sequence[int]) -> ir.Value:
        """The pixels under each tap at each position, zeros where there are none: [batch * positions, in * taps]."""
        key = x, window, tuple(size)
        if key not in self.gathered:
            self.gathered[key] = self._gather(x, window, size)
        return self.gathered[key]

    def _gather(self, x: ir.Value, window: Window, size: Sequence[int]) -> ir.Value:
        op, (channels, height, width) = self.op, x.shape.dims[1:]
        rows, columns = _pixels(window, size)
        rows, columns = rows[:, None, :, None], columns[None, :, None, :]  # [positions of both axes, taps of both axes]
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        index = np.where(inside, rows * width + columns, height * width).reshape(-1)
        pixels = op.Transpose(op.Reshape(x, int64s(-1, channels, height * width)), perm=[0, 2, 1])
        if not inside.all():
            pixels = op.Pad(pixels, int64s(0, 0, 0, 0, 1, 0))  # one more, of zeros
        if not np.array_equal(index, np.arange(height * width)):
            pixels = op.Gather(pixels, index, axis=1)  # whole rows of channels, which the transpose behind it turns
        taps = int(np.prod(window.kernel))
        if taps > 1:
            pixels = op.Transpose(op.Reshape(pixels, int64s(-1, taps, channels)), perm=[0, 2, 1])
        return op.Reshape(pixels, int64s(-1, channels * taps))


def _window(node: ir.Node) -> Window | None:
    """That of a Conv, or of the Conv that a ConvTranspose goes back through: of float32 images of known size, in one group."""
    if node.op_type not in ("Conv", "ConvTranspose") or node.domain or node.attributes.get_int("group", 1) != 1:
        return None
    (x, w), (y,) = node.inputs[:2], node.outputs
    weights = static_dims(w)
    if x.dtype != ir.DataType.FLOAT or weights is None or len(weights) != 4 or not _are_known(x, y):
        return None
    if "output_shape" in node.attributes or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    if weights[2] * weights[3] > LARGEST_KERNEL:
        return None
    strides, dilations = (tuple(ints(node, name, 1)) for name in ("strides", "dilations"))
    return Window(weights[2:], strides, dilations, tuple(ints(node, "pads", 0, 4)[:2]))


def _given(node: ir.Node) -> list[ir.Value]:
    return [x for x in node.inputs if x is not None]


def _are_known(*images: ir.Value) -> bool:
    """Whether all dimensions are but, perhaps, that of the batch."""
    return all(v.shape is not None and all(isinstance(size, int) for size in v.shape.dims[1:]) for v in images)


def _pixels(window: Window, size: Sequence[int]) -> list[np.ndarray]:
    """The pixel under each tap at each position, along both axes: [positions, taps]; some beyond the image."""
    axes = zip(size, window.kernel, window.strides, window.dilations, window.begin)
    return [np.arange(n)[:, None] * s + np.arange(k) * d - b for n, k, s, d, b in axes]


def _taps_read(window: Window, x: ir.Value, size: Sequence[int]) -> tuple[Window, list[range]] | None:
    """The window without the taps before and behind those that read `x` anywhere, and which are left; None if none is."""
    taps = []
    for places, n in zip(_pixels(window, size), x.shape.dims[2:]):
        read = np.flatnonzero(((places >= 0) & (places < n)).any(axis=0))
        if not len(read):
            return None
        taps.append(range(int(read[0]), int(read[-1]) + 1))
    begin = tuple(b - tap.start * d for b, tap, d in zip(window.begin, taps, window.dilations))
    return replace(window, kernel=tuple(map(len, taps)), begin=begin), taps
