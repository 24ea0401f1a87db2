"""Convolutions in one axis, as those of images of one row."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc_nodes import int64s
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.scopes import copy_scope

ROW = 2  # the axis that has one row
CONVOLUTIONS = {"Conv", "ConvTranspose"}
POOLS = {"AveragePool", "MaxPool"}
ELEMENTWISE = {
    "Abs", "Add", "Clip", "Div", "Elu", "Erf", "Exp", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "Neg", "Pow", "PRelu", "Relu",
    "Selu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh",
}  # fmt: skip
# What an attribute is along the row's axis.
NEUTRAL = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}


class OneAxisPass(ir.passes.InPlacePass):
    """Conv(x [batch, channels, length]) -> Squeeze(Conv(Unsqueeze(x, 2), Unsqueeze(w, 2)), 2); ConvTranspose likewise.

    All that is known of images is for these then: blocks of channels, the forms of the gradients, products of the pixels of
    all images. What lies between two such convolutions, BatchNormalization, pooling and elementwise operators, works on
    images of one row too, so that nothing stands between. Of float32. For a graph that is to be differentiated.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        if not any(_is_convolution(node) for node in graph):
            return ir.passes.PassResult(model, modified=False)
        rows = _Rows(Builder(graph, "row"))
        for node in list(graph):
            if rows.may_take(node):
                rows.take(node)
        graph.sort()  # the builder appends
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)


class _Rows:
    """A graph while its operators move to images of one row.

    Attributes:
        images: value [batch, channels, length] -> the same with the axis of the row.
    """

    def __init__(self, op: Builder):
        self.op, self.images = op, {}

    def may_take(self, node: ir.Node) -> bool:
        """Whether this is a convolution in one axis, or what can work on what there is as images."""
        if _is_convolution(node):
            return True
        x = node.inputs[0] if node.inputs else None
        if node.domain or node.outputs[0].shape is None or len(node.outputs[0].shape) != 3:
            return False
        if node.op_type == "BatchNormalization":
            return x in self.images
        if node.op_type in POOLS:
            return x in self.images and len(node.outputs) == 1
        tensors = [v for v in node.inputs if v is not None]
        known = all(v.shape is not None for v in tensors)
        return node.op_type in ELEMENTWISE and known and any(v in self.images for v in tensors)

    def take(self, node: ir.Node) -> None:
        """Let a node read and make images of one row."""
        op, y = self.op, node.outputs[0]
        everything = node.op_type in ELEMENTWISE
        operands = 2 if node.op_type in CONVOLUTIONS else len(node.inputs) if everything else 1
        with op.scope(node.name):
            for index, x in enumerate(node.inputs[:operands]):
                if x is not None and len(x.shape) > 1:  # what has fewer axes is repeated along the last one
                    node.replace_input_with(index, self._image(x, node))
        for name, value in NEUTRAL.items():
            if name in node.attributes:
                node.attributes[name] = ir.AttrInt64s(name, [value, *node.attributes.get_ints(name)])
        if "pads" in node.attributes:
            begin, end = node.attributes.get_ints("pads")
            node.attributes["pads"] = ir.AttrInt64s("pads", [0, begin, 0, end])
        self._flatten(node, y)

    def _image(self, x: ir.Value, node: ir.Node) -> ir.Value:
        """`x` with an axis before the last."""
        if x not in self.images:
            image = self.images[x] = self.op.Unsqueeze(x, int64s(len(x.shape) - 1))
            copy_scope(node, image.producer())
        return self.images[x]

    def _flatten(self, node: ir.Node, y: ir.Value) -> None:
        """Let all others read what `node` makes without the axis."""
        shape, y.shape = y.shape, ir.Shape([*y.shape.dims[:ROW], 1, y.shape.dims[ROW]])
        flat = self.op.Squeeze(y, int64s(ROW))
        copy_scope(node, flat.producer())
        flat.shape, flat.type = shape, y.type
        y.replace_all_uses_with(flat, replace_graph_outputs=True)
        flat.producer().replace_input_with(0, y)
        flat.name, y.name = y.name, f"{y.name}/row"
        self.images[flat] = y


def _is_convolution(node: ir.Node) -> bool:
    if node.op_type not in CONVOLUTIONS or node.domain or "output_shape" in node.attributes:
        return False
    values = (*node.inputs[:2], node.outputs[0])
    return all(v.shape is not None and len(v.shape) == 3 for v in values) and values[0].dtype == ir.DataType.FLOAT
