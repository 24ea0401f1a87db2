"""Recurrent layers in a training graph: the forward that keeps what the backward needs."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.counter_hash import replace

# Key in the `meta` of a forward node, set by its gradient rule: a function that writes the forward out with a builder,
# and returns pairs of a value and what computes the same: the outputs, and what the backward computed again.
FORWARD = "orttrainer.forward_that_keeps"


class KeepActivationsPass(ir.passes.InPlacePass):
    """LSTM, and its gates again in the backward -> a Scan that computes them once, and keeps them; likewise GRU, RNN.

    The operators return their last and their hidden states only. A layer takes more memory, four to six times its
    output, and less time: the products of the gates are not made twice.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if FORWARD in node.meta]
        op = Builder(graph, "kept") if nodes else None
        for node in nodes:
            with op.scope(node.name or node.op_type):
                for old, new in node.meta.pop(FORWARD)(op):
                    if old.shape is not None:
                        new.shape = old.shape.copy()
                    replace(old, new)
            graph.remove(node, safe=True)
        if nodes:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(nodes))
