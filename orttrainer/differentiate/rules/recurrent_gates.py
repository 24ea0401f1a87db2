"""The gates of LSTM and GRU in the order in which the weights have them.

ONNX wants i o f g and z r n. What PyTorch's exporter gives it is put in that order by slices of PyTorch's weights,
i f g o and r z n, in every step, and the gradients are put back. A rule that takes the weights as they are stored has
neither to do: it only names the gates in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.rows import origin_of_rows


def unordered(w: ir.Value, r: ir.Value, gates: int) -> tuple[ir.Value, ir.Value, tuple[int, ...]]:
    """Weights of one direction, [1, gates * hidden, ...], as they are stored, and the order of the gates there.

    Returns:
        The two weights without the axis of directions, and for each of their gates its number in `w` and `r`; these
        themselves and 0, 1, ... if they are not stored in one other order.
    """
    found = [_stored(weight, gates) for weight in (w, r)]
    if None in found or found[0][1] != found[1][1]:
        return w, r, tuple(range(gates))
    (w, order), (r, _) = found
    return w, r, order


def _stored(weight: ir.Value, gates: int) -> tuple[ir.Value, tuple[int, ...]] | None:
    node = weight.producer()
    if node is None or node.op_type != "Unsqueeze" or weight.shape is None or weight.shape[0] != 1:
        return None
    inner = node.inputs[0]
    if inner.shape is None or len(inner.shape) != 2 or not isinstance(inner.shape[0], int):
        return None
    hidden, places = inner.shape[0] // gates, []
    for source, start, end in (rows := origin_of_rows(inner) if hidden else []):
        if source is not rows[0].source or start % hidden or end % hidden:
            return None
        places += range(start // hidden, end // hidden)
    if not rows or rows[0].source.shape is None or rows[0].source.shape[0] != inner.shape[0]:
        return None
    # places[k] is where ONNX's gate k is stored; order is the other way round.
    return (rows[0].source, tuple(places.index(k) for k in range(gates))) if sorted(places) == [*range(gates)] else None


def split_gates(op: Builder, value: ir.Value, order: Sequence[int], axis: int) -> list[ir.Value]:
    """The gates of `value`, which has them in `order` along `axis`, in ONNX's order."""
    parts = op.Split(value, axis=axis, num_outputs=len(order), outputs=len(order))
    return [parts[order.index(k)] for k in range(len(order))]


def join_gates(op: Builder, gates: Sequence[ir.Value], order: Sequence[int], axis: int) -> ir.Value:
    """`gates`, given in ONNX's order, one behind the other in `order` along `axis`."""
    return op.Concat(*(gates[k] for k in order), axis=axis)


def to_order(op: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """`value`, whose first axis has the gates in ONNX's order, in `order`."""
    if list(order) == sorted(order):
        return value
    return join_gates(op, op.Split(value, axis=0, num_outputs=len(order), outputs=len(order)), order, axis=0)


def from_order(op: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """`value`, whose first axis has the gates in `order`, in ONNX's order."""
    return value if list(order) == sorted(order) else op.Concat(*split_gates(op, value, order, axis=0), axis=0)
