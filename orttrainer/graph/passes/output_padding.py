"""ConvTranspose whose output is longer than all that it computes."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder, take_place

_TO_THE_END = 2**62


class OutputPaddingPass(ir.passes.InPlacePass):
    """ConvTranspose(output_padding p) -> ConvTranspose, Pad, Slice, where some p is its stride or more.

    ONNX and PyTorch allow that as long as it is less than the dilation; ONNX Runtime does not (1.31.1).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in (model.graph, *model.graph.subgraphs()):
            nodes = [node for node in graph if _is_longer(node)]
            if nodes:
                graph.opset_imports.update(model.opset_imports)
            for node in nodes:
                op = Builder(graph, f"{node.name}/padded")
                take_place(_cut(op, node), node)
                graph.sort()
                modified = True
        return ir.passes.PassResult(model, modified)


def _is_longer(node: ir.Node) -> bool:
    if node.op_type != "ConvTranspose" or node.domain or "output_shape" in node.attributes:
        return False
    padding = node.attributes.get_ints("output_padding", ())
    strides = node.attributes.get_ints("strides", None) or [1] * len(padding)
    given = node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    return given and any(p >= s for p, s in zip(padding, strides))


def _cut(op: Builder, node: ir.Node) -> ir.Value:
    x, w, *bias = node.inputs
    padding = node.attributes.get_ints("output_padding")
    dims, axes = len(padding), list(range(2, len(padding) + 2))
    pads = node.attributes.get_ints("pads", None) or [0] * 2 * dims
    kept = {"dilations", "group", "kernel_shape", "strides"}
    attributes = {name: attribute.value for name, attribute in node.attributes.items() if name in kept}
    y = op.ConvTranspose(x, w, **attributes)
    y = op.Pad(y, [0] * (dims + 2) + [0, 0, *padding])
    ends = [-end or _TO_THE_END for end in pads[dims:]]
    y = op.Slice(y, pads[:dims], ends, axes) if any(pads) else y
    return op.Add(y, op.Unsqueeze(bias[0], list(range(1, dims + 1)))) if bias and bias[0] is not None else y
