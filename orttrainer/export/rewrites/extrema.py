"""Extrema: along an axis, whose gradient PyTorch gives to one place where the exporters' operators share it, and over all axes."""

from __future__ import annotations

import math

import torch

from orttrainer.export.forms.stop_gradient import stop_gradient

__all__ = ["REWRITES", "first_maximum", "largest_difference"]


def _first_extremum(function, place):
    """torch.max or torch.min; along an axis the gradient is that of the element at the place that `place` finds, the first.

    What it finds at NaN is what ONNX Runtime's extremum is, too.
    """
    result_type = getattr(torch.return_types, function.__name__)

    def call(input, dim=None, keepdim=False, **others):
        if not isinstance(dim, int) or others:
            return function(input, *([] if dim is None else [dim]), *([True] if keepdim else []), **others)
        if not input.dim():
            return result_type((input.clone(), torch.zeros_like(input, dtype=torch.int64)))
        if not _trains(input):
            return function(input, dim, keepdim)
        dim %= input.dim()  # of no rows ONNX Runtime finds no places along an axis that is counted from the last
        indices = place(input, dim, keepdim=True)
        found = input.gather(dim, indices), indices
        return result_type(found if keepdim else [part.squeeze(dim) for part in found])

    return call


def _trains(x) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _over_all(function):
    """torch.amax or torch.amin; the exporter's asks for the axes, of which none means all."""

    def call(input, dim=(), keepdim=False, *, out=None):
        dim = list(range(input.dim())) if dim is None or dim == () or dim == [] else dim
        return function(input, dim, keepdim) if input.dim() else input.clone()

    return call


def _aminmax(input, *, dim=None, keepdim=False):
    """torch.aminmax; over all axes the exporter leaves these out, which its own amin asks for."""
    axes = list(range(input.dim())) if dim is None else dim
    if dim is None and keepdim:
        return torch.return_types.aminmax(part.reshape([1] * input.dim()) for part in _aminmax(input))
    return torch.return_types.aminmax((input.amin(axes, keepdim), input.amax(axes, keepdim)))


def largest_difference(differences):
    """The largest of each row, of which each element that ties has the whole gradient, as in torch.cdist and pdist."""
    sizes = differences.abs()
    largest = stop_gradient(sizes.amax(-1, keepdim=True))
    own = torch.where((sizes == largest) & (largest < math.inf), sizes - largest, 0.0)  # 0, of slope 1
    return (largest + own.sum(-1, keepdim=True)).squeeze(-1)


first_maximum = _first_extremum(torch.max, torch.argmax)
REWRITES = {
    **dict.fromkeys([torch.max, torch.Tensor.max], first_maximum),
    **dict.fromkeys([torch.min, torch.Tensor.min], _first_extremum(torch.min, torch.argmin)),
    **dict.fromkeys([torch.amax, torch.Tensor.amax], _over_all(torch.amax)),
    **dict.fromkeys([torch.amin, torch.Tensor.amin], _over_all(torch.amin)),
    **dict.fromkeys([torch.aminmax, torch.Tensor.aminmax], _aminmax),
}
