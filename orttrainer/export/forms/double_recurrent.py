"""LSTM, GRU and RNN in float64, which ONNX Runtime has no kernels for."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.rules.recurrent_layers import gru_layer, lstm_layer, rnn_layer
from orttrainer.graph.builder import Builder

__all__ = ["DoubleRecurrentPass"]

_LAYERS = {"LSTM": lstm_layer, "GRU": gru_layer, "RNN": rnn_layer}
_OPSET = 18  # that they are written in


class DoubleRecurrentPass(ir.passes.InPlacePass):
    """LSTM, GRU and RNN of float64 -> by their definitions, a Scan a direction."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in (model.graph, *model.graph.subgraphs()) if model.opset_imports.get("", 0) >= _OPSET else ():
            graph.opset_imports.update(model.opset_imports)
            modified |= _write_out(graph)
        return ir.passes.PassResult(model, modified)


def _write_out(graph: ir.Graph) -> bool:
    nodes = [n for n in graph if n.op_type in _LAYERS and not n.domain and n.inputs[0].dtype == ir.DataType.DOUBLE]
    for node in nodes:
        before = set(graph)
        for old, new in zip(node.outputs, _LAYERS[node.op_type](Builder(graph, f"{node.name}/steps"), node)):
            new.shape, name = old.shape if old.shape is not None else new.shape, old.name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            if name:
                old.name, new.name = f"{name}/layer", name
        for made in set(graph) - before:
            made.metadata_props.update(node.metadata_props)
        graph.remove(node, safe=True)
    if nodes:
        graph.sort()
    return bool(nodes)
