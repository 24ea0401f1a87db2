"""Convolutions of volumes, as those of images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.nchwc import CHANNELS_AT_ONCE, FILLED
from orttrainer.graph.passes.speed.nchwc_nodes import int64s, ints
from orttrainer.graph.scopes import put_all_in_place

AXES = 3
BLOCK = 16  # channels that lie together, where convolutions work in blocks of them, as on most processors
MOST = 1.5  # times as many results as are read
Triple = tuple[int, int, int]


class VolumesAsImagesPass(ir.passes.InPlacePass):
    """Conv(x [batch, channels, depth, height, width]) -> a sum of Conv(images [batch, channels, depth * rows, width]).

    The planes of a volume lie one above the other, with rows of zeros between them. A dilation of as many rows as a plane
    has leads from one plane to the same place in the next, so there is one convolution for each row of taps, with the
    depth in the place of the height: its pads move it to that row. Nothing is copied for a tap, ONNX Runtime adds up in
    place, and all that is known of images is for these: blocks of channels, which it has in two axes only, and the forms of the
    gradients. Kernels of one plane are one convolution; those along the depth alone read a plane as a row. Of float32, with
    sizes that are known and channels that fill blocks. For a graph that is to be differentiated, and the CPU.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if _Volumes.of(node) is not None]
        return put_all_in_place(model, "volumes", found, lambda op, node: _Volumes.of(node).convolved(op, node))


@dataclass(frozen=True)
class _Volumes:
    """What a convolution of volumes is: sizes of what it reads and makes, its kernel, strides, dilations, pads."""

    channels: int
    outputs: int
    read: Triple
    made: Triple
    kernel: Triple
    strides: Triple
    dilations: Triple
    begin: Triple
    end: Triple
    group: int

    @classmethod
    def of(cls, node: ir.Node) -> _Volumes | None:
        """That of a node; None where it stays as it is."""
        if node.op_type != "Conv" or node.domain or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            return None
        x, w, y = *node.inputs[:2], node.outputs[0]
        weights = static_dims(w)
        if x.dtype != ir.DataType.FLOAT or weights is None or len(weights) != 2 + AXES:
            return None
        if x.shape is None or y.shape is None:
            return None
        channels, *read = x.shape.dims[1:]
        made = y.shape.dims[2:]
        if not all(isinstance(size, int) and size > 0 for size in (channels, *read, *made)):
            return None
        strides, dilations = (tuple(ints(node, name, 1, AXES)) for name in ("strides", "dilations"))
        pads = ints(node, "pads", 0, 2 * AXES)
        group = node.attributes.get_int("group", 1)
        volumes = cls(
            channels, weights[0], tuple(read), tuple(made), weights[2:], strides, dilations, tuple(pads[:AXES]), tuple(pads[AXES:]), group
        )  # fmt: skip
        fitting = volumes.is_along_depth or (volumes.fills_blocks and volumes.has_images)
        return volumes if fitting else None

    @property
    def is_along_depth(self) -> bool:
        """Whether all places of a plane are treated alike, each by itself."""
        alone = self.kernel[1:] == self.strides[1:] == (1, 1) and not any((*self.begin[1:], *self.end[1:]))
        return alone and self.kernel[0] > 1

    @property
    def fills_blocks(self) -> bool:
        """Whether the channels fill blocks, or nearly, or are convolved each by itself."""
        if self.group > 1 and self.channels == self.outputs == self.group:
            return self.channels % CHANNELS_AT_ONCE == 0
        inner, outer = self.channels // self.group, self.outputs // self.group
        filled = math.prod(size / (size + -size % BLOCK) for size in (inner, outer))
        if self.group > 1:
            return filled == 1
        return filled >= FILLED and inner >= BLOCK and inner % CHANNELS_AT_ONCE == outer % CHANNELS_AT_ONCE == 0

    @property
    def has_images(self) -> bool:
        """Whether windows of several places slide over planes, one after the other, and most of the results are read."""
        if math.prod(self.kernel[1:]) == 1 or self.strides[0] > 1 or self.results < self.made[1]:
            return False
        return self.planes * self.results <= MOST * math.prod(self.made[:2])

    @property
    def rows(self) -> int:
        """Of a plane, with those of zeros behind it: as many as a window may read before and behind; a multiple of the stride."""
        rows = self.read[1] + max(self.begin[1], self.end[1])
        return rows + -rows % self.strides[1]

    @property
    def results(self) -> int:
        """Rows of results for each plane, of which some are left out."""
        return self.rows // self.strides[1]

    @property
    def first(self) -> tuple[int, int]:
        """The plane and the row that the results begin with: pads are not less than nothing."""
        short = self._reach - self._before if self.kernel[0] > 1 else 0
        row = max(0, -(-short // self.strides[1]))
        return (0, row) if row + self.made[1] <= self.results else (1, 0)

    @property
    def planes(self) -> int:
        """Of results, of which some may be left out."""
        planes = self.first[0] + self.made[0]
        return planes if self._behind(planes) >= 0 else planes + 1

    @property
    def _before(self) -> int:
        """Rows of zeros that the first window reads before the volume."""
        return self.begin[0] * self.rows + self.begin[1]

    @property
    def _reach(self) -> int:
        """Rows from the first taps of a window in a plane to the last ones."""
        return (self.kernel[1] - 1) * self.dilations[1]

    def _behind(self, planes: int) -> int:
        """Rows of zeros that the first row of taps reads behind the volume, for so many planes of results."""
        extent = (self.kernel[0] - 1) * self.dilations[0] * self.rows if self.kernel[0] > 1 else self._reach
        read = self.strides[1] * (planes * self.results - 1) + 1 + extent
        return read - self._top - self.read[0] * self.rows

    @property
    def _top(self) -> int:
        plane, row = self.first
        return self._before + self.strides[1] * (plane * self.results + row)

    def pads(self, row: int) -> list[int]:
        """Of the images, for a row of taps: before the rows and columns, and behind them."""
        offset = row * self.dilations[1]
        return [self._top - offset, self.begin[2], self._behind(self.planes) + offset, self.end[2]]

    def convolved(self, op: Builder, node: ir.Node) -> ir.Value:
        x, w, *bias = node.inputs
        if self.is_along_depth:
            return self._along_depth(op, x, w, bias)
        depth, height, width = self.read
        if self.rows > height:
            x = op.Pad(x, int64s(0, 0, 0, 0, 0, 0, 0, 0, self.rows - height, 0))
        images = op.Reshape(x, int64s(0, 0, depth * self.rows, width))
        y = self._of_planes(op, images, w, bias) if self.kernel[0] == 1 else self._of_rows(op, images, w, bias)
        (plane, row), (depth, height, width) = self.first, self.made
        y = op.Reshape(y, int64s(0, 0, self.planes, self.results, width))
        if (self.planes, self.results) == (depth, height):
            return y
        return op.Slice(y, [plane, row], [plane + depth, row + height], [2, 3])

    def _along_depth(self, op: Builder, x: ir.Value, w: ir.Value, bias: list[ir.Value]) -> ir.Value:
        """A plane is a row of an image."""
        rows = op.Reshape(x, int64s(0, 0, self.read[0], math.prod(self.read[1:])))
        y = op.Conv(
            rows, op.Squeeze(w, [4]), *bias, kernel_shape=[self.kernel[0], 1], strides=[self.strides[0], 1],
            dilations=[self.dilations[0], 1], pads=[self.begin[0], 0, self.end[0], 0], group=self.group,
        )  # fmt: skip
        return op.Reshape(y, int64s(0, 0, *self.made))

    def _of_planes(self, op: Builder, images: ir.Value, w: ir.Value, bias: list[ir.Value]) -> ir.Value:
        """All rows of taps at once: they read one plane."""
        return op.Conv(
            images, op.Squeeze(w, [2]), *bias, kernel_shape=list(self.kernel[1:]), strides=list(self.strides[1:]),
            dilations=list(self.dilations[1:]), pads=self.pads(0), group=self.group,
        )  # fmt: skip

    def _of_rows(self, op: Builder, images: ir.Value, w: ir.Value, bias: list[ir.Value]) -> ir.Value:
        """The sum over the rows of taps."""
        count = self.kernel[1]
        rows = op.Split(w, axis=3, num_outputs=count, outputs=count) if count > 1 else [w]
        total = None
        for row, taps in enumerate(rows):
            convolved = op.Conv(
                images, op.Squeeze(taps, [3]), *(bias if row == 0 else []), kernel_shape=list(self.kernel[::2]),
                strides=list(self.strides[1:]), dilations=[self.dilations[0] * self.rows, self.dilations[2]],
                pads=self.pads(row), group=self.group,
            )  # fmt: skip
            total = convolved if total is None else op.Add(total, convolved)
        return total
