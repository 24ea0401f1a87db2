"""Activations and reductions in NumPy, for the float64 checks of `orttrainer.testing`.

ONNX's reference evaluator is wrong for these: `Erf` and `Gelu` round to float32, `Mean` does not
broadcast, `Softmax` and `LogSoftmax` before opset 13 do not flatten, `ReduceLogSumExp` refuses
0-d values and all -inf. It has no operator of com.microsoft.
"""

from __future__ import annotations

import math

import numpy as np
from onnx.reference.op_run import OpRun

__all__ = ["OPS"]


def erf(x):
    return np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x)


def gelu(x):
    return (x * (1 + erf(x * math.sqrt(0.5))) / 2).astype(x.dtype)


def tanh_gelu(x):
    return (x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2).astype(x.dtype)


def named_activation(name, x, a=None, b=None):
    """`name` of `x`, with up to two parameters."""
    e = np.exp(-np.abs(x))
    sigmoid = np.where(x > 0, 1 / (1 + e), e / (1 + e))
    return {
        "affine": lambda: a * x + b,
        "clip": lambda: np.clip(x, a, b),
        "elu": lambda: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
        "hardsigmoid": lambda: np.clip(a * x + b, 0, 1),
        "hardswish": lambda: x * np.clip(x / 6 + 0.5, 0, 1),
        "leakyrelu": lambda: np.where(x > 0, x, a * x),
        "parametricsoftplus": lambda: a * np.logaddexp(0, b * x),
        "relu": lambda: np.maximum(x, 0),
        "scaledtanh": lambda: a * np.tanh(b * x),
        "selu": lambda: b * np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
        "sigmoid": lambda: sigmoid,
        "softplus": lambda: np.logaddexp(0, x),
        "softsign": lambda: x / (1 + np.abs(x)),
        "tanh": lambda: np.tanh(x),
        "thresholdedrelu": lambda: np.where(x > a, x, 0),
    }[name.lower()]().astype(x.dtype)


class Erf(OpRun):
    op_domain = ""

    def _run(self, x):
        return (erf(x),)


class Gelu(OpRun):
    op_domain = ""

    def _run(self, x, approximate=None):
        return (tanh_gelu(x) if approximate == "tanh" else gelu(x),)


class MicrosoftGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, **_):
        return (gelu(x),)


MicrosoftGelu.__name__ = "Gelu"  # the evaluator finds an operator by its class name


class BiasGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, bias):
        return (gelu(x + bias),)


class FastGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, bias=None):
        return (tanh_gelu(x if bias is None else x + bias),)


class QuickGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, alpha=None):
        return ((x / (1 + np.exp(-(1.702 if alpha is None else alpha) * x))).astype(x.dtype),)


class Mean(OpRun):
    op_domain = ""

    def _run(self, *xs):
        return (np.asarray(sum(xs) / len(xs), xs[0].dtype),)


class Softmax(OpRun):
    op_domain = ""

    def _run(self, x, axis=None):
        axes = self.axes(x, axis)
        e = np.exp(x - x.max(axes, keepdims=True, initial=-np.inf))
        return ((e / e.sum(axes, keepdims=True)).astype(x.dtype),)

    def axes(self, x, axis):
        """Before opset 13 all axes from `axis` (by default 1) on, since then one axis."""
        if self.run_params["opsets"][""] < 13:
            given = any(
                attribute.name == "axis" for attribute in self.onnx_node.attribute
            )  # else axis is today's default
            return tuple(range(axis % x.ndim if given else 1, x.ndim))
        return axis


class LogSoftmax(Softmax):
    op_domain = ""

    def _run(self, x, axis=None):
        axes = self.axes(x, axis)
        shifted = x - x.max(axes, keepdims=True, initial=-np.inf)
        return ((shifted - np.log(np.exp(shifted).sum(axes, keepdims=True))).astype(x.dtype),)


class ReduceLogSumExp(OpRun):
    op_domain = ""

    def _run(self, x, axes=None, keepdims=1, noop_with_empty_axes=0):
        axes = () if axes is None else tuple(int(axis) for axis in axes)
        axes = axes or (() if noop_with_empty_axes else tuple(range(x.ndim)))
        top = x.max(axes, keepdims=True, initial=-np.inf)
        top = np.where(np.isneginf(top), np.zeros_like(top), top)
        with np.errstate(divide="ignore"):  # all -inf
            y = top + np.log(np.exp(x - top).sum(axes, keepdims=True))
        return (np.asarray(y if keepdims in (1, None) else np.squeeze(y, axes), x.dtype),)


OPS = (BiasGelu, Erf, FastGelu, Gelu, LogSoftmax, Mean, MicrosoftGelu, QuickGelu, ReduceLogSumExp, Softmax)
