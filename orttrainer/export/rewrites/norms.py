"""Norms and distances: the exporters forget `keepdim`, have no norm of a matrix, and their x^p has no slope at 0."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from orttrainer.export.rewrites import pairs
from orttrainer.export.rewrites.extrema import largest_difference
from orttrainer.export.rewrites.precision import rounded_once
from orttrainer.export.rewrites.spectra import spectral_norm
from orttrainer.export.rewrites.spelled_out import functions

__all__ = ["REWRITES", "pairwise_distance"]


@rounded_once
def _vector_norm(input, ord=2, dim=None, keepdim=False, *, dtype=None):
    """torch.linalg.vector_norm; exporters forget `keepdim` without `dim`, and their x^p has no slope at 0."""
    x = input if dtype is None else input.to(dtype)
    dim = None if dim == () else dim
    if dim is None and keepdim:
        return _vector_norm(x.flatten(), ord, 0).reshape([1] * x.dim())
    if ord in (0, 1, 2, math.inf, -math.inf):
        return torch.linalg.vector_norm(x, ord, dim, keepdim)
    axes = list(range(x.dim())) if dim is None else dim
    none = 0.0 if ord > 0 else math.inf  # 0^ord
    zero = x == 0
    powers = torch.where(zero, none, torch.where(zero, 1.0, x).abs() ** ord)
    total = powers.sum(axes, keepdim) if x.dim() else powers
    zero = total == 0
    return torch.where(zero, none, torch.where(zero, 1.0, total) ** (1.0 / ord))


def _linalg_norm(input, ord=None, dim=None, keepdim=False, *, dtype=None):
    """torch.linalg.norm: of a vector if `ord` is not given, or goes along one axis; else of a matrix."""
    axes = input.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)
    if ord in (None, "fro"):
        return _vector_norm(input, 2, dim, keepdim, dtype=dtype)
    if axes <= 1 and not isinstance(ord, str):
        return _vector_norm(input, ord, dim, keepdim, dtype=dtype)
    return _matrix_norm(input, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)


def _matrix_norm(input, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None):
    """torch.linalg.matrix_norm, whose Frobenius norm has the slope 0 at 0."""
    if ord == "fro":
        return _vector_norm(input, 2, dim, keepdim, dtype=dtype)
    if ord in (2, -2, "nuc"):
        return spectral_norm(input if dtype is None else input.to(dtype), ord, dim, keepdim)
    return torch.linalg.matrix_norm(input, ord, dim, keepdim, dtype=dtype)


def _norm(input, p="fro", dim=None, keepdim=False, out=None, dtype=None):
    """torch.norm, which knows no norm of a matrix but the nuclear one."""
    if p == "nuc":
        return spectral_norm(input if dtype is None else input.to(dtype), p, dim, keepdim)
    if out is not None:
        return torch.norm(input, p, dim, keepdim, out, dtype)
    return _vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def _tensor_norm(input, p="fro", dim=None, keepdim=False, dtype=None):
    return _norm(input, p, dim, keepdim, dtype=dtype)


_BY_PRODUCTS = {"use_mm_for_euclid_dist": 0, "donot_use_mm_for_euclid_dist": math.inf}
_ROWS_FOR_PRODUCTS = 25  # more than these, as in torch.cdist


def _cdist(x1, x2, p=2.0, compute_mode=None):
    """The norm of each difference; 0 has the slope 0. The axis is counted from the first: see `spelled_out._vecdot`.

    Euclidean ones of many rows by products, as torch computes them: the differences of 512 and 512 rows of 64 take 64 MiB.
    """
    least = _BY_PRODUCTS.get(compute_mode, _ROWS_FOR_PRODUCTS)
    if p == 2 and max(_at_hand(x1.size(-2)), _at_hand(x2.size(-2))) > least:
        return _distances_by_products(x1, x2)
    differences = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    return _distance(differences, p, differences.dim() - 1)


def _at_hand(size) -> float:
    """A size in the first batch: others are not refused, nor made another graph for, since both forms are right for all."""
    if isinstance(size, torch.SymInt):
        return math.inf if size.node.hint is None else size.node.hint
    return int(size)


def _distances_by_products(x1, x2):
    """[-2 x, |x|^2, 1] [y, 1, |y|^2]^T: the squares of the distances of all x and y, and their roots."""
    own, others = x1.square().sum(-1, keepdim=True), x2.square().sum(-1, keepdim=True)
    left = torch.cat([-2 * x1, own, torch.ones_like(own)], -1)
    right = torch.cat([x2, torch.ones_like(others), others], -1)
    squares = left @ right.transpose(-2, -1)
    none = squares <= 0  # below it by rounding
    return torch.where(none, 0.0, torch.where(none, 1.0, squares).sqrt())


def _pdist(input, p=2.0):
    """The distances of all pairs of rows."""
    first, second = pairs.above(input.size(0), 1, input.device)
    return _distance(input[first] - input[second], p, -1)


def _distance(differences, p, axis):
    return largest_difference(differences) if p == math.inf else _vector_norm(differences, p, axis)


def pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False):
    return _vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _dist(input, other, p=2.0):
    return _vector_norm(input - other, p)


def _renorm(input, p, dim, maxnorm):
    """torch.renorm: what is along `dim`, where it is longer than that."""
    axes = [axis for axis in range(input.dim()) if axis != dim % input.dim()]
    norm = _vector_norm(input, p, axes, True)
    return input * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


REWRITES = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.matrix_norm: _matrix_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _tensor_norm,
    torch.pdist: _pdist,
    F.pairwise_distance: pairwise_distance,
    **functions(cdist=_cdist, dist=_dist, renorm=_renorm),
}
