"""The gradient of a convolution for its weight, recognised in a graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import static_dims

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """What a convolution slides over images: sizes of its kernel, strides, dilations, pads before, along both axes."""

    kernel: Pair
    strides: Pair
    dilations: Pair
    begin: Pair


@dataclass(frozen=True)
class WeightGradient:
    """What a weight gradient is made of: [batch, in, ...] and [batch, out, ...] images of float32."""

    x: ir.Value
    dy: ir.Value
    window: Window

    @classmethod
    def of(cls, node: ir.Node) -> WeightGradient | None:
        """That of the last node of the form that `differentiate/rules/convolution_weights.py` writes."""
        taps = _through(_through(node.outputs[0], "Transpose", (0, 3, 1, 2)), "Reshape")
        dims = static_dims(node.outputs[0])
        if taps is None or dims is None:
            return None
        parts = 1
        if (product := taps.producer()) is not None and product.op_type == "MatMul":  # of the images
            ones, rows = product.inputs
            if ones.const_value is None or not np.all(ones.const_value.numpy() == 1):
                return None
            parts, taps = ones.shape[-1], _through(rows, "Reshape")
        conv = taps.producer() if taps is not None else None
        if conv is None or conv.op_type != "Conv" or conv.domain or len(conv.inputs) != 2:
            return None
        if conv.attributes.get_int("group", 1) != parts or "auto_pad" in conv.attributes:
            return None
        x = _through(_through(conv.inputs[0], "Reshape"), "Transpose", (0, 2, 3, 1))
        kernel = _through(conv.inputs[1], "Unsqueeze") or conv.inputs[1]
        dy = _through(kernel, "Transpose", (1, 0, 2, 3)) if parts == 1 else _cut_into_parts(kernel)
        outputs, channels, *sizes = dims
        if not _are_images(x, channels) or not _are_images(dy, outputs):
            return None
        strides, dilations, pads = (
            list(conv.attributes.get_ints(name, ())) for name in ("strides", "dilations", "pads")
        )
        axes = len(strides)
        if not axes == len(dilations) == len(pads) // 2 or axes not in (2, 3):
            return None
        unit = 1 if axes == 3 else channels  # of the last axis, which has the channels too or not
        if strides[axes - 1] != 1 or dilations[1] % unit or pads[1] % unit:
            return None
        # A stride of the window is a dilation of the convolution by dY, and the other way.
        dilations, begin = (dilations[0], dilations[1] // unit), (pads[0], pads[1] // unit)
        return cls(x, dy, Window(tuple(sizes), dilations, (strides[0], strides[1]), begin))


def _through(y: ir.Value | None, op_type: str, perm: tuple[int, ...] | None = None) -> ir.Value | None:
    """What the node of that type reads that makes `y`; None if another one does."""
    node = y.producer() if y is not None else None
    if node is None or node.op_type != op_type or node.domain:
        return None
    if perm is not None and tuple(node.attributes.get_ints("perm", ())) != perm:
        return None
    return node.inputs[0]


def _cut_into_parts(kernel: ir.Value) -> ir.Value | None:
    """dY of which the images of each part are channels of a kernel."""
    rows = _through(kernel, "Reshape")
    return _through(_through(rows, "Transpose", (0, 2, 1, 3)) or rows, "Reshape")


def _are_images(x: ir.Value | None, channels: int) -> bool:
    if x is None or x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) != 4:
        return False
    return x.shape[1] == channels
