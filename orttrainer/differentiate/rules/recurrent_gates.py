"""The gates of LSTM and GRU in the order in which the weights have them.

ONNX wants i o f g and z r n. What PyTorch's exporter gives it is put in that order by slices of PyTorch's weights,
i f g o and r z n, in every step, and the gradients are put back. A rule that takes the weights as they are stored has
neither to do: it only names the gates in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.rows import origin_of_rows


class Stored(NamedTuple):
    """The weights of one direction as they are stored, without the axis of directions; `biases`: of W X and of R H'."""

    w: ir.Value
    r: ir.Value
    biases: tuple[ir.Value, ir.Value] | None


def as_stored(
    w: ir.Value, r: ir.Value, bias: ir.Value | None, gates: int, directions: int
) -> tuple[list[Stored], tuple[int, ...]] | None:
    """The weights of each direction, and for each of their gates its number in `w`, `r` and `bias`.

    None if they are not all stored in one other order, or are not known to be.
    """
    stored, orders = [], set()
    for k in range(directions):
        inner = [_of_direction(weight, k) for weight in (w, r)]
        found = [None if weight is None else _ordered(weight, 0, weight.shape[0], gates) for weight in inner]
        if bias is not None:
            both = _of_direction(bias, k)
            half = None if both is None else both.shape[0] // 2
            found += [None if half is None else _ordered(both, at, at + half, gates) for at in (0, half)]
        if None in found:
            return None
        orders |= {order for _, order in found}
        (w_k, _), (r_k, _), *biases = found
        stored.append(Stored(w_k, r_k, tuple(source for source, _ in biases) or None))
    return (stored, orders.pop()) if len(orders) == 1 else None


def _of_direction(weight: ir.Value, k: int) -> ir.Value | None:
    """The part of direction `k` before it got the axis of directions."""
    rows = origin_of_rows(weight, k, k + 1)
    node = rows[0].source.producer() if len(rows) == 1 else None
    if node is None or node.op_type != "Unsqueeze" or rows[0].source.shape is None or rows[0].source.shape[0] != 1:
        return None
    inner = node.inputs[0]
    whole = inner.shape is not None and weight.shape is not None and len(inner.shape) == len(weight.shape) - 1
    return inner if whole and isinstance(inner.shape[0], int) else None


def _ordered(weight: ir.Value, start: int, end: int, gates: int) -> tuple[ir.Value, tuple[int, ...]] | None:
    """What rows `start` to `end`, gate by gate, are all that there is of, and the order of the gates there."""
    hidden, places = (end - start) // gates, []
    for source, first, last in (rows := origin_of_rows(weight, start, end) if hidden else []):
        if source is not rows[0].source or first % hidden or last % hidden:
            return None
        places += range(first // hidden, last // hidden)
    if not rows or rows[0].source.shape is None or rows[0].source.shape[0] != end - start:
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


def from_order(op: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """`value`, whose first axis has the gates in `order`, in ONNX's order."""
    return value if list(order) == sorted(order) else op.Concat(*split_gates(op, value, order, axis=0), axis=0)
