"""The order of a value's rows: where they come from, through Slice, Split, Concat and an axis put on and off."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import constant_array


class Rows(NamedTuple):
    """Slices `start` to `end` of `source`, along its first axis."""

    source: ir.Value
    start: int
    end: int


def origin_of_rows(x: ir.Value, start: int = 0, end: int | None = None) -> list[Rows]:
    """What `x`, or its slices `start` to `end`, are put together from, along the first axis; `x` itself where nothing is known."""
    size = x.shape[0] if x.shape else None
    return _merged(_rows(x, start, size if end is None else end)) if isinstance(size, int) else []


def _rows(x: ir.Value, start: int, end: int) -> list[Rows]:
    """The origin of slices `start` to `end` of `x`."""
    node, here = x.producer(), [Rows(x, start, end)]
    if node is None or node.domain or start == end:
        return here
    if node.op_type == "Concat" and node.attributes.get_int("axis", 1) == 0:
        found, first = [], 0
        for part in node.inputs:
            size = part.shape[0] if part.shape else None
            if not isinstance(size, int):
                return here
            low, high = max(start - first, 0), min(end - first, size)
            found += _rows(part, low, high) if low < high else []
            first += size
        return found
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) == 0:
        sizes = [y.shape[0] if y.shape else None for y in node.outputs]
        if not all(isinstance(size, int) for size in sizes):
            return here
        first = sum(sizes[: node.outputs.index(x)])
        return _rows(node.inputs[0], first + start, first + end)
    if node.op_type == "Slice":
        first = _first_of_slice(node)
        return here if first is None else _rows(node.inputs[0], first + start, first + end)
    if node.op_type == "Squeeze" and (axes := _axes(node)) is not None:
        one = _rows(node.inputs[0], 0, 1) if axes == [0] else [Rows(node.inputs[0], 0, 1)]
        inner = one[0].source.producer()
        if inner is not None and inner.op_type == "Unsqueeze" and axes == _axes(inner):
            return _rows(inner.inputs[0], start, end)
    return here


def _merged(rows: list[Rows]) -> list[Rows]:
    merged: list[Rows] = []
    for part in rows:
        if merged and merged[-1].source is part.source and merged[-1].end == part.start:
            part = Rows(part.source, merged.pop().start, part.end)
        merged.append(part)
    return merged


def _first_of_slice(node: ir.Node) -> int | None:
    """Where a Slice of the first axis alone starts, in steps of 1."""
    x, starts, ends, axes, steps = (*node.inputs, None, None)[:5]
    size = x.shape[0] if x.shape else None
    given = [constant_array(v) for v in (starts, ends, axes)]
    if not isinstance(size, int) or any(v is None or v.shape != (1,) for v in given) or given[2][0] != 0:
        return None
    if steps is not None and (constant_array(steps) is None or np.any(constant_array(steps) != 1)):
        return None
    start = int(given[0][0])
    return min(max(start + size, 0) if start < 0 else start, size)


def _axes(node: ir.Node) -> list[int] | None:
    axes = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else axes.tolist()
