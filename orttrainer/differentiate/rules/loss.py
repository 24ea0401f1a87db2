"""Classification losses. Their gradients never build a one-hot tensor."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import attribute, operand, output, scatter_along, shaped


@vjp("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op, node, dloss, dlog_prob=None):
    """loss_i = -w_y log p_y  ->  dX = c * (p - onehot(y)), c = d loss / d loss_i * w_y; see `_Classes`.

    The output log_prob with cotangent dL adds dL - p * sum(dL) over the classes.
    """
    x, labels, weights = node.inputs[0], node.inputs[1], operand(node, 2)
    log_prob = output(op, node, 1)
    p = op.Exp(log_prob)
    dx = dweights = None
    if dloss is not None:
        classes = _Classes(op, node, labels, weights, x)
        coefficient = classes.coefficient(dloss)
        at_label = op.Sub(op.GatherElements(p, classes.column, axis=1), 1.0)  # in place of p: nothing to add
        dx = op.Mul(op.ScatterElements(p, classes.column, at_label, axis=1), coefficient)
        dweights = classes.weights_cotangent(log_prob, dloss)
    if dlog_prob is not None:
        more = op.Sub(dlog_prob, op.Mul(p, op.ReduceSum(dlog_prob, [1], keepdims=1)))
        dx = more if dx is None else op.Add(dx, more)
    return _per_input(node, shaped(dx, x), None, dweights)


@vjp("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op, node, dloss):
    """loss_i = -w_y X_y  ->  dX = -c at the labels, else 0, c = d loss / d loss_i * w_y; see `_Classes`."""
    x, labels, weights = node.inputs[0], node.inputs[1], operand(node, 2)
    classes = _Classes(op, node, labels, weights, x)
    updates = classes.filled(op.Neg(classes.coefficient(dloss)))
    dx = op.ScatterElements(op.zeros_like(x), classes.column, updates, axis=1)
    return _per_input(node, shaped(dx, x), None, classes.weights_cotangent(x, dloss))


class _Classes:
    """What both losses make of labels, weights, ignore_index and reduction.

    `column`: the labels with an axis of size 1 for the classes, 0 where they are ignored.
    `weight`: w_y for each element of `column`, 0 where it is ignored; None if all are 1.
    """

    def __init__(self, op, node: ir.Node, labels: ir.Value, weights: ir.Value | None, x: ir.Value):
        self.op, self.weights = op, weights
        self.reduction = attribute(node, "reduction", "mean")
        self.like = x
        self.valid = self.weight = None
        if (ignored := attribute(node, "ignore_index", None)) is not None:
            keep = op.Not(op.Equal(labels, ignored))
            labels = op.Where(keep, labels, 0)
            self.weight = self.valid = op.cast_as(op.Unsqueeze(keep, [1]), x)
        self.labels, self.column = labels, op.Unsqueeze(labels, [1])
        if weights is not None:
            picked = op.Gather(weights, self.column)
            self.weight = picked if self.valid is None else op.Mul(picked, self.valid)

    def coefficient(self, dloss: ir.Value) -> ir.Value:
        """d loss / d(-log p_y), a scalar or of the shape of `column`; 0 where ignored, also if all are."""
        unweighted = self._unweighted(dloss)
        result = unweighted if self.weight is None else self.op.Mul(unweighted, self.weight)
        if len(result.shape) and self.like.shape is not None:
            # As many as labels, which may be of other names than the rows of x, and are as many: the operator asks for that.
            rows, _, *others = self.like.shape
            result.shape = ir.Shape([rows, 1, *others])
        return result

    def filled(self, coefficient: ir.Value) -> ir.Value:
        """`coefficient` in the shape of `column`."""
        return coefficient if len(coefficient.shape) else self.op.expand_as(coefficient, self.column)

    def weights_cotangent(self, log_prob: ir.Value, dloss: ir.Value) -> ir.Value | None:
        """Each element adds -log p_y, for a mean less the loss itself, to the cotangent of its class's weight."""
        if self.weights is None:
            return None
        op = self.op
        terms = op.Neg(op.GatherElements(log_prob, self.column, axis=1))
        if self.reduction == "mean":
            terms = op.Sub(terms, op.Div(op.ReduceSum(op.Mul(terms, self.weight), keepdims=0), self._total_weight()))
        terms = op.Mul(terms, self._unweighted(dloss))
        if self.valid is not None:
            terms = op.Mul(terms, self.valid)
        flat = op.Cast(op.Reshape(self.labels, [-1]), to=int(ir.DataType.INT64))
        return scatter_along(
            op, op.Reshape(terms, [-1]), flat, 0, op.dim(self.weights, 0), unique=False, like=self.weights
        )

    def _unweighted(self, dloss: ir.Value) -> ir.Value:
        if self.reduction == "none":
            return self.op.Unsqueeze(dloss, [1])
        return dloss if self.reduction == "sum" else self.op.Div(dloss, self._total_weight())

    def _total_weight(self) -> ir.Value:
        op = self.op
        if self.weight is None:
            return op.cast_as(op.size(self.labels), self.like)
        total = op.ReduceSum(self.weight, keepdims=0)
        return op.Where(op.Equal(total, op.scalar(0.0, total)), op.scalar(1.0, total), total)


def _per_input(node: ir.Node, *cotangents: ir.Value | None) -> tuple:
    return cotangents[: len(node.inputs)]
