"""Sums over the pixels of tensors in blocks of channels, and of the products of two of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, int64s

LEAST_ELEMENTS = 1 << 15  # of a product: below, what is spared is no more than a node costs
LONGEST_SUM = 1 << 11  # pixels that are added up one by one; of more, each row is a sum


def over_pixels(op: Builder, op_type: str, tensor: ir.Value, block: int, over_batch: bool) -> ir.Value:
    """The sum or mean of a tensor over its pixels, [batch, channels], or over the batch too, [channels]."""
    channels = tensor.shape[1]
    split = op.Reshape(tensor, int64s(0, channels // block, -1, block))
    images = op.Reshape(op.node(op_type, split, [2], keepdims=0), int64s(-1, channels))
    return op.node(op_type, images, [0], keepdims=0) if over_batch else images


class Products:
    """Sums of products, each as one depthwise convolution of all images with all images.

    An image in blocks lies as a depthwise kernel does. As the kernel that covers all of an image it gives the sum of
    their products, for each channel: 0.14 ms where a product and its sum, which write it and read it again, take 0.40
    (32 images of 32 x 32, 32 channels). The channels of all images count as channels of one, so the size of the batch
    stands in the graph; where others may come, an `If` has the usual way for them.

    Args:
        op: of the graph.
        block: how many channels make a block.
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def __init__(self, op: Builder, block: int, sizes: dict[str, int]):
        self.op, self.block, self.sizes = op, block, sizes
        self._usual: dict[int | str, ir.Value] = {}

    def sum(self, op_type: str, a: ir.Value, b: ir.Value, over_batch: bool) -> ir.Value:
        """ReduceSum or ReduceMean of a * b, as `over_pixels` gives it."""
        batch = a.shape[0]
        images = batch if isinstance(batch, int) else self.sizes.get(batch.value)
        dims = [images, *a.shape.dims[1:]]
        if not all(isinstance(size, int) for size in dims) or math.prod(dims) < LEAST_ELEMENTS:
            return self._usually(self.op, op_type, a, b, over_batch)
        if isinstance(batch, int):
            return self._convolved(self.op, op_type, a, b, over_batch, dims)
        name = self.op.new_name("If")
        then = _branch(self.op, f"{name}/then", lambda op: self._convolved(op, op_type, a, b, over_batch, dims))
        other = _branch(self.op, f"{name}/else", lambda op: self._usually(op, op_type, a, b, over_batch))
        attributes = [ir.AttrGraph("then_branch", then), ir.AttrGraph("else_branch", other)]
        node = ir.Node("", "If", [self._is_usual(a, images)], attributes, name=name)
        (y,) = node.outputs
        y.name, y.type = name, a.type
        y.shape = ir.Shape([dims[1]] if over_batch else [batch, dims[1]])
        self.op.graph.append(node)
        return y

    def _is_usual(self, a: ir.Value, images: int) -> ir.Value:
        """Whether the batch is as large as the one at hand."""
        name = a.shape[0].value
        if name not in self._usual:
            self._usual[name] = self.op.Squeeze(self.op.Equal(self.op.dim(a, 0), int64s(images)))
        return self._usual[name]

    def _usually(self, op: Builder, op_type: str, a: ir.Value, b: ir.Value, over_batch: bool) -> ir.Value:
        return over_pixels(op, op_type, op.node("Mul", a, b, like=a), self.block, over_batch)

    def _convolved(self, op: Builder, op_type: str, a: ir.Value, b: ir.Value, over_batch: bool, dims: list[int]):
        images, channels, height, width = dims
        rows = 1 if height * width <= LONGEST_SUM else height
        kernel = [height // rows, width]
        groups = images * channels * rows
        dots = op.node(
            "Conv", op.Reshape(a, int64s(1, groups, *kernel)), op.Reshape(b, int64s(groups, 1, *kernel)), domain=DOMAIN,
            like=a, group=groups, kernel_shape=kernel, strides=[1, 1], dilations=[1, 1], pads=[0, 0, 0, 0],
        )  # fmt: skip
        dots.shape = ir.Shape([1, groups, 1, 1])
        if rows > 1:
            dots = op.ReduceSum(op.Reshape(dots, int64s(-1, rows, self.block)), [1], keepdims=0)
        dots = op.Reshape(dots, int64s(images, channels))
        total = op.ReduceSum(dots, [0], keepdims=0) if over_batch else dots
        if op_type == "ReduceSum":
            return total
        return op.Mul(total, op.scalar(1 / (height * width * (images if over_batch else 1)), total))


def _branch(op: Builder, name: str, write: Callable[[Builder], ir.Value]) -> ir.Graph:
    """A graph of one result that reads what is around it."""
    graph = ir.Graph([], [], nodes=[], opset_imports=op.graph.opset_imports, name=name)
    graph.outputs.append(write(Builder(graph, name)))
    return graph
