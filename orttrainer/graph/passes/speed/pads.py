"""Sums of what a Pad surrounds with zeros."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array, same_shape
from orttrainer.graph.passes.counter_hash import replace
from orttrainer.graph.rows import origin_of_rows


class Part(NamedTuple):
    """What a Pad surrounds with zeros along one axis: `source` goes from `start` to `end` there, `dims` are the sizes of the whole."""

    source: ir.Value
    axis: int
    start: int
    end: int
    dims: tuple[int | str, ...]


class JoinPadsPass(ir.passes.InPlacePass):
    """Add(Add(Pad(a), Pad(b)), Pad(c)) -> Concat(a, b, c), where the zeros of each are where the others are.

    This is the gradient of a value that is read in slices, as the weights of a recurrent layer are, whose gates torch
    has in another order than ONNX. Each sum of two reads and writes the whole; the Concat writes it once. It is x
    itself where a, b, c are slices of x in the order of x.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op = Builder(graph, "joined")
        modified = False
        for node in list(graph):
            if node.op_type != "Add" or node.domain or _is_inner(node.outputs[0]):
                continue
            parts = [_part(value) for value in _terms(node)]
            if None in parts or len({(part.axis, part.dims) for part in parts}) != 1:
                continue
            parts.sort(key=lambda part: part.start)
            ends = [0, *(part.end for part in parts)]
            if ends[:-1] == [part.start for part in parts] and ends[-1] == parts[0].dims[parts[0].axis]:
                old, axis = node.outputs[0], parts[0].axis
                joined = op.Concat(*(part.source for part in parts), axis=axis)
                if axis == 0 and (whole := _whole(joined)) is not None:
                    graph.remove(joined.producer(), safe=True)
                    joined = op.Identity(whole)  # no copy: ONNX Runtime removes it, and x keeps its name
                joined.type, joined.shape = old.type, old.shape
                replace(old, joined)
                graph.remove(node, safe=True)
                modified = True
        if modified:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, modified)


def _whole(x: ir.Value) -> ir.Value | None:
    """The value that `x` is put together again from, if it is one."""
    rows = origin_of_rows(x)
    if len(rows) != 1 or rows[0].source is x or rows[0].start or not same_shape(rows[0].source, x):
        return None
    return rows[0].source


def _terms(node: ir.Node) -> list[ir.Value]:
    """What a chain of Add adds."""
    terms: list[ir.Value] = []
    for x in node.inputs:
        terms += _terms(x.producer()) if _is_inner(x) else [x]
    return terms


def _is_inner(x: ir.Value) -> bool:
    """Whether `x` is a sum that only another sum reads."""
    node, uses = x.producer(), list(x.uses())
    return (
        node is not None and _is_add(node) and not x.is_graph_output() and len(uses) == 1 and _is_add(uses[0].node)
        and uses[0].node.graph is node.graph
    )  # fmt: skip


def _is_add(node: ir.Node) -> bool:
    return node.op_type == "Add" and not node.domain


def _part(x: ir.Value) -> Part | None:
    node = x.producer()
    if (
        node is None
        or node.op_type != "Pad"
        or node.domain
        or node.attributes.get_string("mode", "constant") != "constant"
    ):
        return None
    source, pads, fill, axes = (*node.inputs, None, None)[:4]
    widths = constant_array(pads)
    if source.shape is None or widths is None or fill is not None:
        return None
    dims = tuple(size if isinstance(size, int) else size.value for size in source.shape.dims)
    places = np.arange(len(dims)) if axes is None else constant_array(axes)
    if places is None:
        return None
    before, after = widths.reshape(2, -1)
    wide = np.flatnonzero(before | after)
    if len(wide) != 1 or before[wide[0]] < 0 or after[wide[0]] < 0:
        return None
    axis, start = int(places[wide[0]]) % len(dims), int(before[wide[0]])
    if None in dims or not isinstance(dims[axis], int):
        return None
    end = start + dims[axis]
    whole = (*dims[:axis], end + int(after[wide[0]]), *dims[axis + 1 :])
    return Part(source, axis, start, end, whole)
