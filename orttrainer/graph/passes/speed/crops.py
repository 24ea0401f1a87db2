"""Images that are cut as soon as a convolution has made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import constant_array, static_dims
from orttrainer.graph.passes.speed.nchwc_nodes import ints

TO_THE_END = 2**31 - 1  # an end from which on a Slice cuts nothing off an image of any size


class CropIntoPadsPass(ir.passes.InPlacePass):
    """Slice(ConvTranspose(x, w), begin, end) -> ConvTranspose(x, w, pads=[begin, end]), along the axes of the images.

    That is the gradient of a Conv with more zeros on one side, as causal ones have. Of a Conv without strides, whose end
    is cut where it would look ahead: Slice(Conv(x, w, pads), begin, end) -> Conv(x, w, pads - [begin, end]).

    Args:
        op_type: "Conv" or "ConvTranspose". CUDA has no ConvTranspose whose pads differ.
    """

    def __init__(self, op_type: str):
        super().__init__()
        self._op_type = op_type

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in [node for node in graph if node.op_type == "Slice" and not node.domain]:
            convolution, (y,) = node.inputs[0].producer(), node.outputs
            pads = self._pads(node, convolution)
            if pads is None:
                continue
            whole = convolution.outputs[0]
            convolution.attributes["pads"] = ir.AttrInt64s("pads", pads)
            y.replace_all_uses_with(whole, replace_graph_outputs=True)
            graph.remove(node, safe=True)
            whole.name, whole.shape = y.name, y.shape
            modified = True
        return ir.passes.PassResult(model, modified)

    def _pads(self, node: ir.Node, convolution: ir.Node | None) -> list[int] | None:
        """What the convolution is to have, that the Slice cuts nothing."""
        if convolution is None or convolution.op_type != self._op_type or convolution.domain:
            return None
        whole = convolution.outputs[0]
        if convolution.graph is not node.graph or whole.is_graph_output() or len(list(whole.uses())) > 1:
            return None
        automatic = convolution.attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
        if automatic or "output_shape" in convolution.attributes:
            return None
        cut = _cut(node)
        if cut is None or not _leaves_something(convolution, node.outputs[0], cut):
            return None
        pads = ints(convolution, "pads", 0, len(cut))
        if self._op_type == "ConvTranspose":
            return [p + c for p, c in zip(pads, cut)]
        fewer = [p - c for p, c in zip(pads, cut)]
        return fewer if min(fewer) >= 0 and max(ints(convolution, "strides", 1, len(cut) // 2)) == 1 else None


def _cut(node: ir.Node) -> list[int] | None:
    """How much a Slice cuts off images, before and behind them along all of their axes; None where it is not known."""
    x, *given = node.inputs
    if x.shape is None or len(x.shape) < 3 or len(given) < 2:
        return None
    starts, ends, axes, steps = [constant_array(v) for v in (*given, None, None)[:4]]
    unknown = any(v is not None and array is None for v, array in zip(given, (starts, ends, axes, steps)))
    if unknown or (steps is not None and (steps != 1).any()):
        return None
    rank = len(x.shape)
    axes = np.arange(rank) if axes is None else axes % rank
    before, behind = [0] * rank, [0] * rank
    for axis, start, end in zip(axes.tolist(), starts.tolist(), ends.tolist()):
        off = _off(x.shape, axis, end)
        if start < 0 or off is None or (axis < 2 and (start or off)):
            return None
        before[axis], behind[axis] = start, off
    return [*before[2:], *behind[2:]]


def _leaves_something(convolution: ir.Node, y: ir.Value, cut: Sequence[int]) -> bool:
    """Whether images of one pixel and more are not cut to nothing, which a Slice may leave, but no convolution."""
    weights, axes = static_dims(convolution.inputs[1]), len(cut) // 2
    if weights is None or y.shape is None:
        return False
    sign = 1 if convolution.op_type == "ConvTranspose" else -1
    pads, room = ints(convolution, "pads", 0, 2 * axes), ints(convolution, "output_padding", 0, axes)
    dilations = ints(convolution, "dilations", 1, axes)
    for axis, size in enumerate(y.shape[2:]):
        off, reach = sum(cut[axis::axes]), (weights[2 + axis] - 1) * dilations[axis]
        left = size if isinstance(size, int) else 1 + sign * (reach - sum(pads[axis::axes])) + room[axis] - off
        if off and left < 1:
            return False
    return True


def _off(shape: Sequence, axis: int, end: int) -> int | None:
    if end < 0:
        return -end
    if end >= TO_THE_END:
        return 0
    return max(0, shape[axis] - end) if isinstance(shape[axis], int) else None
