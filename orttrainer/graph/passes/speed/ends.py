"""Zeros that a tensor has at its ends, and ends of a tensor that nobody reads, as around a convolution by transforms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array


class Inner(NamedTuple):
    """What zeros surround along an axis: it goes from `start` to `end` there."""

    value: ir.Value
    start: int
    end: int


def without_zeros(op: Builder, x: ir.Value, axis: int) -> Inner:
    """The part of `x` that no Pad has put zeros around along `axis`, whose size is known."""
    node, whole = x.producer(), Inner(x, 0, x.shape[axis])
    if node is None or node.domain:
        return whole
    if node.op_type == "Unsqueeze" and _is_last(node.inputs[1], len(x.shape)) and node.inputs[0].shape is not None:
        inner = without_zeros(op, node.inputs[0], axis)
        return whole if inner.value is node.inputs[0] else inner._replace(value=op.Unsqueeze(inner.value, [-1]))
    if node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "constant":
        return whole
    source, pads, fill, axes = (*node.inputs, None, None)[:4]
    widths, filled = constant_array(pads), 0 if fill is None else constant_array(fill)
    places = np.arange(len(x.shape)) if axes is None else constant_array(axes)
    if widths is None or places is None or filled is None or np.any(filled) or source.shape is None:
        return whole
    before, after = widths.reshape(2, -1)
    (wide,) = np.nonzero(before | after)
    if [int(places[k]) % len(x.shape) for k in wide] != [axis] or before[wide[0]] < 0 or after[wide[0]] < 0:
        return whole
    start = int(before[wide[0]])
    return Inner(source, start, whole.end - int(after[wide[0]]))


class Cut(NamedTuple):
    """What alone is read of a tensor along an axis; `nodes` lead to the Slice that takes it, some may squeeze its last axis."""

    nodes: list[ir.Node]
    start: int
    end: int

    def put(self, op: Builder, new: ir.Value) -> None:
        """Let `new`, from `start` to `end` of that tensor, take the place of what is read."""
        if any(node.op_type == "Squeeze" for node in self.nodes):
            new = op.Squeeze(new, [-1])
        old = self.nodes[-1].outputs[0]
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        for node in reversed(self.nodes):
            node.graph.remove(node, safe=True)
        new.type, new.shape, new.name = old.type, old.shape, old.name


def cut_of(y: ir.Value, axis: int) -> Cut | None:
    """What is read of `y` along `axis`, which is not its last one, if that is not all of it."""
    nodes: list[ir.Node] = []
    while len(uses := list(y.uses())) == 1 and not y.is_graph_output() and y.shape is not None:
        node = uses[0].node
        nodes.append(node)
        if node.op_type == "Slice" and not node.domain and (found := _slice(node)) is not None:
            at, start, end = found
            if at == axis and start < end:
                return Cut(nodes, start, end)
            if (start, end) != (0, y.shape[at]):
                return None
        elif node.op_type != "Squeeze" or node.domain or not _is_last(node.inputs[1], len(y.shape)) or len(nodes) > 9:
            return None
        y = node.outputs[0]
    return None


def _slice(node: ir.Node) -> tuple[int, int, int] | None:
    """The axis, of known size, that a Slice is of, where it starts and where it ends; None of several, or with steps."""
    x, *given, steps = (*node.inputs, None, None)[:5]
    arrays = [constant_array(v) for v in given]
    if any(v is None or v.shape != (1,) for v in arrays) or (steps is not None and constant_array(steps) != 1):
        return None
    start, end, axis = (int(v[0]) for v in arrays)
    size = x.shape[axis]
    return (axis % len(x.shape), *slice(start, end).indices(size)[:2]) if isinstance(size, int) else None


def _is_last(axes: ir.Value | None, rank: int) -> bool:
    known = constant_array(axes)
    return known is not None and known.shape == (1,) and int(known[0]) % rank == rank - 1
