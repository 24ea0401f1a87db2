"""What the passes on blocks of channels share: the domain of the operators, attributes, constants, ways to the blocks and back."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

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
