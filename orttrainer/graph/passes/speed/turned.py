"""A convolution as the transposed one that does the same, and back: whichever lets ONNX Runtime unfold fewer channels."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.nchwc import channels_of, slides_weights, strided, turned_pads
from orttrainer.graph.passes.speed.nchwc_nodes import ints

FEWER = 4  # times, from which on folding in one thread beats unfolding in all


class TurnConvolutionPass(ir.passes.InPlacePass):
    """Conv(x, w) -> ConvTranspose(x, w turned round), where many channels become few; and back, where more come out than go in.

    ONNX Runtime's Conv copies what it reads once for each tap of the kernel; its ConvTranspose makes what it writes once
    for each tap, and adds that up. So heads with few channels, and the gradients of their inputs, are in the wrong form: 32
    channels to 3, 9 x 9, 4 images of 64 x 64: 8 -> 1.9 ms, its gradient 25 -> 1. Without strides, on images of float32 in
    one group. To come after `BlockedConvolutionPass`, which unfolds nothing; for the CPU.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if _pays(node)]
        op = Builder(graph, "turned") if nodes else None
        for node in nodes:
            (x, w, *bias), (old,) = node.inputs, node.outputs
            with op.scope(node.name):
                backwards = op.Slice(w, [-1, -1], [-(2**62)] * 2, [2, 3], [-1, -1])
                new = op.node(
                    "Conv" if node.op_type == "ConvTranspose" else "ConvTranspose",
                    x, op.Transpose(backwards, perm=[1, 0, 2, 3]), *bias, like=old, kernel_shape=list(static_dims(w)[2:]),
                    dilations=ints(node, "dilations", 1), pads=turned_pads(node, static_dims(w)[2:]),
                )  # fmt: skip
            new.name, old.name = old.name, f"{old.name}/turned"
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        if nodes:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(nodes))


def _pays(node: ir.Node) -> bool:
    """Whether this is a convolution that can be turned, and unfolds more channels than it would then."""
    if node.op_type not in ("Conv", "ConvTranspose") or node.domain or node.attributes.get_int("group", 1) != 1:
        return False
    weights = static_dims(node.inputs[1])
    if weights is None or len(weights) != 4 or node.inputs[1].dtype != ir.DataType.FLOAT:
        return False
    if not slides_weights(node):
        return False
    channels, out = channels_of(node)
    fewer = channels < out if node.op_type == "ConvTranspose" else FEWER * out <= channels
    return fewer and not strided(node)
