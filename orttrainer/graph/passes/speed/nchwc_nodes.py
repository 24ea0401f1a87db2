"""What the passes on blocks of channels share: the domain of the operators, attributes, constants, ways to the blocks and back."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims

DOMAIN = "com.microsoft.nchwc"


def ints(node: ir.Node, name: str, default: int, count: int = 2) -> list[int]:
    """An attribute of a convolution; `default` for each of `count` places where it is not given."""
    return list(node.attributes.get_ints(name, None) or [default] * count)


def int64s(*sizes: int) -> np.ndarray:
    return np.array(sizes, np.int64)


def is_reordering(node: ir.Node, op_type: str) -> bool:
    """Whether `node` brings a tensor with channels first into blocks ("ReorderInput"), or out of them ("ReorderOutput")."""
    last = node.attributes.get_int("channels_last", 0)
    return node.domain == DOMAIN and node.op_type == op_type and not last


def reordered(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """The tensors that are brought into blocks already -> the same in blocks."""
    return {node.inputs[0]: node.outputs[0] for node in graph if is_reordering(node, "ReorderInput")}


def scaled(
    op: Builder, x: ir.Value, factor: ir.Value | None, offset: ir.Value | None = None, activation: str | None = None,
    added: ir.Value | None = None,
) -> ir.Value:  # fmt: skip
    """x * factor + offset + added for `x` in blocks and vectors of channels, and its activation, in one pass over memory.

    Args:
        factor, offset, added: what is None is left out; `added` is a tensor in blocks, and is written over where nobody
            else reads it.
    """
    channels, pixels = x.shape[1], x.shape.dims[2:]
    factor = op.const(np.ones((channels, 1, 1, 1), np.float32)) if factor is None else factor
    if static_dims(factor) != (channels, 1, 1, 1):
        factor = op.Reshape(factor, int64s(channels, 1, 1, 1))
    if offset is not None and len(offset.shape) != 1:
        offset = op.Reshape(offset, int64s(channels))
    rows = all(isinstance(size, int) for size in pixels)  # one row of all pixels is the fastest
    flat, added = (
        op.Reshape(v, int64s(0, 0, 1, math.prod(pixels))) if rows and v is not None else v for v in (x, added)
    )
    more = [offset, added] if added is not None else [offset] if offset is not None else []
    result = op.node(
        "Conv", flat, factor, *more, domain=DOMAIN, like=flat, kernel_shape=[1, 1], group=channels, strides=[1, 1],
        dilations=[1, 1], pads=[0, 0, 0, 0], activation=activation,
    )  # fmt: skip
    if rows:
        result = op.Reshape(result, int64s(0, 0, *pixels))
    result.shape = x.shape
    return result
