"""How the state holds the weights of large convolutions: the channels of a tap side by side."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.scopes import copy_scope

STORED = (0, 2, 3, 1)  # the axes of a weight as they are stored
DECLARED = (0, 3, 1, 2)  # the axes of what is stored as the operator declares them


class ChannelsLastWeightPass(ir.passes.InPlacePass):
    """Conv(x, W) -> Conv(x, Transpose(S)), W [out, in, height, width], S [out, height, width, in]; ConvTranspose likewise.

    The gradient of a weight is made in the order of S (`differentiate/rules/convolution_weights.py`), and the products and
    blocks that convolutions become read that order as well or better. To bring 512 x 512 x 3 x 3 weights into the other takes
    3 ms, more where the memory is busy.

    Args:
        parameters: names of graph inputs that may be stored so.

    Attributes:
        stored: name of each weight whose input is S now -> None, as of `WideLinearLayoutPass` without a bias.
    """

    axes: ClassVar[tuple[int, ...]] = DECLARED

    LARGE = 1 << 12  # elements of W
    CHANNELS = 16  # on both sides a multiple of this: they fill blocks, for which the forms are that gain

    def __init__(self, parameters: Collection[str]):
        super().__init__()
        self._parameters = frozenset(parameters)
        self.stored: dict[str, None] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        op = Builder(model.graph, "layout")
        for weight in [value for value in model.graph.inputs if self._fits(value)]:
            uses = list(weight.uses())
            weight.shape = ir.Shape([weight.shape[axis] for axis in STORED])
            declared = op.Transpose(weight, perm=list(DECLARED))
            copy_scope(uses[0].node, declared.producer())
            for reader, index in uses:
                reader.replace_input_with(index, declared)
            self.stored[weight.name] = None
        if self.stored:
            common.TopologicalSortPass()(model)
        return ir.passes.PassResult(model, bool(self.stored))

    def _fits(self, weight: ir.Value) -> bool:
        dims = static_dims(weight)
        if weight.name not in self._parameters or weight.dtype != ir.DataType.FLOAT or dims is None or len(dims) != 4:
            return False
        if math.prod(dims) < self.LARGE or dims[2] * dims[3] == 1 or any(size % self.CHANNELS for size in dims[:2]):
            return False
        uses = weight.uses()
        return bool(uses) and not weight.is_graph_output() and all(_convolves(weight, *use) for use in uses)


def _convolves(weight: ir.Value, reader: ir.Node, index: int) -> bool:
    """Whether a node is a convolution in one group by the weight, in the weight's graph."""
    kind = reader.op_type in ("Conv", "ConvTranspose") and not reader.domain and index == 1
    return kind and reader.attributes.get_int("group", 1) == 1 and reader.graph is weight.graph


def channels_last(w: ir.Value) -> ir.Value | None:
    """What `w` [out, in, height, width] is a transpose of, [out, height, width, in]; None where it is none."""
    node = w.producer()
    turned = node is not None and node.op_type == "Transpose" and not node.domain
    return node.inputs[0] if turned and tuple(node.attributes.get_ints("perm", ())) == DECLARED else None
