"""Places that count from the front only, of which exports write Where(i < 0, NOWHERE, i)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.scopes import put_all_in_place

__all__ = ["NOWHERE", "PlacesFromFrontPass"]

NOWHERE = 2**31 - 1  # a place that no axis has

_WHOLE = {ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64}
_UNSIGNED = {ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64}
_COUNTS = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size"}
# By the inputs that have to be so for a result to be: all of them, the first, or these.
_LIKE_ALL = {"Add", "Concat", "Div", "Min", "Mul", "Sum"}
_LIKE_FIRST = {
    "Cast", "Compress", "CumSum", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "ReduceMax",
    "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
}  # fmt: skip
_LIKE = {"Mod": (1,), "Range": (0, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2), "Where": (1, 2)}


class PlacesFromFrontPass(ir.passes.InPlacePass):
    """Where(i < 0, NOWHERE, i) -> i, which is never negative; Where(i < 0, NOWHERE, i) -> Expand(Where(j < 0, NOWHERE, j)), of i = Expand(j).

    Args:
        asked: names of inputs of which every batch is asked before.
    """

    def __init__(self, asked: Collection[str]):
        super().__init__()
        self._asked = frozenset(asked)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        known: dict[ir.Value, bool] = {
            x: True for x in model.graph.inputs if x.name in self._asked and x.dtype in _WHOLE
        }
        checks = [node for node in model.graph if _is_check(node)]
        unneeded = [node for node in checks if _is_never_negative(node.inputs[2], known)]
        for node in unneeded:
            node.outputs[0].replace_all_uses_with(node.inputs[2])
        model.graph.remove(unneeded, safe=True)
        repeated = [node for node in checks if node not in unneeded and _is_expand(node.inputs[2].producer())]
        put_all_in_place(model, "from_front", repeated, _before_it_is_repeated)
        return ir.passes.PassResult(model, bool(unneeded or repeated))


def _is_check(node: ir.Node) -> bool:
    if node.op_type != "Where" or node.domain or node.outputs[0].is_graph_output():
        return False
    nowhere, less = constant_array(node.inputs[1]), node.inputs[0].producer()
    asks = less is not None and less.op_type == "Less" and less.inputs[0] is node.inputs[2]
    return asks and nowhere is not None and nowhere.size == 1 and int(nowhere.reshape(())) == NOWHERE


def _is_expand(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Expand" and not node.domain


def _before_it_is_repeated(op: Builder, node: ir.Node) -> ir.Value:
    x, sizes = node.inputs[2].producer().inputs
    number = x.dtype.numpy()
    return op.Expand(op.Where(op.Less(x, np.array(0, number)), np.array(NOWHERE, number), x), sizes)


def _is_never_negative(x: ir.Value, known: dict[ir.Value, bool]) -> bool:
    """Whether the whole numbers `x` are at least 0 in all batches; False where that is not seen.

    Args:
        known: of values the same; what is found is added.
    """
    waiting = [x]
    while waiting:
        value = waiting[-1]
        needed = [] if value in known else _needed(value)
        if needed is None or any(known.get(other) is False for other in needed):
            known[value] = False
        elif left := [other for other in needed if other not in known]:
            waiting += left
            continue
        known.setdefault(value, True)
        waiting.pop()
    return known[x]


def _needed(x: ir.Value) -> list[ir.Value] | None:
    """The values that have to be so for `x` to be so; None where nothing tells."""
    if x.dtype in _UNSIGNED:
        return []
    if (constant := constant_array(x)) is not None:
        return [] if (constant >= 0).all() else None
    node = x.producer()
    if node is None or node.domain or x.dtype not in _WHOLE:  # a Cast of NaN is negative
        return None
    if node.op_type in _COUNTS or (node.op_type in ("TopK", "Unique") and x is not node.outputs[0]):
        return []
    if node.op_type in ("Clip", "Max"):  # one that is so is enough
        bounds = node.inputs[1:2] if node.op_type == "Clip" else node.inputs
        arrays = [array for bound in bounds if (array := constant_array(bound)) is not None]
        return [] if any((array >= 0).all() for array in arrays) else None
    if node.op_type == "Mod" and node.attributes.get_int("fmod", 0):
        return None
    if node.op_type == "Cast" and x.dtype != ir.DataType.INT64 and node.inputs[0].dtype != ir.DataType.BOOL:
        return None  # of a longer number, it may be
    if _is_check(node):
        return []
    inputs = list(node.inputs)
    if node.op_type in _LIKE_FIRST:
        return inputs[:1]
    if node.op_type in _LIKE:
        return [inputs[k] for k in _LIKE[node.op_type]]
    return inputs if node.op_type in _LIKE_ALL else None
