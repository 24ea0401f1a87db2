"""What is known of a Fourier transform."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["of_half_a_spectrum", "transformed"]


def transformed(node: ir.Node, graph: ir.Graph) -> tuple[int, int, int] | None:
    """The axis of a DFT, how many points there are along it, and how many it transforms; None where these are not known."""
    x, length, given = (*node.inputs, None, None)[:3]
    if x.shape is None:
        return None
    axis = node.attributes.get_int("axis", 1) if graph.opset_imports[""] < 20 else -2
    if given is not None and (axis := _number(given)) is None:
        return None
    axis %= len(x.shape)
    points = x.shape[axis]
    if not isinstance(points, int):
        return None
    size = 2 * (points - 1) if of_half_a_spectrum(node) else points
    if length is not None and (size := _number(length)) is None:
        return None
    return axis, points, size


def of_half_a_spectrum(node: ir.Node) -> bool:
    """Whether half a spectrum is what is given."""
    return bool(node.attributes.get_int("inverse", 0) and node.attributes.get_int("onesided", 0))


def _number(value: ir.Value) -> int | None:
    tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else int(tensor.numpy().item())
