"""The weight gradients of convolutions that are added up, by one convolution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc_nodes import int64s, ints
from orttrainer.graph.passes.speed.weight_gradients import WeightGradient
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

LARGEST = 1 << 24  # bytes of the copies of dY


class StackRowsOfTapsPass(ir.passes.InPlacePass):
    """Conv(x, dY, pads p) for several p -> Conv(x, several dY, each moved by as many rows), where these are weight gradients.

    So has a convolution of volumes, which is the sum of one for each row of taps. ONNX Runtime unfolds x once for all of
    them, for a product with more rows: those of few channels take more time to pack than to multiply. Of float32, without strides
    along the rows. For the sessions on a CPU.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, alike = model.graph, defaultdict(list)
        for node in graph:
            if (found := _Gradient.of(node)) is not None:
                alike[found.key].append(found)
        groups = [group for group in alike.values() if len(group) > 1 and _is_small(group)]
        op = Builder(graph, "stacked") if groups else None
        for group in groups:
            with op.scope(group[0].last.name):
                _stack(op, group)
        if groups:
            graph.sort()  # the builder appends
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, bool(groups))


class _Gradient(NamedTuple):
    """A weight gradient: the last node that makes it, the convolution by dY, what it is of."""

    last: ir.Node
    convolution: ir.Node
    of_what: WeightGradient

    @classmethod
    def of(cls, node: ir.Node) -> _Gradient | None:
        found = WeightGradient.of(node)
        if found is None or found.window.strides[0] != 1 or not _has_known_images(found):
            return None
        made = node.inputs[0].producer().inputs[0]  # what the Reshape reads
        if made.producer().op_type == "MatMul":  # the sum over parts of the images
            made = made.producer().inputs[1].producer().inputs[0]
        convolution = made.producer()
        return cls(node, convolution, found) if len(convolution.inputs[0].shape) == 4 else None

    @property
    def key(self) -> tuple:
        """What those that go together have in common: all but the pads before the rows."""
        window = self.of_what.window
        return self.of_what.x, self.of_what.dy, window.kernel, window.strides, window.dilations, window.begin[1]


def _has_known_images(gradient: WeightGradient) -> bool:
    return all(isinstance(size, int) for v in (gradient.x, gradient.dy) for size in v.shape.dims[1:])


def _is_small(group: Sequence[_Gradient]) -> bool:
    """Whether as many copies of dY are, as far as its size is known."""
    dims = group[0].of_what.dy.shape.dims
    return len(group) * int(np.prod([size for size in dims if isinstance(size, int)])) * 4 <= LARGEST


def _stack(op: Builder, group: Sequence[_Gradient]) -> None:
    """Let one convolution make what all of the group do."""
    convolution, gradient = group[0].convolution, group[0].of_what
    x, dy, window = gradient.x, gradient.dy, gradient.window
    (batch, outputs, rows, columns), channels = dy.shape.dims, x.shape[1]
    top = max(each.of_what.window.begin[0] for each in group)
    moved = [top - each.of_what.window.begin[0] for each in group]
    room = max(moved)
    several = op.Concat(*(_moved(op, dy, rows_before, room) for rows_before in moved), axis=1)
    parts, count = convolution.attributes.get_int("group", 1), len(group)
    if parts == 1:
        kernel = op.Transpose(several, perm=[1, 0, 2, 3])
    else:  # each of one image, or of several
        split = op.Reshape(several, int64s(parts, batch // parts, count * outputs, -1))
        kernel = split if parts == batch else op.Transpose(split, perm=[0, 2, 1, 3])
        kernel = op.Reshape(kernel, int64s(parts * count * outputs, batch // parts, rows + room, columns))
    _, left, _, right = ints(convolution, "pads", 0, 4)
    end = (window.kernel[0] - 1) * window.dilations[0] + rows + room - x.shape[2] - top
    taps = op.Conv(
        convolution.inputs[0], kernel, group=parts, strides=ints(convolution, "strides", 1), dilations=ints(convolution, "dilations", 1),
        pads=[top, left, end, right],
    )  # fmt: skip
    if parts > 1:
        taps = op.MatMul(np.ones((1, parts), np.float32), op.Reshape(taps, int64s(parts, -1)))
    taps = op.Reshape(taps, int64s(count, outputs, *window.kernel, channels))
    for each, piece in zip(group, op.Split(taps, axis=0, num_outputs=count, outputs=count), strict=True):
        each.last.replace_input_with(0, op.Squeeze(piece, int64s(0)))


def _moved(op: Builder, dy: ir.Value, before: int, room: int) -> ir.Value:
    return op.Pad(dy, int64s(0, 0, before, 0, 0, 0, room - before, 0))
