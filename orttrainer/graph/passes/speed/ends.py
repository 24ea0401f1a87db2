"""Zeros that surround a tensor, and parts of a tensor that nobody reads, as around Fourier transforms."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array, take_place


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


Places = dict[int, list[int]]  # of an axis, those that are read; an axis of which all are is not in it


def places_read(y: ir.Value, rank: int) -> Places:
    """What is read of `y` along its first `rank` axes, by Slices, behind which one more axis may have gone."""
    sizes = [] if y.shape is None else y.shape.dims[:rank]
    everything = {axis: set(range(size)) for axis, size in enumerate(sizes) if isinstance(size, int)}
    read: dict[int, set[int]] = {axis: set() for axis in everything}
    for use in y.uses():
        if _is_shape(use.node):
            continue
        found = _reader(use.node, y, rank)
        if found is None or y.is_graph_output():
            return {}
        inner = places_read(use.node.outputs[0], rank)
        for axis, places in everything.items():
            start, end = found.get(axis, (0, len(places)))
            read[axis].update(start + place for place in inner.get(axis, range(end - start)))
    return {axis: sorted(places) for axis, places in read.items() if places and places != everything[axis]}


def let_read(op: Builder, y: ir.Value, rank: int, places: Places) -> None:
    """`y` is to have these places alone: let its Slices take what they took. Those that would take all are left out."""
    if not places:
        return
    readers = [use.node for use in y.uses()]
    ranges_of = {node: _reader(node, y, rank) for node in readers if not _is_shape(node)}
    for node in readers:
        if node not in ranges_of:
            _put_shape(op, node)
    y.shape = ir.Shape([len(places[k]) if k in places else size for k, size in enumerate(y.shape.dims)])
    for node, ranges in ranges_of.items():
        out, left, whole = node.outputs[0], dict(places), False
        for axis, (start, end) in ranges.items():
            if axis in places:
                left[axis] = [place - start for place in places[axis] if start <= place < end]
                if len(left[axis]) == end - start:
                    del left[axis]
                first, last = (bisect.bisect_left(places[axis], place) for place in (start, end))
                node.replace_input_with(1, op.const([first], node.inputs[1].dtype))
                node.replace_input_with(2, op.const([last], node.inputs[2].dtype))
                whole = last - first == len(places[axis])
        let_read(op, out, rank, left)
        if whole and not out.is_graph_output():
            out.replace_all_uses_with(y)
            node.graph.remove(node, safe=True)


def _put_shape(op: Builder, node: ir.Node) -> None:
    """Let the sizes that are known take the place of a Shape."""
    y = node.inputs[0]
    sizes = [op.dim(y, axis) for axis in range(len(y.shape))]
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(sizes))
    take_place(op.Concat(*sizes[start:end], axis=0), node)


def _is_shape(node: ir.Node) -> bool:
    return node.op_type == "Shape" and not node.domain


def _reader(node: ir.Node, y: ir.Value, rank: int) -> dict[int, tuple[int, int]] | None:
    """Where the range starts and ends that `node` reads of `y`, by its axis; none of one behind the first `rank`."""
    if node.domain or node.graph is not y.producer().graph or node.inputs[0] is not y or y.shape is None:
        return None
    if node.op_type == "Slice" and (found := _slice(node)) is not None:
        axis, start, end = found
        return {} if axis >= rank else {axis: (start, end)} if start < end else None
    last = len(y.shape) - 1
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) in (last, -1) and last >= rank:
        return {} if node.inputs[1].shape == () else None
    return {} if node.op_type == "Squeeze" and last >= rank and _is_last(node.inputs[1], last + 1) else None


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
