"""Rewrites of classification losses: one operator before differentiation, fast operators after it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from orttrainer.graph.activations import ancestors
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.order import TopologicalOrderPass


class FuseLogSoftmaxNllPass(ir.passes.InPlacePass):
    """NegativeLogLikelihoodLoss(LogSoftmax(x, axis=1), y, w) -> SoftmaxCrossEntropyLoss(x, y, w).

    The new node's log_prob output stands for the LogSoftmax where something else reads that, but for labels and weights
    that are made of it, which the new node would wait for.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            softmax = node.inputs[0].producer() if _is(node, "NegativeLogLikelihoodLoss") else None
            if softmax is None or not _is(softmax, "LogSoftmax") or not _is_along_classes(softmax):
                continue
            if softmax in ancestors(value for value in node.inputs[1:] if value is not None):
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
            TopologicalOrderPass()(model)
        return ir.passes.PassResult(model, modified)


class ExpandSoftmaxCrossEntropyPass(ir.passes.InPlacePass):
    """SoftmaxCrossEntropyLoss(x, y, w) -> LogSoftmax(x, axis=1), GatherElements at y, weighted mean.

    For a graph that is differentiated already. The operator runs on one thread in ONNX Runtime;
    here only LogSoftmax touches the large tensor, and all else has one element for each label.

    Where all that reads the log-probabilities L of many classes is exp(L), as the gradient does, Softmax takes the
    place of both, and the loss is the logarithm of its few elements at y; of L, in a branch, where one of them is too
    small for that.
    """

    MANY = 2048  # classes: below, the branch costs more than it spares

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _is(node, "SoftmaxCrossEntropyLoss")]
        op = Builder(model.graph, "loss") if nodes else None
        for node in nodes:
            with op.scope(node.name or node.outputs[0].name):
                loss = self._expand(op, node)
            _take_over(loss, node.outputs[0])
            model.graph.remove(node, safe=True)
        if nodes:
            TopologicalOrderPass()(model)
        return ir.passes.PassResult(model, bool(nodes))

    def _expand(self, op: Builder, node: ir.Node) -> ir.Value:
        """The loss. What reads log_prob reads its new form."""
        exponentials = self._exponentials(node)
        if exponentials:
            p = op.Softmax(node.inputs[0], axis=1)
            for exponential in exponentials:
                _take_over(p, exponential.outputs[0])
                op.graph.remove(exponential, safe=True)
            return _loss(op, node, lambda column: _log_of_elements(op, p, node.inputs[0], column))
        log_prob = op.LogSoftmax(node.inputs[0], axis=1)
        if len(node.outputs) > 1 and node.outputs[1].name:  # not left out
            _take_over(log_prob, node.outputs[1])
        return _loss(op, node, lambda column: op.GatherElements(log_prob, column, axis=1))

    def _exponentials(self, node: ir.Node) -> list[ir.Node]:
        """What reads log_prob, if that is nothing but its exponential, of many classes."""
        x, log_prob = node.inputs[0], node.outputs[1] if len(node.outputs) > 1 else None
        if log_prob is None or log_prob.is_graph_output() or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return []
        classes = x.shape[1] if x.shape is not None else None
        readers = [use.node for use in log_prob.uses()]
        few = not isinstance(classes, int) or classes < self.MANY
        return [] if few or any(not _is(reader, "Exp") for reader in readers) else readers


def _log_of_elements(op: Builder, p: ir.Value, x: ir.Value, column: ir.Value) -> ir.Value:
    """log p at `column`, where p = Softmax(x, axis=1); from x where an element of p is 0 or has lost digits."""
    picked = op.GatherElements(p, column, axis=1)
    smallest = float(np.finfo(p.dtype.numpy()).tiny) * 1e3
    small = op.Greater(op.ReduceSum(op.cast_as(op.Less(picked, op.scalar(smallest, p)), p), keepdims=0), 0.0)

    def branch(name: str, write) -> ir.AttrGraph:
        graph = ir.Graph([], [], nodes=[], opset_imports=op.graph.opset_imports, name=op.new_name(name))
        graph.outputs.append(write(Builder(graph, graph.name)))
        return ir.AttrGraph(name, graph)

    exact = branch("then_branch", lambda b: b.GatherElements(b.LogSoftmax(x, axis=1), column, axis=1))
    fast = branch("else_branch", lambda b: b.Log(picked))
    choice = ir.Node("", "If", [small], [exact, fast], num_outputs=1, name=op.new_name("If"))
    op.graph.append(choice)
    (terms,) = choice.outputs
    terms.name, terms.type, terms.shape = choice.name, picked.type, picked.shape
    return terms


def _loss(op: Builder, node: ir.Node, log_at: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """The loss from the log-probabilities at the labels."""
    x, labels, *weights = node.inputs
    weights = weights[0] if weights else None
    reduction = node.attributes["reduction"].as_string() if "reduction" in node.attributes else "mean"
    keep = weight = None
    if "ignore_index" in node.attributes:
        keep = op.Not(op.Equal(labels, node.attributes["ignore_index"].as_int()))
        labels = op.Where(keep, labels, 0)
        keep = op.Unsqueeze(keep, [1])
    column = op.Unsqueeze(labels, [1])  # [batch, 1, ...]
    terms = log_at(column)
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
    return op.Neg(loss)


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
