"""BatchNorm as it trains: what torch's dynamo exporter turns into inference BatchNorm.

A BatchNorm with running statistics becomes one `BatchNormalization(training_mode=1)`; its second
and third output are the new statistics, which a training step writes back, and which have no gradient
where forward reads them. One without becomes plain arithmetic, for it takes the statistics of the batch
in evaluation too.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from orttrainer.graph.passes.gradient_marks import stop_gradients_at

__all__ = ["TRANSLATIONS", "copy_of", "stop_gradients_at_statistics", "unbiased_running_var"]

aten = torch.ops.aten


def _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """aten._native_batch_norm_legit_functional -> y, mean, rstd, new mean, new var."""
    weight = _per_channel(input, 1.0) if weight is None else weight
    bias = _per_channel(input, 0.0) if bias is None else bias
    kept = 1.0 - momentum  # ONNX counts what stays, torch what is new
    if not training:
        y = op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=eps)
        return y, running_mean, running_var, running_mean, running_var
    y, new_mean, new_var = op.BatchNormalization(
        input,
        weight,
        bias,
        copy_of(op, running_mean),
        copy_of(op, running_var),
        epsilon=eps,
        momentum=kept,
        training_mode=1,
    )
    new_var = unbiased_running_var(op, input, running_var, new_var, kept)
    # Nothing in a forward graph reads the second and third: torch keeps them for its backward.
    return y, new_mean, new_var, new_mean, new_var


def copy_of(op, x):
    """A copy that no optimizer takes away (a Sum of one).

    ONNX Runtime's BatchNormalization writes its new statistics over its inputs 3 and 4, even
    where those are the caller's own memory and have other readers.
    """
    return op.Sum(x)


def stop_gradients_at_statistics(model: ir.Model) -> None:
    """Let what reads the new statistics have no gradient through them: autograd takes them for buffers written in place."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "BatchNormalization" and not node.domain]
    stop_gradients_at(model, [moved for node in nodes for moved in node.outputs[1:] if moved.uses()])


def unbiased_running_var(op, x, old, new, kept):
    """Correct ONNX's running variance, which takes the batch's biased variance, to torch's.

    new = kept*old + (1-kept)*v  ->  kept*old + (1-kept)*v * n/(n-1), n values per channel.
    """
    shape = x.shape
    if shape is not None and all(isinstance(dim, int) for dim in shape):
        n = math.prod(shape) // shape[1]
        ratio = n / max(n - 1, 1)
        return op.Sub(op.Mul(new, _scalar(op, ratio, old)), op.Mul(old, _scalar(op, kept * (ratio - 1), old)))
    channels = op.Shape(x, start=1, end=2)
    n = op.CastLike(op.Div(op.Size(x), op.Squeeze(channels)), old)
    one = _scalar(op, 1.0, old)
    extra = op.Div(one, op.Sub(n, one))  # n/(n-1) - 1
    batch_part = op.Sub(new, op.Mul(old, _scalar(op, kept, old)))
    return op.Add(new, op.Mul(batch_part, extra))


def _batch_statistics_norm(input, weight, bias, training, momentum, eps):
    """aten._native_batch_norm_legit.no_stats -> y, mean, rstd: the batch's own statistics."""
    rank = len(input.shape)
    axes = op.Constant(value_ints=[axis for axis in range(rank) if axis != 1])
    mean = op.ReduceMean(input, axes, keepdims=1)
    centered = op.Sub(input, mean)
    var = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    deviation = op.Sqrt(op.Add(var, _scalar(op, eps, input)))
    y = op.Div(centered, deviation)
    around = op.Constant(value_ints=[-1] + [1] * (rank - 2))
    if weight is not None:
        y = op.Mul(y, op.Reshape(weight, around))
    if bias is not None:
        y = op.Add(y, op.Reshape(bias, around))
    return y, op.Squeeze(mean, axes), op.Squeeze(deviation, axes)


def _per_channel(x, value):
    return op.Expand(_scalar(op, value, x), op.Shape(x, start=1, end=2))


def _scalar(op, value, like):
    return op.CastLike(op.Constant(value=ir.tensor(value, dtype=ir.DataType.DOUBLE)), like)


TRANSLATIONS = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_statistics_norm,
}
