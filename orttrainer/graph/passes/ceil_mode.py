"""Windows of pools that shape inference counts, and that no runtime has."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.subgraphs import node_inputs

POOLS = {"AveragePool", "LpPool", "MaxPool"}


class CeilModePass(ir.passes.InPlacePass):
    """Pool(x, ceil_mode=1) -> Pool(x) with pads, where a last window would lie beyond x and its pads in front.

    It is left out. Before opset 22 ONNX's inference counts it, so that the shapes of all that follows are wrong, to ONNX
    Runtime as well. Sizes have to be known.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        if not any(map(_rounds_up, model.graph)):
            return ir.passes.PassResult(model, modified)
        infer_shapes(model)
        nodes = list(model.graph)
        for index, node in enumerate(nodes):
            if not _rounds_up(node) or (pads := _pads(node)) is None:
                continue
            del node.attributes["ceil_mode"]
            node.attributes["pads"] = ir.AttrInt64s("pads", pads)
            for value in _behind(node, nodes[index + 1 :]):
                value.shape = None
            infer_shapes(model)
            modified = True
        return ir.passes.PassResult(model, modified)


def _rounds_up(node: ir.Node) -> bool:
    return node.op_type in POOLS and node.domain == "" and node.attributes.get_int("ceil_mode", 0) == 1


def _behind(node: ir.Node, later: Sequence[ir.Node]) -> set[ir.Value]:
    """The output of a node, and what is made of it."""
    found = {node.outputs[0]}
    for reader in later:
        if not found.isdisjoint(node_inputs(reader)):
            found.update(reader.outputs)
    return found


def _pads(node: ir.Node) -> list[int] | None:
    """Those with which all other windows are there without ceil_mode; None where no window is left out, or not known."""
    kernel, shape = list(node.attributes.get_ints("kernel_shape")), node.inputs[0].shape
    if shape is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    ones = [1] * len(kernel)
    strides, dilations = (list(node.attributes.get_ints(name, ()) or ones) for name in ("strides", "dilations"))
    pads = list(node.attributes.get_ints("pads", ()) or [0] * 2 * len(kernel))
    begin, end, left_out = pads[: len(kernel)], pads[len(kernel) :], False
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilations)):
        if not isinstance(size := shape[axis + 2], int):
            return None
        steps, rest = divmod(size + begin[axis] + end[axis] - (k - 1) * d - 1, s)
        if rest and (steps + 1) * s >= size + begin[axis]:
            left_out = True
        elif rest:  # the last window hangs over the end
            end[axis] += s - rest
    counted = (
        node.op_type == "AveragePool" and node.attributes.get_int("count_include_pad", 0) and end != pads[len(kernel) :]
    )
    fits = all(e < k for e, k in zip(end, kernel))  # as ONNX Runtime demands
    return [*begin, *end] if left_out and fits and not counted else None
