"""Operators on some axes that ONNX Runtime gets wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.no_axes import REDUCTIONS


class AllAxesPass(ir.passes.InPlacePass):
    """Pad(x, pads, value, axes) -> Pad(x, pads of all axes, value); likewise for the axes of Resize.

    ONNX Runtime moves a Transpose from before such a node to behind it, and then permutes the pads, scales or sizes as
    if there were one for each axis (seen in 1.31.1): wrong numbers, or an index out of range. Where the rank of x is
    unknown the node stays as it is. Where Resize keeps the ratio of some axes they stay some, counted from the first: of
    those that are counted from the last ONNX Runtime resizes none (seen in 1.31.1).

    ReduceSum(x, axes) and its like: axes are counted from the first where x may be empty. Of such an x ONNX Runtime
    gives the shape unreduced where they are counted from the last (seen in 1.31.1).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if node.op_type in _REWRITES and not node.domain]
        nodes = [node for node in nodes if node.inputs[0] is not None and node.inputs[0].shape is not None]
        op = _Complete(Builder(model.graph, "axes")) if nodes else None
        return ir.passes.PassResult(model, any([_REWRITES[node.op_type](op, node) for node in nodes]))


class _Complete:
    """Makes one number for each axis out of one for some axes."""

    def __init__(self, builder: Builder):
        self.constant, self._new_name = builder.const, builder.new_name

    def __call__(self, node: ir.Node, index: int, base: np.ndarray | None, places: ir.Value | np.ndarray) -> None:
        """Write input `index` of `node` into `base` (None: the shape of x) at `places`."""
        given = node.inputs[index]
        array = None if given.is_graph_input() or given.const_value is None else given.const_value.numpy()
        if base is not None and array is not None and isinstance(places, np.ndarray):
            base = base.astype(array.dtype)
            base[places] = array
            node.replace_input_with(index, self.constant(base))
            return
        start = self.add(node, "Shape", node.inputs[0]) if base is None else self.constant(base, given.dtype)
        places = self.constant(places) if isinstance(places, np.ndarray) else places
        node.replace_input_with(index, self.add(node, "ScatterElements", start, places, given))

    def add(self, before: ir.Node, op_type: str, *inputs: ir.Value, dtype=None, **attributes) -> ir.Value:
        new = ir.node(op_type, inputs, attributes, name=self._new_name(op_type))
        new.outputs[0].name = new.name  # else a body numbers it by itself, as the graph around it does
        before.graph.insert_before(before, new)
        new.outputs[0].type = ir.TensorType(dtype or (ir.DataType.INT64 if op_type == "Shape" else inputs[0].dtype))
        return new.outputs[0]


def _pad(op: _Complete, node: ir.Node) -> bool:
    axes = node.inputs[3] if len(node.inputs) > 3 else None
    if axes is None:
        return False
    rank = len(node.inputs[0].shape)
    if axes.const_value is not None and not axes.is_graph_input():
        front = axes.const_value.numpy().astype(np.int64) % rank
        places = np.concatenate([front, front + rank])
    else:
        front = op.add(node, "Mod", op.add(node, "Cast", axes, dtype=ir.DataType.INT64, to=7), op.constant([rank]))
        places = op.add(node, "Concat", front, op.add(node, "Add", front, op.constant([rank])), axis=0)
    op(node, 1, np.zeros(2 * rank, np.int64), places)
    node.resize_inputs(2 if node.inputs[2] is None else 3)  # ONNX's evaluator takes no names that are empty
    return True


def _resize(op: _Complete, node: ir.Node) -> bool:
    axes = _axes(node)
    if axes is None:
        return False
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        counted = list(node.attributes.get_ints("axes")) == list(axes)
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.tolist())
        return not counted
    rank = len(node.inputs[0].shape)
    if _has(node, 1):
        op(node, 1, np.repeat(np.float32([0, 1]), rank), np.concatenate([axes, axes + rank]))
    if _has(node, 2):
        op(node, 2, np.ones(rank, np.float32), axes)
    if _has(node, 3):
        op(node, 3, None, axes)
    del node.attributes["axes"]
    return True


def _reduce(op: _Complete, node: ir.Node) -> bool:
    axes, shape = node.inputs[1] if len(node.inputs) > 1 else None, node.inputs[0].shape
    if axes is None or axes.const_value is None or axes.is_graph_input() or (shape.is_static() and 0 not in shape):
        return False
    places = axes.const_value.numpy()
    if not (places < 0).any():
        return False
    node.replace_input_with(1, op.constant(places % len(shape)))
    return True


def _axes(node: ir.Node) -> np.ndarray | None:
    axes: Sequence[int] | None = node.attributes.get_ints("axes")
    return None if axes is None else np.array(axes, np.int64) % len(node.inputs[0].shape)


def _has(node: ir.Node, index: int) -> bool:
    x = node.inputs[index] if index < len(node.inputs) else None
    return x is not None and not (x.shape is not None and x.shape == (0,))


_REWRITES = {"Pad": _pad, "Resize": _resize, **dict.fromkeys(REDUCTIONS, _reduce)}
