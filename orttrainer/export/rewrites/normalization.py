"""Normalization layers with running statistics, or with weights of another dtype, in forms that the exporters take."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["REWRITES", "cumulative_averages"]


def _instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    """F.instance_norm; with running statistics a batch norm over samples and channels at once.

    Its statistics are averaged over the samples.
    """
    if running_mean is None:
        norm = functools.partial(F.instance_norm, weight=weight, bias=bias, use_input_stats=use_input_stats, eps=eps)
        return _of_one_dtype(norm, input, weight, bias)
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    samples, channels, *rest = input.shape
    mean, var = running_mean.repeat(samples), running_var.repeat(samples)
    weight, bias = (None if x is None else x.repeat(samples) for x in (weight, bias))
    flat = input.reshape(1, samples * channels, *rest)
    y = F.batch_norm(flat, mean, var, weight, bias, True, momentum, eps)
    running_mean.copy_(mean.reshape(samples, channels).mean(0))
    running_var.copy_(var.reshape(samples, channels).mean(0))
    return y.reshape(input.shape)


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    norm = functools.partial(F.layer_norm, normalized_shape=normalized_shape, weight=weight, bias=bias, eps=eps)
    return _of_one_dtype(norm, input, weight, bias)


def _of_one_dtype(norm, input, *weights):
    """Half numbers with float32 weights: PyTorch computes in float32 and rounds once, and ONNX has no operator of both."""
    if any(x is not None and x.dtype != input.dtype for x in weights):
        return norm(input.float()).to(input.dtype)
    return norm(input)


@contextlib.contextmanager
def cumulative_averages():
    """Let a BatchNorm with `momentum=None` average by a tensor, 1 / num_batches_tracked, where torch takes a number."""
    with mock.patch.object(_BatchNorm, "forward", _batch_norm_forward):
        yield


def _batch_norm_forward(self, input):
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return _forward(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    mean, var = self.running_mean.clone(), self.running_var.clone()
    y = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # they become the batch's own
    share = 1.0 / self.num_batches_tracked.to(mean.dtype)
    self.running_mean.add_(share * (mean - self.running_mean))
    self.running_var.add_(share * (var - self.running_var))
    return y


_forward = _BatchNorm.forward


def _torch_instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled):
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _torch_layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return _layer_norm(input, normalized_shape, weight, bias, eps)


REWRITES = {
    F.instance_norm: _instance_norm,
    torch.instance_norm: _torch_instance_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _torch_layer_norm,
    torch._weight_norm: torch._weight_norm,
}
