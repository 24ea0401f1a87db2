"""Recurrent layers whose first axis is the batch."""

from __future__ import annotations

import onnx_ir as ir

LAYERS = {"GRU", "LSTM", "RNN"}
SWAPPED = [1, 0, 2]  # of sequences and of states
OF_ALL_STATES = [2, 0, 1, 3]  # [time, directions, batch, hidden] -> [batch, time, directions, hidden]
STATES = (5, 6)  # which inputs are states


class BatchFirstPass(ir.passes.InPlacePass):
    """LSTM(x, layout=1) -> Transpose(LSTM(Transpose(x))), likewise GRU and RNN: ONNX Runtime's have layout 0 only."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph.all_nodes() if _is_batch_first(node)]
        for number, node in enumerate(found):
            del node.attributes["layout"]
            for index in (0, *STATES):
                if index < len(node.inputs) and (x := node.inputs[index]) is not None:
                    turned = _transposed(x, SWAPPED, f"time_first_{number}/{x.name}")
                    node.graph.insert_before(node, turned.producer())
                    node.replace_input_with(index, turned)
            for place, y in enumerate(node.outputs):
                if y.name:
                    _turn(node, y, SWAPPED if place else OF_ALL_STATES)
        return ir.passes.PassResult(model, bool(found))


def _is_batch_first(node: ir.Node) -> bool:
    return node.op_type in LAYERS and node.domain == "" and node.attributes.get_int("layout", 0) == 1


def _turn(node: ir.Node, y: ir.Value, perm: list[int]) -> None:
    """Let all others read `y` transposed, under its name."""
    turned = _transposed(y, perm, y.name)
    node.graph.insert_after(node, turned.producer())
    y.replace_all_uses_with(turned, replace_graph_outputs=True)
    turned.producer().replace_input_with(0, y)
    turned.shape, y.shape, y.name = y.shape, None, f"{y.name}/time_first"


def _transposed(x: ir.Value, perm: list[int], name: str) -> ir.Value:
    node = ir.node("Transpose", [x], {"perm": perm}, name=name)
    node.outputs[0].name, node.outputs[0].type = name, x.type
    return node.outputs[0]
