"""Sums over the pixels of tensors in blocks of channels, and of the products of two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, int64s
from orttrainer.graph.passes.speed.usual_batch import UsualBatch

LEAST_ELEMENTS = 1 << 15  # of a product: below, what is spared is no more than a node costs
LONGEST_SUM = 1 << 11  # pixels that are added up one by one; of more, each row is a sum


def over_pixels(op: Builder, op_type: str, tensor: ir.Value, block: int, over_batch: bool) -> ir.Value:
    """The sum or mean of a tensor over its pixels, [batch, channels], or over the batch too, [channels]."""
    channels, pixels = tensor.shape[1], tensor.shape.dims[2:]
    known = all(isinstance(size, int) for size in pixels)  # of no images there is no telling what -1 is
    split = op.Reshape(tensor, int64s(0, channels // block, math.prod(pixels) if known else -1, block))
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

    def __init__(self, op: Builder, block: int, sizes: Mapping[str, int]):
        self.op, self.block, self.batch = op, block, UsualBatch(op, sizes)

    def sum(self, op_type: str, a: ir.Value, b: ir.Value, over_batch: bool) -> ir.Value:
        """ReduceSum or ReduceMean of a * b, as `over_pixels` gives it."""
        dims = [self.batch.size(a), *a.shape.dims[1:]]
        if not all(isinstance(size, int) for size in dims) or math.prod(dims) < LEAST_ELEMENTS:
            return self._usually(self.op, op_type, a, b, over_batch)
        return self.batch.either(
            a, dims[1:2] if over_batch else a.shape.dims[:2],
            usual=lambda op: self._convolved(op, op_type, a, b, over_batch, dims),
            other=lambda op: self._usually(op, op_type, a, b, over_batch),
        )  # fmt: skip

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
