"""Rewrites of classification losses: one operator before differentiation, fast operators after it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import Builder


class FuseLogSoftmaxNllPass(ir.passes.InPlacePass):
    """NegativeLogLikelihoodLoss(LogSoftmax(x, axis=1), y, w) -> SoftmaxCrossEntropyLoss(x, y, w).

    The new node's log_prob output stands for the LogSoftmax where something else reads that.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            softmax = node.inputs[0].producer() if _is(node, "NegativeLogLikelihoodLoss") else None
            if softmax is None or not _is(softmax, "LogSoftmax") or not _is_along_classes(softmax):
                continue
            (log_prob,) = softmax.outputs
            fused = ir.Node(
                "", "SoftmaxCrossEntropyLoss", [softmax.inputs[0], *node.inputs[1:]],
                [node.attributes[name] for name in ("reduction", "ignore_index") if name in node.attributes],
                num_outputs=2, name=node.name,
            )  # fmt: skip
            model.graph.insert_after(node, fused)
            _take_over(fused.outputs[0], node.outputs[0])
            model.graph.remove(node, safe=True)
            _take_over(fused.outputs[1], log_prob)
            model.graph.remove(softmax, safe=True)
            modified = True
        if modified:
            common.TopologicalSortPass()(model)
        return ir.passes.PassResult(model, modified)


class ExpandSoftmaxCrossEntropyPass(ir.passes.InPlacePass):
    """SoftmaxCrossEntropyLoss(x, y, w) -> LogSoftmax(x, axis=1), GatherElements at y, weighted mean.

    For a graph that is differentiated already. The operator runs on one thread in ONNX Runtime;
    here only LogSoftmax touches the large tensor, and all else has one element for each label.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _is(node, "SoftmaxCrossEntropyLoss")]
        op = Builder(model.graph, "loss") if nodes else None
        for node in nodes:
            with op.scope(node.name or node.outputs[0].name):
                log_prob, loss = _expanded(op, node)
            for old, new in zip(node.outputs, (loss, log_prob)):
                if old.name:  # not an output left out
                    _take_over(new, old)
            model.graph.remove(node, safe=True)
        if nodes:
            common.TopologicalSortPass()(model)
        return ir.passes.PassResult(model, bool(nodes))


def _expanded(op: Builder, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The values of log_prob and loss."""
    x, labels, *weights = node.inputs
    weights = weights[0] if weights else None
    log_prob = op.LogSoftmax(x, axis=1)
    reduction = node.attributes["reduction"].as_string() if "reduction" in node.attributes else "mean"
    keep = weight = None
    if "ignore_index" in node.attributes:
        keep = op.Not(op.Equal(labels, node.attributes["ignore_index"].as_int()))
        labels = op.Where(keep, labels, 0)
        keep = op.Unsqueeze(keep, [1])
    column = op.Unsqueeze(labels, [1])  # [batch, 1, ...]
    terms = op.GatherElements(log_prob, column, axis=1)
    if weights is not None:
        weight = op.Gather(weights, column)
        terms = op.Mul(terms, weight)
    if keep is not None:  # not a product with 0: that keeps NaN and infinity
        terms = op.Where(keep, terms, 0.0)
        weight = op.cast_as(keep, x) if weight is None else op.Where(keep, weight, 0.0)
    if reduction == "none":
        loss = op.Squeeze(terms, [1])
    elif reduction == "sum":
        loss = op.ReduceSum(terms, keepdims=0)
    elif weight is None:
        loss = op.ReduceMean(terms, keepdims=0)
    else:
        loss = op.Div(op.ReduceSum(terms, keepdims=0), op.ReduceSum(weight, keepdims=0))
    return log_prob, op.Neg(loss)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in ("", "ai.onnx")


def _is_along_classes(softmax: ir.Node) -> bool:
    """Whether a LogSoftmax normalizes along axis 1."""
    shape = softmax.inputs[0].shape
    axis = softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1
    return axis == 1 or (shape is not None and axis + len(shape) == 1)


def _take_over(new: ir.Value, old: ir.Value) -> None:
    """Put `new` in the place of `old`: name, type, consumers, graph output."""
    new.name, new.type = old.name, old.type if old.type is not None else new.type
    new.shape = old.shape if old.shape is not None else new.shape
    old.name = f"{new.name}_replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
