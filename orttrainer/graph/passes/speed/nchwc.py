"""Convolutions on tensors whose channels lie in blocks, as ONNX Runtime's CPU kernels like them best.

ONNX Runtime has operators of its own for a layout in which the channels of a pixel lie side by side in blocks of one
vector register: [batch, channels / block, height, width, block]. It rewrites a graph to them where the weights are
constants; those of a training graph are not. `BlockedConvolutionPass` does so where they are computed. How many
channels make a block depends on the processor, so the pass is for a graph that is about to be run, on the machine
that runs it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.batch_norm import switched
from orttrainer.graph.passes.speed import nchwc_depthwise
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, int64s, ints, is_reordering, reordered
from orttrainer.graph.passes.speed.weight_gradients import WeightGradient
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

FEWEST_POSITIONS = 128  # of all images together; below, the weights take as long to bring into blocks as is saved
USUAL_SIZE = 8  # of an axis that is only known at run time
LARGEST_KERNEL = 121  # taps; a larger one belongs to the gradient of a convolution by its kernel
WIDEST_DILATION = 8  # of such a kernel; a wider one is a layer's where its taps are few
FEW_TAPS = 9
WIDE_STEM = 64  # weights of an output channel from which few input channels are worth it
FILLED = 0.55  # of the products in blocks, from which on those with zeros cost less than is saved
CHANNELS_AT_ONCE = 4  # that ONNX Runtime brings into blocks: their number is a multiple


class BlockedConvolutionPass(ir.passes.InPlacePass):
    """Conv(x, w) -> ReorderOutput(nchwc.Conv(ReorderInput(x), blocked w)), and ConvTranspose likewise.

    A ConvTranspose without strides, which is what the gradient of a Conv by its input is, becomes a Conv with the
    kernel turned round. The weight gradient of a depthwise one becomes a convolution for each image; that of another is
    brought to channels first by way of blocks. What two convolutions in a row hand on stays in blocks, with a Relu between
    them in the first; and a Transpose of such a value to channels last is read from the blocks. Convolutions of float32
    images with a kernel larger than 1 x 1 and channels that fill their blocks, those of each group; or nearly so in one group,
    where zeros fill the last block, as they do in a depthwise one however few its channels are: its other form takes 5 to
    10 times as long. The others stay as they are.

    Args:
        block: how many channels make a block.
        stay: a training BatchNormalization behind a convolution will work in blocks as well.
    """

    def __init__(self, block: int, stay: bool = False):
        self.block, self.stay = block, stay

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        chosen = self.chosen(graph, [node for node in graph if is_reordering(node, "ReorderInput")])
        # Of a single image such a gradient may be chosen as the depthwise convolution that it is.
        gradients = [node for node in graph if self._is_depthwise_gradient(node) and node not in set(chosen)]
        if not chosen and not gradients:
            return ir.passes.PassResult(model, modified=False)
        rewriting = _Rewriting(Builder(graph, "nchwc"), self.block)
        transposes = [node for node in graph if node.op_type == "Transpose"]
        for rewrite, nodes in (
            (rewriting.convolution, chosen),
            (rewriting.depthwise_gradient, gradients),
            (rewriting.channels_last, transposes),
            (rewriting.weight_gradient, [node for node in transposes if WeightGradient.of(node) is not None]),
        ):
            for node in nodes:
                with rewriting.op.scope(node.name):
                    rewrite(node)
        graph.sort()
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def chosen(self, graph: ir.Graph, readers: Collection[ir.Node] = ()) -> list[ir.Node]:
        """The convolutions of the graph that are to work in blocks; `readers`: other nodes that read blocks."""
        filled = {node for node in graph if self._fits(node)}
        norms = {norm for node in graph if self.stay and (norm := switched(node)) is not None}
        blocked = {*filled, *norms, *readers}
        return [node for node in graph if node in filled or self._is_stem(node, blocked)]

    def _fits(self, node: ir.Node) -> bool:
        """Whether the channels on both sides of a convolution fill their blocks, and the layout pays."""
        if not _is_plain(node):
            return False
        if is_depthwise(node):
            return static_dims(node.inputs[1])[0] % CHANNELS_AT_ONCE == 0
        channels, out = channels_of(node)
        filled = math.prod(size / (size + -size % self.block) for size in (channels, out))
        if _groups(node) > 1:
            return filled == 1
        return filled >= FILLED and channels >= self.block and channels % CHANNELS_AT_ONCE == 0

    def _is_depthwise_gradient(self, node: ir.Node) -> bool:
        operands = nchwc_depthwise.operands(node)
        return operands is not None and operands[0].shape[1] % CHANNELS_AT_ONCE == 0

    def _is_stem(self, node: ir.Node, blocked: Collection[ir.Node]) -> bool:
        """Whether few channels are convolved, which the kernel reads as they are, that has much to do or blocks to hand on."""
        if not _is_plain(node) or _groups(node) > 1:
            return False
        channels, out = channels_of(node)
        if out % self.block or channels >= self.block:
            return False
        if channels * int(np.prod(static_dims(node.inputs[1])[2:])) >= WIDE_STEM:
            return True
        readers = [use.node for use in _activated(node).outputs[0].uses()]
        return any(reader in blocked for reader in readers)


class _Rewriting:
    """One graph while its convolutions change, and the values that are there in blocks."""

    def __init__(self, op: Builder, block: int):
        self.op, self.block = op, block
        self.blocked = reordered(op.graph)

    def convolution(self, node: ir.Node) -> None:
        op, (x, w, *bias) = self.op, node.inputs
        turned = node.op_type == "ConvTranspose"
        kernel = list(static_dims(w)[2:])
        last = node if turned else _activated(node)
        y = last.outputs[0]
        attributes = {name: ints(node, name, default) for name, default in (("strides", 1), ("dilations", 1))}
        if node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET":
            attributes["pads"] = turned_pads(node, kernel) if turned else ints(node, "pads", 0, 4)
        else:
            attributes["auto_pad"] = node.attributes.get_string("auto_pad")
        room = -y.shape[1] % self.block
        if is_depthwise(node):
            attributes["group"] = y.shape[1] + room
            weight, image = depthwise_weight(op, _longer(op, w, room), self.block, turned), self._blocks(x)
        else:
            attributes["group"] = _groups(node)
            more = [room, -x.shape[1] % self.block if x.shape[1] >= self.block else 0]  # of what is made, and read
            longer = _longer(op, w, *(more[::-1] if turned else more))
            weight = (
                turned_weight(op, longer, self.block, _groups(node))
                if turned
                else blocked_weight(op, longer, self.block)
            )
            image = x if x.shape[1] < self.block else self._blocks(x)
        blocked = op.node(
            "Conv", image, weight, *[_longer(op, b, room) for b in bias],
            domain=DOMAIN, like=y, kernel_shape=kernel, activation="Relu" if last is not node else None, **attributes,
        )  # fmt: skip
        blocked.shape = ir.Shape([y.shape[0], y.shape[1] + room, *y.shape.dims[2:]])
        new = self.op.node("ReorderOutput", blocked, domain=DOMAIN, like=y, channels=y.shape[1])
        self.blocked[new] = blocked
        self._replace(last, new)
        if last is not node:
            node.graph.remove(node, safe=True)

    def depthwise_gradient(self, node: ir.Node) -> None:
        (x, dy), (y,) = nchwc_depthwise.operands(node), node.outputs
        blocked = nchwc_depthwise.convolved(self.op, node, self._blocks(x), self._blocks(dy))
        self._replace(node, self.op.node("ReorderOutput", blocked, domain=DOMAIN, like=y, channels=y.shape[1]))

    def channels_last(self, node: ir.Node) -> None:
        """Transpose(x, to [batch, height, width, channels]) -> ReorderOutput(blocked x, channels_last)."""
        (x,), (y,) = node.inputs, node.outputs
        if x in self.blocked and tuple(node.attributes.get_ints("perm", ())) == (0, 2, 3, 1):
            channels = x.shape[1]
            new = self.op.node(
                "ReorderOutput", self.blocked[x], domain=DOMAIN, like=y, channels=channels, channels_last=1
            )
            self._replace(node, new)

    def weight_gradient(self, node: ir.Node) -> None:
        """Transpose(dW [out, height, width, in], to channels first) -> blocks, and out of them.

        Both together take half the time. And ONNX Runtime moves a Transpose behind the square of a gradient, so that Adam has two.
        """
        (x,), (y,) = node.inputs, node.outputs
        if (channels := y.shape[1]) % self.block == 0:
            blocked = self.op.node("ReorderInput", x, domain=DOMAIN, like=y, channels_last=1)
            self._replace(node, self.op.node("ReorderOutput", blocked, domain=DOMAIN, like=y, channels=channels))

    def _blocks(self, x: ir.Value) -> ir.Value:
        if x not in self.blocked:
            blocked = self.blocked[x] = self.op.node("ReorderInput", x, domain=DOMAIN, like=x)
            blocked.shape = ir.Shape([x.shape[0], x.shape[1] + -x.shape[1] % self.block, *x.shape.dims[2:]])
        return self.blocked[x]

    def _replace(self, node: ir.Node, new: ir.Value) -> None:
        (old,) = node.outputs
        new.name, old.name = old.name, f"{old.name}/plain"
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


def _longer(op: Builder, x: ir.Value, *zeros: int) -> ir.Value:
    """`x` with zeros behind it, along its first axes."""
    pads = np.zeros((2, len(x.shape)), np.int64)
    pads[1, : len(zeros)] = zeros
    return op.Pad(x, pads.reshape(-1)) if any(zeros) else x


def blocked_weight(op: Builder, w: ir.Value, block: int) -> ir.Value:
    """[out, in, ...] -> [out / block, in / block, taps, block of in, block of out]; few in: [out / block, in, taps, block of out]."""
    out, channels, *kernel = static_dims(w)
    taps = int(np.prod(kernel))
    blocked = _inner(op, w, [out // block, block, channels * taps, 1])
    if channels >= block and taps > 1:
        split = op.Reshape(blocked, int64s(out // block, channels // block, block, taps, block))
        blocked = op.Transpose(split, perm=[0, 1, 3, 2, 4])
    return op.Reshape(blocked, int64s(out, channels, *kernel))


def turned_weight(op: Builder, w: ir.Value, block: int, groups: int = 1) -> ir.Value:
    """[in, out, ...] of a ConvTranspose as `blocked_weight` of the Conv that does the same, with the taps in reverse."""
    kernel = static_dims(w)[2:]
    taps = range(int(np.prod(kernel)) - 1, -1, -1)
    return turned_taps(op, w, out_in_blocks(op, w, block), block, taps, kernel, groups)


def out_in_blocks(op: Builder, w: ir.Value, block: int) -> ir.Value:
    """[in, out, ...] -> [in, out / block, taps, block of out], as rows of a block."""
    channels, out, *kernel = static_dims(w)
    inner = _inner(op, w, [channels * out // block, block, int(np.prod(kernel)), 1])
    return op.Reshape(inner, int64s(-1, block))


def turned_taps(
    op: Builder, w: ir.Value, inner: ir.Value, block: int, taps: Sequence[int], kernel: Sequence[int], groups: int = 1
) -> ir.Value:
    """Some taps of `w` of a ConvTranspose, in their order, as `blocked_weight` of a Conv with a `kernel` of these.

    `inner`: `out_in_blocks` of `w`. Its rows find their place by index: a Transpose takes longer, and uses one thread.
    """
    channels, out, *extent = static_dims(w)
    together = min(channels // groups, block)  # channels that lie side by side
    rows = np.arange(channels * out * int(np.prod(extent)) // block, dtype=np.int32)
    rows = rows.reshape(groups, channels // groups // together, together, out // block, -1)[..., list(taps)]
    rows = rows.transpose(0, 3, 1, 4, 2) if together == block else rows.transpose(0, 3, 1, 2, 4)
    return op.Reshape(op.Gather(inner, rows.reshape(-1), axis=0), int64s(out * groups, channels // groups, *kernel))


def depthwise_weight(op: Builder, w: ir.Value, block: int, turned: bool) -> ir.Value:
    """[channels, 1, ...] -> [channels / block, taps, block]; `turned`: with the taps in reverse."""
    channels, _, *kernel = static_dims(w)
    taps = int(np.prod(kernel))
    inner = _inner(op, w, [channels // block, block, taps, 1])
    if turned:
        inner = op.Reshape(inner, int64s(channels // block, taps, block))
        inner = op.Gather(inner, np.arange(taps - 1, -1, -1, dtype=np.int64), axis=1)
    return op.Reshape(inner, int64s(channels, 1, *kernel))


def _inner(op: Builder, w: ir.Value, shape: Sequence[int]) -> ir.Value:
    """`w` as [rows, block, columns, 1] -> [rows, columns, block]: the fastest transpose there is."""
    rows = op.Reshape(w, int64s(*shape))
    return op.node("ReorderInput", rows, domain=DOMAIN, like=rows)


def _is_plain(node: ir.Node) -> bool:
    """Whether this is a convolution of float32 images with a kernel of known size and some work to do.

    A ConvTranspose has to be a Conv with its kernel turned round.
    """
    if node.domain != "" or node.op_type not in ("Conv", "ConvTranspose"):
        return False
    x, w, y = *node.inputs[:2], node.outputs[0]
    weights = static_dims(w)
    if x.dtype != ir.DataType.FLOAT or weights is None or len(weights) != 4 or any(v.shape is None for v in (x, y)):
        return False
    if not all(isinstance(v.shape[1], int) for v in (x, y)) or not slides_weights(node):
        return False
    worth_it = has_many_positions(y) or is_depthwise(node)  # whose weights are few
    return worth_it and not (node.op_type == "ConvTranspose" and strided(node))


def slides_weights(node: ir.Node) -> bool:
    """Whether a convolution in two axes has taps as layers have, not those of a gradient by the weights.

    That lie apart along the width: along the height they may for a layer too, as those of a volume do, a plane apart.
    """
    taps = math.prod(static_dims(node.inputs[1])[2:])
    wide = ints(node, "dilations", 1)[-1] > WIDEST_DILATION
    return 1 < taps <= (FEW_TAPS if wide else LARGEST_KERNEL)


def channels_of(node: ir.Node) -> tuple[int, int]:
    """How many channels each group of a convolution reads, and makes."""
    first, second = static_dims(node.inputs[1])[:2]
    first //= _groups(node)
    return (first, second) if node.op_type == "ConvTranspose" else (second, first)


def _groups(node: ir.Node) -> int:
    return node.attributes.get_int("group", 1)


def is_depthwise(node: ir.Node) -> bool:
    """Whether each channel is convolved by itself, to one."""
    weights = static_dims(node.inputs[1])
    return _groups(node) > 1 and weights is not None and weights[:2] == (_groups(node), 1)


def has_many_positions(y: ir.Value) -> bool:
    """Whether the images of a convolution are large enough to bring its weights into blocks for them."""
    positions = [size if isinstance(size, int) else USUAL_SIZE for size in (y.shape[axis] for axis in (0, 2, 3))]
    return int(np.prod(positions)) >= FEWEST_POSITIONS


def strided(node: ir.Node) -> bool:
    """Whether a convolution is more than the other of Conv and ConvTranspose with its kernel turned round."""
    if any(s != 1 for s in ints(node, "strides", 1)) or any(ints(node, "output_padding", 0)):
        return True
    if "output_shape" in node.attributes or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return True
    return min(turned_pads(node, static_dims(node.inputs[1])[2:])) < 0


def turned_pads(node: ir.Node, kernel: Sequence[int]) -> list[int]:
    """The pads of the Conv that does the same as a ConvTranspose, or the other way: what its own leave of the kernel's extent."""
    reach = [(k - 1) * d for k, d in zip(kernel, ints(node, "dilations", 1))]
    return [r - p for r, p in zip([*reach, *reach], ints(node, "pads", 0, 4))]


def _activated(node: ir.Node) -> ir.Node:
    """The Relu that alone reads the result of a convolution, else the convolution."""
    (y,) = node.outputs
    readers = [use.node for use in y.uses()]
    alone = len(readers) == 1 and readers[0].op_type == "Relu" and readers[0].graph is node.graph
    return readers[0] if alone and not y.is_graph_output() else node
