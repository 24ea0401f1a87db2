"""Operators on arrays that ONNX's reference evaluator gets wrong or does not know, for `orttrainer.testing`."""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun


class Pad(OpRun):
    """Pad with negative widths too; ONNX's reference evaluator refuses them."""

    op_domain = ""

    def _run(self, data, pads, constant_value=None, axes=None, mode=None):
        axes = range(data.ndim) if axes is None else [int(axis) % data.ndim for axis in axes]
        widths = [(0, 0)] * data.ndim
        for axis, pair in zip(axes, np.reshape(pads, (2, -1)).T):
            widths[axis] = tuple(map(int, pair))
        cut = data[tuple(slice(max(-b, 0), n - max(-a, 0)) for n, (b, a) in zip(data.shape, widths))]
        widths = [(max(b, 0), max(a, 0)) for b, a in widths]
        fill = {"constant_values": 0 if constant_value is None else constant_value} if mode == "constant" else {}
        return (np.pad(cut, widths, mode=mode, **fill).astype(data.dtype),)


class GatherElements(OpRun):
    """GatherElements along a negative axis too; ONNX's reference evaluator compares the wrong sizes there."""

    op_domain = ""

    def _run(self, data, indices, axis=None):
        places = list(np.indices(indices.shape))
        places[axis] = indices
        return (data[tuple(places)],)


class ScatterElements(OpRun):
    """ScatterElements of any rank; ONNX 1.21's reference evaluator knows four axes at most."""

    op_domain = ""

    def _run(self, data, indices, updates, axis=None, reduction=None):
        y, places = data.copy(), list(np.indices(indices.shape))
        places[axis] = indices
        if reduction in (None, "none"):
            y[tuple(places)] = updates
        else:
            join = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
            join.at(y, tuple(places), updates)
        return (y,)


class Inverse(OpRun):
    """com.microsoft: the inverse of each matrix."""

    op_domain = "com.microsoft"

    def _run(self, x):
        return (np.linalg.inv(x),)


class LpNormalization(OpRun):
    """X / |X|_p; ONNX's reference evaluator forgets the absolute value for p = 1."""

    op_domain = ""

    def _run(self, x, axis=None, p=None):
        norm = np.linalg.norm(x, p, axis, keepdims=True)
        return (x / np.where(norm == 0, 1, norm),)


class LRN(OpRun):
    """Local response normalization; ONNX's reference evaluator fills in as many channels as the batch has samples."""

    op_domain = ""

    def _run(self, x, alpha=None, beta=None, bias=None, size=None):
        channels = range(x.shape[1])
        near = [slice(max(0, c - (size - 1) // 2), c + size // 2 + 1) for c in channels]
        squares = np.stack([np.sum(x[:, window] ** 2, axis=1) for window in near], axis=1)
        return (x * (float(bias) + float(alpha) / size * squares) ** -float(beta),)


class GroupNormalization(OpRun):
    """Per group of channels, in the dtype of x; ONNX's function body goes through float32."""

    op_domain = ""

    def _run(self, x, scale, bias, epsilon=None, num_groups=None, stash_type=None):
        groups = x.reshape(x.shape[0], num_groups, -1)
        centered = groups - groups.mean(2, keepdims=True)
        y = centered / np.sqrt(np.mean(centered**2, 2, keepdims=True) + (epsilon or 1e-5))
        affine = [v if len(v) == x.shape[1] else np.repeat(v, x.shape[1] // num_groups) for v in (scale, bias)]
        scale, bias = (v.reshape(1, -1, *[1] * (x.ndim - 2)) for v in affine)
        return ((y.reshape(x.shape) * scale + bias).astype(x.dtype),)


class DynamicQuantizeLinear(OpRun):
    """The scale in the dtype of x; ONNX's reference evaluator rounds it to float32."""

    op_domain = ""

    def _run(self, x):
        low, high = min(0, x.min()), max(0, x.max())
        scale = np.asarray((high - low) / 255, x.dtype)
        zero = np.rint(np.clip(-low / scale, 0, 255))
        return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8), scale, np.asarray(zero, np.uint8)


class MeanVarianceNormalization(OpRun):
    """(X - mean) / (standard deviation + 1e-9); ONNX's function body has float32 constants."""

    op_domain = ""

    def _run(self, x, axes=None):
        axes = tuple(axes)
        centered = x - x.mean(axes, keepdims=True)
        return (centered / (np.sqrt(np.mean(centered**2, axes, keepdims=True)) + 1e-9),)


OPS = (
    DynamicQuantizeLinear,
    GatherElements,
    GroupNormalization,
    Inverse,
    LRN,
    LpNormalization,
    MeanVarianceNormalization,
    Pad,
    ScatterElements,
)
