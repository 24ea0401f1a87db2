"""What lies between convolutions in blocks of channels, computed in blocks: BatchNormalization and elementwise operators.

A blocked tensor has the shape of the plain one and holds the same elements in another order. An operator that works
element by element does not see the difference. A vector of channels cannot be broadcast to it, but a depthwise 1 x 1
`Conv` of the domain `com.microsoft.nchwc` multiplies by one, adds another and applies Relu in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_shape, static_dims
from orttrainer.graph.passes.batch_norm import switched
from orttrainer.graph.passes.counter_hash import replace
from orttrainer.graph.passes.speed.nchwc import is_depthwise
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, is_reordering, scaled
from orttrainer.graph.passes.speed.nchwc_products import Products, over_pixels
from orttrainer.graph.passes.speed.nchwc_strided import (
    Interleaved,
    added,
    is_pointwise,
    is_subsampling,
    joined,
    phases,
    pointwise,
    subsampled,
    transposed,
)
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.subgraphs import subgraphs

CHANNELS_LAST = (0, 2, 3, 1)
ELEMENTWISE = {
    "Abs", "Add", "Clip", "Div", "Erf", "Exp", "HardSigmoid", "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Relu",
    "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh",
}  # fmt: skip
BY_CHANNEL = {"Add", "Mul", "Sub"}  # what a depthwise convolution can do with a vector of channels
SAME_VECTOR = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}


class StayInBlocksPass(ir.passes.InPlacePass):
    """ReorderInput(f(ReorderOutput(x))) -> f(x), for operators f that can work in blocks of channels.

    They are elementwise operators, with tensors, scalars and vectors of channels; sums over all but the channels; and
    the BatchNormalization of a training step. That becomes its parts: the mean; x - mean, which its gradient reads as
    well; the mean of the squares; a scale and an offset. To come after `BlockedConvolutionPass`, on the graph of a
    session that is only run with `training_mode`.

    Args:
        block: how many channels make a block.
        sizes: of symbolic dimensions, in the batch at hand; others work as well, if less fast.
    """

    def __init__(self, block: int, sizes: Mapping[str, int] | None = None):
        self.block, self.sizes = block, sizes or {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        region = _Region(model.graph, self.block, self.sizes)
        if not region.wanted:
            return ir.passes.PassResult(model, modified=False)
        for node in list(model.graph):
            with region.op.scope(node.name):
                region.convert(node)
        model.graph.sort()
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)


class Scaled(NamedTuple):
    """`x` * `factor` + `offset`; None leaves one out."""

    x: ir.Value
    factor: ir.Value | None
    offset: ir.Value | None


class _Region:
    """One graph while its operators move into blocks.

    Attributes:
        blocked: plain value -> the same in blocks, from which it is made.
        reordered: plain value -> the same in blocks, which is made from it.
        wanted: values that are read in blocks if all operators that can do so work in blocks.
        welcome: values that are read in the plain order, but only to be copied.
        scaled: value in blocks -> what it is, if a depthwise convolution made it.
        centered: (value in blocks, its mean) -> the difference.
        apart: plain value -> its parts, if it was joined of such.
    """

    def __init__(self, graph: ir.Graph, block: int, sizes: Mapping[str, int]):
        self.op, self.block = Builder(graph, "blocks"), block
        self.products = Products(self.op, block, sizes)
        self.blocked: dict[ir.Value, ir.Value] = {}
        self.reordered: dict[ir.Value, ir.Value] = {}
        self.wanted: set[ir.Value] = set()
        self.welcome: set[ir.Value] = set()
        self.scaled: dict[ir.Value, Scaled] = {}
        self.centered: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        self.apart: dict[ir.Value, Interleaved] = {}
        for node in reversed(list(graph)):
            if is_reordering(node, "ReorderOutput") and self._fills_blocks(node.outputs[0]):
                self.blocked[node.outputs[0]] = node.inputs[0]
            elif is_reordering(node, "ReorderInput"):
                self.reordered[node.inputs[0]] = node.outputs[0]
                self.wanted.add(node.inputs[0])
            elif self._reduced(node) is not None or self._subsamples(node):
                self.wanted.add(node.inputs[0])
            elif node.op_type == "Transpose" and self._fills_blocks(node.inputs[0]):
                self.welcome.add(node.inputs[0])
            elif self._fits(node):
                if self._gains(node):
                    self.wanted.update(self._tensors(node))
                for values in (self.wanted, self.welcome):
                    if node.outputs[0] in values:
                        values.update(self._tensors(node))

    def convert(self, node: ir.Node) -> None:
        """Let `node` work in blocks if it can, and a tensor that it reads is in blocks, and one that it makes is read so."""
        x = node.inputs[0] if node.inputs else None
        if is_reordering(node, "ReorderInput"):
            if x in self.blocked:
                _replace(node, self.blocked[x])
        elif node.op_type == "Transpose" and x in self.blocked:
            if tuple(node.attributes.get_ints("perm", ())) == CHANNELS_LAST:
                _replace(node, self._reorder_output(self.blocked[x], node.outputs[0], channels_last=1))
        elif x in self.blocked and (over := self._reduced(node)) is not None:
            reduced = self._over_pixels(node, self.blocked[x], over_batch=0 in over)
            _replace(node, self.op.Unsqueeze(reduced, over) if node.attributes.get_int("keepdims", 1) else reduced)
        elif x in self.blocked and self._subsamples(node):
            self._made(node, subsampled(self.op, node, self.blocked[x]))
        elif node.op_type in ("Shape", "Size") and x in self.blocked:
            node.replace_input_with(0, self.blocked[x])
        elif self._fits(node) and self._pays(node):
            if node.op_type == "If":
                self._normalize(node)
            elif node.op_type == "Conv":
                self._made(node, pointwise(self.op, node, self._in_blocks(x), self.block))
            elif node.op_type == "ConvTranspose":
                self._join(node, transposed(self.op, node, phases(node), self._in_blocks(x), self.block))
            elif node.op_type == "Add" and (image := self._added(node)) is not None:
                self._join(node, image)
            else:
                self._made(node, self._elementwise(node))

    def _pays(self, node: ir.Node) -> bool:
        """Whether not more tensors are reordered if `node` works in blocks, or that is worth it."""
        if self._gains(node):
            return True
        y, there = node.outputs[0], [x in self.blocked for x in self._tensors(node)]
        if all(there):
            return y in self.wanted or y in self.welcome
        return y in self.wanted and any(there) and not any(use.node.op_type == "Transpose" for use in y.uses())

    @staticmethod
    def _gains(node: ir.Node) -> bool:
        """Whether `node` is faster in blocks even if all that it reads and makes is reordered."""
        return node.op_type == "ConvTranspose" and not is_depthwise(node)

    # -- which operators --------------------------------------------------------------------

    def _fits(self, node: ir.Node) -> bool:
        """Whether `node` can work in blocks."""
        if node.domain or not node.outputs or not self._fills_blocks(node.outputs[0]):
            return False
        if node.op_type == "If":
            return switched(node) is not None and node.graph is self.op.graph
        if node.op_type in ("Conv", "ConvTranspose"):
            return self._fills_blocks(node.inputs[0]) and (is_pointwise(node) or phases(node) is not None)
        if node.op_type not in ELEMENTWISE:
            return False
        if None in node.inputs:
            return False
        kinds = [self._kind(x, node.outputs[0]) for x in node.inputs]
        if None in kinds or "tensor" not in kinds or any(x.dtype != ir.DataType.FLOAT for x in node.inputs):
            return False
        return "channels" not in kinds or (node.op_type in BY_CHANNEL and len(kinds) == 2)

    def _reduced(self, node: ir.Node) -> list[int] | None:
        """The axes of a sum or mean over the pixels, or over these and the batch."""
        if node.domain or node.op_type not in ("ReduceSum", "ReduceMean") or not self._fills_blocks(node.inputs[0]):
            return None
        axes = self.op.constant_value(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
        over = [] if axes is None else sorted(int(axis) % 4 for axis in axes)
        return over if over in ([2, 3], [0, 2, 3]) else None

    def _subsamples(self, node: ir.Node) -> bool:
        return is_subsampling(node) and self._fills_blocks(node.inputs[0])

    def _fills_blocks(self, x: ir.Value) -> bool:
        if x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) != 4:
            return False
        return isinstance(x.shape[1], int) and x.shape[1] % self.block == 0

    @staticmethod
    def _kind(x: ir.Value, y: ir.Value) -> str | None:
        """How x is broadcast to y."""
        if same_shape(x, y):
            return "tensor"
        dims = static_dims(x)
        if dims is not None and len(dims) <= 4 and np.prod(dims) == 1:
            return "scalar"
        return "channels" if dims in ((y.shape[1], 1, 1), (1, y.shape[1], 1, 1)) else None

    def _tensors(self, node: ir.Node) -> list[ir.Value]:
        """The inputs that have the shape of the result, or are the images of a convolution."""
        if node.op_type in ("Conv", "ConvTranspose"):
            return [node.inputs[0]]
        inputs = switched(node).inputs[:1] if node.op_type == "If" else node.inputs
        return [x for x in inputs if self._kind(x, node.outputs[0]) == "tensor"]

    # -- their forms in blocks --------------------------------------------------------------

    def _elementwise(self, node: ir.Node) -> ir.Value:
        (y,) = node.outputs
        kinds = [self._kind(x, y) for x in node.inputs]
        if "channels" in kinds:
            at = kinds.index("channels")
            return self._by_channel(node, node.inputs[1 - at], node.inputs[at])
        if node.op_type == "Relu" and (before := self._alone(node)) is not None:
            return self._scale(before, y, activation="Relu")
        inputs = [self._in_blocks(x) if kind == "tensor" else x for x, kind in zip(node.inputs, kinds)]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        return self.op.node(node.op_type, *inputs, like=y, **attributes)

    def _by_channel(self, node: ir.Node, x: ir.Value, vector: ir.Value) -> ir.Value:
        """An operator of a tensor and a vector of channels."""
        op, y, tensor = self.op, node.outputs[0], self._in_blocks(x)
        if node.op_type == "Mul":
            return self._scale(Scaled(tensor, vector, None), y)
        if node.op_type == "Sub" and node.inputs[0] is vector:
            return self._scale(Scaled(tensor, op.const(np.full(x.shape[1], -1, np.float32)), vector), y)
        if node.op_type == "Sub":
            if (tensor, _source(vector)) in self.centered:
                return self.centered[tensor, _source(vector)]
            vector = op.Neg(vector)
        before = self._alone(node)
        if before is not None and before.offset is None:
            return self._scale(before._replace(offset=vector), y)
        return self._scale(Scaled(tensor, None, vector), y)

    def _alone(self, node: ir.Node) -> Scaled | None:
        """What the tensor is that `node` reads, if a depthwise convolution made it and nothing else reads it."""
        (x,) = self._tensors(node)
        tensor = self.blocked.get(x)
        alone = tensor is not None and len(x.uses()) == 1 == len(tensor.uses()) and not x.is_graph_output()
        return self.scaled.get(tensor) if alone else None

    def _normalize(self, node: ir.Node) -> None:
        """BatchNormalization by the moments of the batch, which are results of their own."""
        op, norm = self.op, switched(node)
        x, gain, bias = norm.inputs[:3]
        y = node.outputs[0]
        tensor = self._in_blocks(x)
        new_mean = over_pixels(op, "ReduceMean", tensor, self.block, over_batch=True)
        centered = self._scale(Scaled(tensor, None, op.Neg(new_mean)), y)
        new_var = self.products.sum("ReduceMean", centered, centered, over_batch=True)
        deviation = op.Sqrt(op.Add(new_var, norm.attributes.get_float("epsilon", 1e-5)))
        self.centered[tensor, new_mean] = centered
        result = self._scale(Scaled(centered, op.Div(gain, deviation), bias), y)
        self._made(node, result, new_mean, new_var)

    def _over_pixels(self, node: ir.Node, tensor: ir.Value, over_batch: bool) -> ir.Value:
        """What `node`, a sum or mean, gives; of a product that nothing else reads, without that product."""
        (x, *_), product = node.inputs, tensor.producer()
        alone = len(tensor.uses()) == 1 and all(self._reduced(use.node) is not None for use in x.uses())
        if alone and product.op_type == "Mul" and not product.domain and same_shape(*product.inputs):
            return self.products.sum(node.op_type, *product.inputs, over_batch)
        return over_pixels(self.op, node.op_type, tensor, self.block, over_batch)

    def _scale(self, what: Scaled, y: ir.Value, activation: str | None = None) -> ir.Value:
        """x * factor + offset in one pass over memory."""
        result = scaled(self.op, *what, activation)
        result.shape = y.shape
        if activation is None:
            self.scaled[result] = what
        return result

    def _added(self, node: ir.Node) -> Interleaved | None:
        """The sum of two images whose positions lie apart, if these are the operands."""
        a, b = (self.apart.get(x) for x in node.inputs)
        return added(self.op, a, b) if a is not None and b is not None and a.strides == b.strides else None

    def _join(self, node: ir.Node, image: Interleaved) -> None:
        tensor = joined(self.op, image, node.outputs[0], self.block)
        self.apart[self._made(node, tensor)] = image

    # -- between blocks and the plain order -------------------------------------------------

    def _in_blocks(self, x: ir.Value) -> ir.Value:
        if x in self.blocked:
            return self.blocked[x]
        if x not in self.reordered:
            self.reordered[x] = self.op.node("ReorderInput", x, domain=DOMAIN, like=x)
        return self.reordered[x]

    def _reorder_output(self, tensor: ir.Value, like: ir.Value, **attributes) -> ir.Value:
        return self.op.node("ReorderOutput", tensor, domain=DOMAIN, like=like, channels=tensor.shape[1], **attributes)

    def _made(self, node: ir.Node, tensor: ir.Value, *others: ir.Value) -> ir.Value:
        """`tensor` is the first result of `node`, in blocks; the same in the plain order, for who needs it."""
        plain = self._reorder_output(tensor, node.outputs[0])
        self.blocked[plain] = tensor
        _replace(node, plain, *others)
        return plain


def _source(vector: ir.Value) -> ir.Value:
    """The value that `vector` is with other axes of size 1."""
    while (node := vector.producer()) is not None and not node.domain and node.op_type in SAME_VECTOR:
        vector = node.inputs[0]
    return vector


def _replace(node: ir.Node, *values: ir.Value) -> None:
    """Put `values` in the place of the results of `node`, and remove it."""
    for old, new in zip(node.outputs, values):
        replace(old, new)
    for inner in subgraphs(node):  # what they read would count as read
        inner.outputs.clear()
        inner.remove(list(inner), safe=True)
    node.graph.remove(node, safe=True)
