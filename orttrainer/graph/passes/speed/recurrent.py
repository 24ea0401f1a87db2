"""Recurrent layers in a training graph: the forward that keeps what the backward needs."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.counter_hash import replace
from orttrainer.graph.passes.sized import SizedPass

# Keys in the `meta` of a node, set by its gradient rule: functions that write it out with a builder, and return pairs of a
# value and what computes the same: of FORWARD the outputs, and what the backward computed again; of BATCH_MAJOR_FORM the
# cotangents of the inputs, and the former where the forward changes as well.
FORWARD = "orttrainer.forward_that_keeps"
BATCH_MAJOR_FORM = "orttrainer.batch_major"
# Key in the `meta` of a graph: what was replaced, by what. Functions that are still to be called may have it at hand.
_REPLACED = "orttrainer.replaced_results"


class BatchMajorPass(SizedPass):
    """The backward of a narrow LSTM, GRU or RNN, [time, hidden, batch] -> [time, batch, hidden], as all around it lies.

    And the forward, where it keeps what the backward reads, and does not stay the operator. Neither values nor weights are
    transposed any more, and products of few samples take less time; those of many, of wide layers, take more.

    Args:
        sizes: of symbolic dimensions, in usual batches; the form is right for any.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, _written(model.graph, BATCH_MAJOR_FORM, "rows", self.sizes))


class KeepActivationsPass(ir.passes.InPlacePass):
    """LSTM, and its gates again in the backward -> a Scan that computes them once, and keeps them; likewise GRU, RNN.

    The operators return their last and their hidden states only. A layer takes more memory, four to six times its
    output, and less time: the products of the gates are not made twice.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, _written(model.graph, FORWARD, "kept"))


def _written(graph: ir.Graph, key: str, prefix: str, *how) -> bool:
    """Let what stands under `key` be written, in the place of what there is, if it returns something."""
    nodes = [node for node in graph if key in node.meta]
    op = Builder(graph, prefix) if nodes else None
    replaced: dict[ir.Value, ir.Value] = graph.meta.setdefault(_REPLACED, {}) if nodes else {}
    for node in nodes:
        with op.scope(node.name or node.op_type):
            pairs = node.meta.pop(key)(op, *how)
        for old, new in replaced.items():  # as a layer that reads another's states without a node in between
            old.replace_all_uses_with(new)
        if not pairs:
            continue
        node.meta.pop(FORWARD, None)
        for old, new in pairs:
            if old.shape is not None:
                new.shape = old.shape.copy()
            replace(old, new)
            replaced[old] = new
        if not any(y.uses() or y.is_graph_output() for y in node.outputs):
            graph.remove(node, safe=True)
    if nodes:
        graph.sort()  # the builder appends
    return bool(nodes)
