"""The weight gradient of a depthwise convolution, on tensors in blocks of channels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, ints

LEAST_PRODUCTS = 1 << 14  # of an image: below, an iteration of a Scan takes as long


def operands(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """x and dy, if `node` is the sum over all images n of the convolution of x[n] with the kernel dy[n], by channels.

    That is a Conv of x as [1, channels * images, ...] with dy as [channels, images, ...], in as many groups as channels.
    """
    group = node.attributes.get_int("group", 1)
    if node.op_type != "Conv" or node.domain or group == 1 or len(node.inputs) > 2:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    dy = _read_through(node.inputs[1], "Transpose", (1, 0, 2, 3))
    merged = _read_through(node.inputs[0], "Reshape")
    split = merged and _read_through(merged, "Transpose", (2, 1, 0, 3, 4))
    x = split and (_read_through(split, "Reshape") or _read_through(split, "Unsqueeze"))
    if (
        dy is None
        or x is None
        or x.dtype != ir.DataType.FLOAT
        or not _are_images(x, group)
        or not _are_images(dy, group)
    ):
        return None
    sizes, taps = x.shape.dims[2:], static_dims(node.outputs[0])
    if tuple(split.shape.dims[1:]) != (group, 1, *sizes) or tuple(node.inputs[0].shape.dims[2:]) != tuple(sizes):
        return None
    return (x, dy) if taps is not None and int(np.prod(taps) * np.prod(sizes)) >= LEAST_PRODUCTS else None


def convolved(op: Builder, node: ir.Node, x: ir.Value, dy: ir.Value) -> ir.Value:
    """What `node` makes, in blocks, of its `operands` in blocks.

    The blocks of an image of dy are those of a depthwise kernel. So each image is one convolution, and nothing is
    transposed or unfolded: 0.2 ms where Conv takes 2.1 (16 images of 32 x 32, 32 channels; the blocks are made in that time).
    """
    (y,) = node.outputs
    name, channels = f"{y.name}/scan", x.shape[1]
    body = ir.Graph([], [], nodes=[], opset_imports=op.graph.opset_imports, name=name)
    for value in (x, dy):
        body.inputs.append(ir.Value(name=f"{name}/{value.name}", type=value.type, shape=ir.Shape(value.shape.dims[1:])))
    inner, (image, kernel) = Builder(body, name), body.inputs
    size = list(kernel.shape.dims[1:])
    taps = inner.node(
        "Conv", inner.Unsqueeze(image, [0]), inner.Reshape(kernel, [channels, 1, *size]), domain=DOMAIN, like=y,
        group=channels, kernel_shape=size, strides=ints(node, "strides", 1), dilations=ints(node, "dilations", 1),
        pads=ints(node, "pads", 0, 4),
    )  # fmt: skip
    body.outputs.append(taps)
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", 2)]
    scan = ir.Node("", "Scan", [x, dy], attributes, name=name)
    op.graph.append(scan)
    (stacked,) = scan.outputs
    stacked.name, stacked.type, stacked.shape = name, y.type, ir.Shape([x.shape[0], 1, channels, *y.shape.dims[2:]])
    return op.ReduceSum(stacked, [0], keepdims=0)


def _read_through(y: ir.Value, op_type: str, perm: tuple[int, ...] | None = None) -> ir.Value | None:
    """What the node of that type reads that makes `y`; None if another one does."""
    node = y.producer()
    if node is None or node.op_type != op_type or node.domain or y.shape is None:
        return None
    if perm is not None and tuple(node.attributes.get_ints("perm", ())) != perm:
        return None
    return node.inputs[0]


def _are_images(x: ir.Value, channels: int) -> bool:
    return (
        x.shape is not None
        and len(x.shape) == 4
        and all(isinstance(d, int) for d in x.shape.dims[1:])
        and x.shape[1] == channels
    )
