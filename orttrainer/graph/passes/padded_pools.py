"""Pools of padded images, which ONNX Runtime gets wrong."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array

POOLS = {"AveragePool", "MaxPool"}
FIRST_WITH_AXES = 18  # version of the default domain from which on Pad has an input for axes


class PaddedPoolsPass(ir.passes.InPlacePass):
    """MaxPool(Pad(x, pads)) -> MaxPool(Pad(x, pads, axes=all of them)), which says the same; likewise AveragePool.

    ONNX Runtime takes what Pad puts around images into the pads of a pool. A MaxPool then takes zeros for minus infinity,
    with ceil_mode there are fewer windows, and pads as large as the kernel are refused (seen in 1.31.1). It leaves a Pad alone
    that names its axes. Likewise a Conv, where what is put around is not zero.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if model.graph.opset_imports[""] < FIRST_WITH_AXES:
            return ir.passes.PassResult(model, modified=False)
        nodes = [node for node in model.graph.all_nodes() if _is_taken_in(node)]
        op = Builder(model.graph, "padded") if nodes else None
        for node in nodes:
            inputs = [*node.inputs, None, None][:3]
            node.resize_inputs(4)
            for index, value in enumerate([*inputs, op.const(np.arange(len(node.inputs[0].shape)))]):
                node.replace_input_with(index, value)
        return ir.passes.PassResult(model, bool(nodes))


def _is_taken_in(node: ir.Node) -> bool:
    """Whether ONNX Runtime would take this Pad into what reads it, and should not."""
    if node.op_type != "Pad" or node.domain or node.inputs[0] is None or node.inputs[0].shape is None:
        return False
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return False
    readers = {use.node.op_type for use in node.outputs[0].uses() if not use.node.domain}
    value = node.inputs[2] if len(node.inputs) > 2 else None
    around = np.zeros(1) if value is None else constant_array(value)
    return bool(readers & POOLS) or ("Conv" in readers and (around is None or bool(np.any(around))))
