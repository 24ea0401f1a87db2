"""Functions that torch's exporters lack, or get wrong, have torch's value and gradient; at zeros, ties and poles too."""

import copy
import math

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from marks import slow
from torch import nn

import orttrainer
from orttrainer import ORTTrainer, build_gradient
from orttrainer.describe import IODescription, ModelDescription
from orttrainer.export import export_module
from orttrainer.export import module as export_stage


class Projected(nn.Module):
    """For each function of parameters: the sum of its elements, each with a weight of its own; and the functions."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        for name, (_, *values) in functions.items():
            for place, value in enumerate(values):
                self.register_parameter(f"{name} {place}", nn.Parameter(torch.tensor(value, dtype=torch.float32)))

    def forward(self, scale):
        results = []
        for name, (function, *values) in self.functions.items():
            results.append(function(*(getattr(self, f"{name} {place}") for place in range(len(values)))) * scale)
        return sum((y * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).sum() for y in results), *results


def check(functions):
    """The gradient of the exported loss is autograd's in float64; the values are checked by the export."""
    module, scale = Projected(functions), torch.tensor(1.0)
    outputs = [IODescription(name, []) for name in ("loss", *functions)]
    forward = export_module(module, None, ModelDescription([IODescription("scale", [])], outputs), [scale])
    gradient = build_gradient(ir.to_proto(forward.model), of="loss", wrt=list(forward.parameters))
    session = onnxruntime.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [f"{name}_grad" for name in forward.parameters]
    found = dict(zip(forward.parameters, session.run(names, {"scale": scale.numpy()})))
    module.double()(scale.double())[0].backward()
    for name, parameter in module.named_parameters():
        expected = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        got = found.get(name, np.zeros(parameter.shape))
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6, err_msg=name)


ROWS = [[3.0, -1.0, 0.5, 3.0], [0.0, 2.0, -2.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
TIES = [[1.0, 3.0, 3.0, 2.0], [2.0, 2.0, 0.0, 2.0]]
OTHER = [[2.0, 3.0, -0.5, 4.0], [1.0, 2.0, 5.0, 1.0]]
DISTINCT = [[2.0, 3.0, -0.5, 4.0], [1.0, 2.0, 5.0, 0.0]]
NEAR = [[3.0, -1.0, 0.5, 3.0], [1.0, 2.0, 3.0, 4.0]]  # the first row is one of ROWS
PLANE = [[[[7.0, 1, 3, 2, 5], [4, 9, 8, 6, 0], [1, 2, 3, 4, -5], [5, -1, 0, 7, 8], [2, 4, 6, 8.5, 3.5]]]]
INDEX = torch.tensor([2, 1, 2])
MANY = torch.tensor([0, 12, -18, 7, 1, 360360, -1024, 46368, 75025])
ORDERS = torch.tensor([0.05, 0.5, 1.0, 2.0, 6.5, 20.0, 75.0, 310.0])
PLACES = torch.tensor([[2, 1, 2, 0], [1, 1, 1, 1]])


def _changed(x, change):
    change(x)
    return x


FUNCTIONS = {
    "a fractional norm": (lambda x: torch.linalg.vector_norm(x, 0.5, 1), ROWS),
    "a cubic norm": (lambda x: torch.linalg.vector_norm(x, 3, 1), ROWS),
    "a negative norm": (lambda x: torch.linalg.vector_norm(x, -1, 1), ROWS),
    "a norm that keeps its axes": (lambda x: torch.linalg.norm(x, keepdim=True), ROWS),
    "a Frobenius norm": (lambda x: x.norm(dim=1, keepdim=True), ROWS),
    "a matrix norm of zeros": (torch.linalg.matrix_norm, [[0.0, 0.0], [0.0, 0.0]]),
    "a norm of zeros": (lambda x: torch.linalg.norm(x, "fro", keepdim=True), [[0.0, 0.0], [0.0, 0.0]]),
    "a norm of everything": (lambda x: torch.norm(x, 3), ROWS),
    "fmax": (torch.fmax, TIES, OTHER),
    "fmin": (torch.fmin, TIES, OTHER),
    "a histogram": (lambda x: x.sum() * torch.histc(x, 4), DISTINCT),
    "a histogram between bounds": (lambda x: x.sum() * x.histc(3, -1, 2), DISTINCT),
    "a histogram of equal numbers": (lambda x: x.sum() * torch.histc(x * 0, 5), DISTINCT),
    "hypot": (torch.hypot, TIES, OTHER),
    "hypot of what has no squares": (lambda x, y: torch.hypot(x, y) / y, [3e20, 1e-30, 0.0], [4e20, 2e-30, 2.0]),
    "clamp between tensors": (lambda x, y: torch.clamp(x, y - 1, y + 1), TIES, OTHER),
    "clamp to the bounds of others": (lambda x, y: x.clip(min=y) + x.clamp_min(x.detach()) + torch.clamp_max(x, y), TIES, OTHER),
    "clamp of infinities": (lambda x, y: y * (x.clamp(min=0).isinf() + 2.0 * x.clamp_max(1).isinf()), [math.inf, -math.inf, 1.0], [1.0, 2.0, 3.0]),
    "clamp between equal bounds": (lambda x, y: torch.clamp(x, y, y), TIES, OTHER),
    "dist of what is equal": (lambda x: torch.dist(x, x.detach(), 3) + torch.dist(x, x.detach() + 1, 1.5), ROWS),
    "renorm with rows of zeros": (lambda x: x.renorm(3, 0, 2.0) + torch.renorm(x.T, 1.5, -1, 2.0).T, ROWS),
    "clamp between numbers": (lambda x, y: x.clamp(-1.0, 1.0) + x.clip(max=2) * torch.clamp_min(x, 0) - (x * 1).clamp_(-2, 1), TIES, OTHER),
    "clamp between numbers in tensors": (lambda x: torch.clamp(x, torch.tensor(0.0), torch.tensor(2.0)), TIES),
    "the larger and the smaller of numbers": (
        lambda x: x.maximum(torch.tensor(0.0)).minimum(torch.tensor(2.0)) + 2 * x.minimum(torch.tensor(3.0)).maximum(torch.tensor(1.0))
        + x.maximum(torch.tensor(2.0)).maximum(torch.tensor(2.0)) - x.minimum(torch.tensor(1.0)).minimum(torch.tensor(1.0)), TIES,
    ),
    "rectified, then bounded, or the reverse": (lambda x: torch.relu(x - 1).clamp(max=2) + 2 * torch.relu((x - 2).clamp(-1, 1)), TIES),
    "clamp in place": (lambda x, y: (x * 1).clamp_(max=y), TIES, OTHER),
    "copysign in place": (lambda x, y: (2 * x).copysign_(y), TIES, OTHER),
    "hypot in place, of a part": (lambda x, y: _changed(2 * x, lambda z: z[:, 1:3].hypot_(y[:, :2])), TIES, OTHER),
    "lgamma in place, of a part": (lambda x: _changed(x * 1, lambda z: z[1:].lgamma_()), [0.3, 2.5, 7.0]),
    "index_reduce in place": (lambda x, y: (x * 1).index_reduce_(1, INDEX, y[:, :3], "amax"), TIES, OTHER),
    "signbit of zeros": (lambda x: x * torch.signbit(x.detach()), [-0.0, 1.0, -1.0, 0.0]),
    "heaviside of NaN": (lambda x, y: y * torch.heaviside(x.detach(), y.detach()), [-0.0, 1, -1, math.nan], [3.0, 4, 5, 6]),
    "ldexp by integers": (lambda x, y: torch.ldexp(x, torch.tensor([-2, 0, 3, -1])) + (x * y).ldexp_(torch.tensor([1, -40, 0, 2])), TIES, OTHER),
    "ldexp by as many as an integer has bits": (lambda x, y: torch.ldexp(x, torch.tensor([7, 8, -8, 6]).to(torch.int8)) + 2.0**-62 * y.ldexp(torch.tensor([62, 63, 64, 70])), TIES, OTHER),
    "copysign": (torch.copysign, ROWS, [-0.0, 1.0, -1.0, 0.0]),
    "cumprod with a zero": (lambda x: x.cumprod(1), ROWS),
    "cumprod along the first axis": (lambda x: x.cumprod(0), OTHER),
    "cumprod of seven": (lambda x: x.cumprod(0), [1.5, -0.5, 2.0, 0.25, 0.0, 3.0, -2.0]),
    "cummax with ties": (lambda x: x.cummax(1).values, TIES),
    "cummax of integers": (lambda x: x * (x > 0).long().cummax(1).values, TIES),
    "cummin of booleans": (lambda x: x * (x > -1).byte().cummin(1).values, TIES),
    "cummin with ties": (lambda x: x.cummin(-1)[0], TIES),
    "a stable sort": (lambda x: torch.sort(x, stable=True, dim=1, descending=True).values, TIES),
    "a stable argsort": (lambda x: torch.gather(x, 1, x.argsort(stable=True, dim=1)), TIES),
    "x log y of 0": (torch.xlogy, [0.0, 0.0, 2.0, -1.0, 0.0], [0.5, 3.0, 0.25, 2.0, 1.0]),
    "x log y of 0, of numbers": (lambda x: torch.xlogy(x, 3) + torch.special.xlogy(2, x * x + 1) * torch.xlogy(0.3, torch.tensor([2, 1, 3])), [0.0, 2.0, -1.0]),
    "x log y with a constant of 0": (lambda x: torch.xlogy(x, torch.tensor([0.0, 1.0, 0.5])), [0.0, 2.0, 0.0]),
    "x log y in place": (lambda x, y: (x * 1).xlogy_(y), [0.0, 2.0], [0.5, 3.0]),
    "x log1p y of 0": (torch.special.xlog1py, [0.0, 0.0, 2.0, -1.0, 0.0], [-0.5, 3.0, 0.25, 2.0, 0.0]),
    "extrema along an axis that tie": (lambda x: x.max(1)[0] - torch.min(x, dim=0, keepdim=True).values.sum() * x.max(-1, True)[0][0], TIES),
    "extrema along an axis called so": (lambda x: torch.max(x, axis=1)[0] + x.min(axis=1).values, TIES),
    "extrema with their places": (lambda x: (lambda y, i: y * i)(*torch.max(x, 1)) - x.min(0).indices.sum(), TIES),
    "extrema of infinities": (lambda x: (x.max(1)[0] > 0) * x.sum() + x[:, :2].max(1)[0], [[-math.inf, -3.0, -3.0], [1.0, 2.0, 2.0]]),
    "an extremum of a scalar": (lambda x: x.max(0)[0] * x.min(-1).values, 2.0),
    "extrema of all": (lambda x: x.max() * torch.min(x) - x.amax((0, 1)), TIES),
    "extrema of all axes that are not named": (lambda x: x.amax() * torch.amin(x, keepdim=True) + x.amin(()) - torch.amax(x, axis=1), TIES),
    "an amax of a scalar": (lambda x: x.amax() * torch.amin(x), 2.0),
    "topk of a scalar": (lambda x: x.topk(1, 0)[0] * torch.topk(x, 1).values + x.topk(1, -1, False)[1], 2.0),
    "variances of a scalar": (lambda x: (x * 1.0).sum() * (1 + x.var(0, correction=0) + torch.var_mean(x, -1, correction=0)[1] + x.std(dim=0, unbiased=False)), 2.0),
    "the larger of two": (lambda x, y: torch.max(x, y) * torch.min(x, other=y), TIES, OTHER),
    "a margin between several": (
        lambda x: F.multi_margin_loss(x, torch.tensor([1, 2]), margin=1.0, weight=x[0].detach(), reduction="none")
        + F.multi_margin_loss(x, torch.tensor([3, 0]), p=2) + 2 * F.multi_margin_loss(x[0], torch.tensor(1)), TIES,
    ),
    "a margin between two": (
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones(2, 1), margin=1.0, reduction="none") + 2 * F.margin_ranking_loss(x, y, -torch.ones(1, 4)), TIES, OTHER,
    ),
    "a margin of distances": (
        lambda x: F.hinge_embedding_loss(x, torch.tensor([-1.0, 1, -1, -1]), margin=2.0, reduction="none")
        + 2 * F.hinge_embedding_loss(x, -torch.ones(4), margin=1.5, reduction="sum"), TIES,
    ),
    "a margin of angles": (
        lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor([-1, -1, 1]), reduction="none")
        + 2 * F.cosine_embedding_loss(x[1], y[0], torch.tensor(-1)), [[1.0, 0], [3, 4], [1, 2]], [[0.0, 2], [3, 1], [2, -2]],
    ),
    "a margin of triplets": (
        lambda x, y, z: F.triplet_margin_loss(x, y, z, margin=5.0, eps=0.0, reduction="none")
        + 2 * F.triplet_margin_loss(x, z, y, margin=1.0, swap=True), [[0.0, 0], [1, 0]], [[3.0, 4], [2, 5]], [[6.0, 8], [3, 1]],
    ),
    "cdist by the largest difference": (lambda x, y: torch.cdist(x, y, math.inf), [[2.0, -2, 2, 1], [3, 3, 0, 0]], [[0.0, 0, 0, 0], [3, 3, 0, 0]]),
    "cdist of infinities": (lambda x: torch.cdist(x, x.detach() * 0 + 1, math.inf).clamp(max=3) + x.sum(), [[2.0, -2.0], [1.0, 3.0]]),
    "pdist by the largest difference": (lambda x: F.pdist(x, math.inf), [[2.0, -2, 2, 1], [0, 0, 0, 0], [4, 2, 2, 0]]),
    "bags of maxima that tie": (lambda x: F.embedding_bag(torch.tensor([[0, 1, 2], [2, 1, 0]]), x, mode="max"), [[2.0, 2], [2, 1], [2, 2]]),
    "bags of maxima that tie, by offsets": (
        lambda x: F.embedding_bag(
            torch.tensor([3, 0, 1, 2, 2, 1, 3, 0, 3]), x, torch.tensor([0, 0, 4, 8, 9]), mode="max", padding_idx=3
        ), [[2.0, 2], [2, 1], [2, 2], [9, 9]],
    ),
    "aminmax": (lambda x: x / (torch.aminmax(x).max - 2 * x.aminmax(keepdim=True)[0]), TIES),
    "aminmax along an axis": (lambda x: x.aminmax(dim=1, keepdim=True).min * torch.aminmax(x, dim=1, keepdim=True).max, TIES),
    "rounded as if to integers": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.4, 1, -2, 5) * x, DISTINCT),
    "rounded by tensors": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor([0.4]), torch.tensor([1], dtype=torch.int32), -2, 5), TIES
    ),
    "rounded by channels": (
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.tensor([0.1, 0.3, 0.7, 2.0]), torch.tensor([0, 1, -2, 0], dtype=torch.int32), 1, -4, 3
        ), TIES
    ),
    "kthvalue": (lambda x: x.kthvalue(2, 1).values, DISTINCT),
    "a median": (lambda x: x.median(), DISTINCT),
    "a median that ties": (lambda x: x.median(), TIES),
    "a median of NaN": (lambda x: torch.where(x.median().isnan(), x.sum(), 0.0), [1.0, math.nan, 2.0]),
    "medians": (lambda x: x.median(1, keepdim=True).values, DISTINCT),
    "a median of the numbers": (lambda x: x.nanmedian(), [math.nan, 3.0, 1.0, math.nan, 2.0, 4.0, 2.0]),
    "medians of the numbers": (
        lambda x: torch.nanmedian(x, 1).values, [[math.nan, 3.0, 1.0, 5.0], [2.0, 5.0, 1.0, 8.0], [1.0, math.nan, math.nan, -math.inf]]
    ),
    "medians of infinities": (lambda x: torch.where(torch.nanmedian(x, 1).values.isinf(), x.nansum(), 0.0), [[math.nan, math.inf, 2.0, math.inf]]),
    "quantiles of the numbers": (
        lambda x: torch.nanquantile(x, torch.tensor([0.3, 1.0]).to(x), 1, True), [[math.nan, 3.0, 1.0, 5.0], [2.0, 5.0, 1.0, 8.0], [1.0, math.nan, math.nan, math.nan]]
    ),
    **{
        f"a quantile of the numbers, {form}": (lambda x, form=form: x.nanquantile(0.4, interpolation=form, keepdim=True), [[math.nan, 3.0], [1.0, 7.0]])
        for form in ("linear", "lower", "higher", "nearest", "midpoint")
    },
    "a quantile of one number": (lambda x: x.nanquantile(torch.tensor([0.3, 0.9]).to(x), 0, True), 2.5),
    "a mode": (lambda x: torch.mode(x, 1, keepdim=True).values, [[2.0, 3.0, 2.0, 1.0, 3.0], [5.0, -4.0, 1.0, 0.0, 7.0]]),
    "modes along the first axis": (lambda x: x.mode(0).values, TIES),
    "frexp": (lambda x: torch.frexp(x)[0], [1.0, 0.99999994, 8.0, -3.5, 1e-20, -6e30, 0.0]),
    "frexp's exponent": (lambda x: x * torch.frexp(x).exponent, [1.0, 0.99999994, 8.0, -3.5, 0.0]),
    "vander": (lambda x: torch.linalg.vander(x, N=4), [[0.0, 2.0], [-1.0, 0.5]]),
    "kron": (lambda x, y: torch.kron(x, y), TIES, OTHER),
    "kron of a vector": (lambda x, y: x[0].kron(y), TIES, OTHER),
    "kron of a number and of nothing": (lambda x, y: torch.kron(x[0, 0], y) + torch.kron(x[:, :0], y).sum(), TIES, OTHER),
    "vecdot": (lambda x, y: torch.linalg.vecdot(x, y, dim=0), TIES, OTHER),
    "cov": (lambda x: torch.cov(x), OTHER),
    "cov with weights": (lambda x: x.cov(aweights=torch.tensor([1.0, 2, 3, 1]), fweights=torch.tensor([1, 1, 2, 3])), OTHER),
    "corrcoef": (lambda x: torch.corrcoef(x)[0], OTHER),
    "index_add with a factor": (lambda x, y: x.index_add(1, INDEX, y[:, :3], alpha=-2), TIES, OTHER),
    "index_add to a scalar": (lambda x, y: torch.index_add(x, 0, torch.tensor([0]), y, alpha=2), 1.0, 2.0),
    "index_fill with an index twice": (lambda x, y: x.index_fill(1, INDEX, y), TIES, 5.0),
    "scatter_reduce to a mean": (lambda x, y: x.scatter_reduce(1, PLACES, y, "mean"), TIES, OTHER),
    "scatter_reduce to a mean of others": (
        lambda x, y: torch.scatter_reduce(x, 1, PLACES, y, "mean", include_self=False), TIES, OTHER,
    ),
    "scatter_reduce to a mean, in place": (lambda x, y: (2 * x).scatter_reduce_(1, PLACES, y, "mean"), TIES, OTHER),
    **{
        f"scatter_reduce to a {reduce} of others, which self may equal": (
            lambda x, y, r=reduce: x.scatter_reduce(1, PLACES, y, r, include_self=False),
            [[4.0, 3, 2, 9], [0, 5, 7, 0]], [[2.0, 3, 2, 4], [5, 0, 5, zero]],
        )
        for reduce, zero in (("amax", 5.0), ("amin", 5.0), ("prod", 2.0), ("sum", 0.0))
    },
    "scatter_reduce to a product of others, two of which are 0": (
        lambda x, y: x.scatter_reduce(1, PLACES, y, "prod", include_self=False) * x.scatter_reduce(1, PLACES, y, "prod"),
        [[4.0, 0, 2, 9], [0, 5, 7, 0]], [[0.0, 3, 2, 4], [5, 0, 5, 0]],
    ),
    "index_reduce to a minimum of others, which self equals": (
        lambda x, y: torch.index_reduce(x, 0, torch.tensor([1, 1]), y, "amin", include_self=False), TIES, [[2.0, 2, 5, 9], [3, 2, 0, 2]],
    ),
    **{
        f"index_reduce to a {reduce}": (lambda x, y, r=reduce: x.index_reduce(1, INDEX, y[:, :3], r), TIES, OTHER)
        for reduce in ("mean", "amax", "prod")
    },
    "put": (lambda x, y: x.put(torch.tensor([[0, -1, 5]]), y[0, :3]), TIES, OTHER),
    "put that accumulates": (lambda x, y: torch.Tensor.put(x, INDEX, y[:, 0].repeat(2)[:3], accumulate=True), TIES, OTHER),
    "put in place": (lambda x, y: (2 * x).put_(torch.tensor([1, 6]), y[:, 0]), TIES, OTHER),
    "diagonal_scatter": (lambda x, y: x.diagonal_scatter(y[:, 0], 1), TIES, OTHER),
    "diagonal_scatter below": (lambda x, y: torch.diagonal_scatter(x.expand(3, 2, 4), y[:, :2], -1, 0, 2), TIES, OTHER),
    "combinations": (lambda x: torch.combinations(x, 3), [1.0, 3.0, 3.0, 2.0]),
    "combinations with replacement": (lambda x: torch.combinations(x, with_replacement=True), [1.0, 3.0, 2.0]),
    "scatter_reduce of a scalar": (lambda x, y: x.scatter_reduce(0, torch.tensor(0), y, "mean"), 2.0, 5.0),
    "repeat_interleave of a size": (
        lambda x: torch.repeat_interleave(x, torch.tensor([2, 0, 3, 1]), 1, output_size=6), TIES,
    ),
    **{
        f"segment_reduce to a {reduce}": (
            lambda x, r=reduce: torch.segment_reduce(x, r, lengths=torch.tensor([3, 0, 3, 2]), initial=1.0), TIES[0] + TIES[1],
        )
        for reduce in ("sum", "mean", "prod", "max", "min")
    },
    "segment_reduce of rows": (
        lambda x: torch.segment_reduce(x, "max", offsets=torch.tensor([[0, 1, 4], [0, 3, 4]]), axis=1), TIES,
    ),
    "index_reduce along the first axis": (
        lambda x, y: x.index_reduce(0, torch.tensor([1, 1]), y, "mean", include_self=False), TIES, OTHER,
    ),
    "searchsorted": (lambda x: x * torch.searchsorted(torch.tensor([-1.0, 0.5, 3.0]).to(x), x), ROWS),
    "bucketize": (
        lambda x: x * torch.bucketize(x, torch.tensor([-1.0, 0.5, 3.0]).to(x), right=True)
        + torch.bucketize(x.flatten()[1], torch.tensor([-1.0, 0.5]).to(x)),
        ROWS,
    ),
    "searchsorted in rows": (
        lambda x, y: x * torch.searchsorted(y.sort(1).values, x, right=True, out_int32=True), TIES, OTHER
    ),
    "searchsorted among many, in rows": (
        lambda x, y: x.repeat(1, 5) * torch.searchsorted(y.repeat(1, 5).sort(1).values, x.repeat(1, 5), right=True), TIES, OTHER,
    ),
    "searchsorted of NaN": (
        lambda x: torch.where(x.isnan(), 1.0, x).repeat(5) * torch.searchsorted(torch.arange(20.0).to(x), x.repeat(5))
        + torch.bucketize(x, torch.tensor([0.5, 2.0]).to(x)).repeat(5), [1.0, math.nan, 2.5, -1.0],
    ),
    "searchsorted by an order": (lambda x, y: x * torch.searchsorted(y, x, side="right", sorter=y.argsort(1)), TIES, OTHER),
    "a diagonal that is filled": (lambda x: (2 * x).fill_diagonal_(5.0), TIES),
    "a wrapped diagonal that is filled": (lambda x: (2 * x).T.repeat(2, 1).fill_diagonal_(5.0, wrap=True), TIES),
    "greatest common divisors": (lambda x: x * torch.gcd(MANY[:, None], MANY[:4]).sum(0), OTHER[0]),
    "least common multiples": (lambda x: x * torch.lcm(MANY[1:, None].int(), MANY[1:].int()).abs().max(), OTHER[0]),
    "the exponential of a matrix": (torch.linalg.matrix_exp, [[[0.0, 2.0], [-2.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]),
    "the exponential of a large matrix": (torch.matrix_exp, [[-30.0, 40.0, 1.0], [0.5, -60.0, 0.0], [3.0, 2.0, -9.0]]),
    "erfinv": (torch.erfinv, [0.0, 0.3, -0.75, 0.99, -0.9999, 1e-6]),
    "einsum of axes that are meant": (lambda x, y: torch.einsum("...ij,...j->...i", x, y), TIES, OTHER),
    "einsum of broadcast axes": (lambda x, y: torch.einsum("bij,bj", x[None], torch.stack([y, 2 * y])[:, 0]), TIES, OTHER),
    "einsum of integers": (lambda x: torch.einsum("i,jk->ijk", torch.arange(3), x), TIES),
    "einsum of a list": (lambda x, y: torch.einsum("...k,...k->...", [x[:, None], y]), TIES, OTHER),
    "hstack": (lambda x, y: torch.hstack([x, y]), [1.0, 2.0], [3.0]),
    "vstack": (lambda x, y: torch.vstack([x, y]), [1.0, 2.0], [3.0, 4.0]),
    "dstack": (lambda x, y: torch.dstack([x, y]), TIES, OTHER),
    "atleast_2d, several": (lambda *x: torch.cat(torch.atleast_2d(*x), 1), [1.0, 2.0], [[3.0]]),
    "atleast_3d, a list": (lambda *x: torch.cat(torch.atleast_3d(list(x)), 1), [1.0, 2.0], [[3.0]]),
    "column_stack": (lambda x, y: torch.column_stack([x, y]), [1.0, 2.0], [[3.0], [4.0]]),
    "lgamma": (torch.lgamma, [-7.3, -2.5, -0.001, 1e-5, 0.3, 1.0, 2.0, 7.9, 8.0, 30.0, 1e6]),
    "digamma": (torch.special.digamma, [-7.3, -2.5, -0.25, 0.3, 1.0, 1.4616321, 7.9, 8.0, 30.0, 1e6]),
    "igamma": (lambda x: torch.igamma(ORDERS.to(x)[:, None], x), [0.01, 0.3, 1.0, 2.5, 7.0, 12.5, 80.0, 300.0]),
    "igammac": (lambda x: torch.special.gammaincc(ORDERS.to(x)[:, None], x), [0.01, 0.3, 1.0, 2.5, 7.0, 12.5, 80.0, 300.0]),
    "zeta": (lambda x: torch.special.zeta(1 + ORDERS[:6].to(x)[:, None], x), [0.1, 0.7, 1.0, 3.0, 9.5, 200.0]),
    "zeta of Riemann": (lambda x: torch.special.zeta(torch.tensor([1.5, 2.0, 4.0, 60.0]), 1.0) * x, [1.0, 2.0, 3.0, 4.0]),
    "Bessel functions of the second kind": (
        lambda x: x * sum(
            f(x) for f in (
                torch.special.modified_bessel_k0, torch.special.modified_bessel_k1,
                torch.special.scaled_modified_bessel_k0, torch.special.scaled_modified_bessel_k1,
            )
        ),
        [0.01, 0.4, 1.0, 1.1, 3.0, 20.0, 90.0],
    ),
    "a spherical Bessel function": (lambda x: x * torch.special.spherical_bessel_j0(x), [0.0, 0.2, -1.0, 3.0, 40.0]),
    "mvlgamma": (lambda x: torch.mvlgamma(x, 3), [1.1, 2.0, 9.0]),
    "cdist of order 1/2": (lambda x, y: torch.cdist(x, y, 0.5), ROWS, NEAR),
    **{f"cdist of order {p}": (lambda x, y, p=p: torch.cdist(x, y, float(p)), ROWS, NEAR) for p in (1, 2, 3)},
    "cdist of many rows": (lambda x, y: torch.cdist(x[:, :2].repeat(14, 1) * torch.arange(28.0)[:, None].to(x), y[:, :2]), TIES, OTHER),
    "cdist by products of batches": (
        lambda x, y: torch.cdist(x[None], torch.stack([y, 2 * y]), compute_mode="use_mm_for_euclid_dist"), ROWS, NEAR,
    ),
    "cdist of nothing": (lambda x, y: torch.cdist(x[:0], y), ROWS, NEAR),
    "vecdot of nothing": (lambda x, y: torch.linalg.vecdot(x[:0], y[:0]), ROWS, NEAR),
    "a norm along no axis named": (lambda x: torch.linalg.vector_norm(x, 2, ()), 3.0),
    "pdist": (lambda x: F.pdist(x), ROWS),
    "logit": (torch.special.logit, [1e-6, 0.25, 0.5, 0.999]),
    "logit between bounds": (lambda x: torch.logit(x, 0.125) + x.logit(eps=1e-3), [0.125, 0.875, 0.3, 0.95, 1.0, 0.0, -1.0]),
    "logit of a constant": (lambda x: x + torch.logit(x.detach(), 1e-5), [0.2, 1.0]),
    "logsigmoid": (F.logsigmoid, [-200.0, -8.5, 0.0, 30.0]),
    "binary cross-entropy of large scores": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.tensor([1.0, 0.0, 0.25, 0.0]).to(x), reduction="none"),
        [-200.0, 95.0, -120.0, 0.5],
    ),
    "binary cross-entropy of scores with weights": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, torch.tensor([1.0, 0.0, 0.25]).to(x), torch.tensor([1.0, 2.0, 0.5]).to(x), pos_weight=torch.tensor([3.0]).to(x)
        ),
        [-100.0, 3.0, -0.5],
    ),
    "binary cross-entropy of what is surely so": (
        lambda x: F.binary_cross_entropy(x, torch.tensor([0.0, 1.0, 0.25, 1.0, 0.5]).to(x), reduction="none"),
        [0.0, 1.0, 0.75, 0.125, 0.5],
    ),
    "binary cross-entropy with weights": (
        lambda x: F.binary_cross_entropy(x, torch.tensor([0.0, 1.0]).to(x), torch.tensor([3.0, 0.5]).to(x), reduction="sum"),
        [0.25, 0.75],
    ),
    "binary cross-entropy in float16": (
        lambda x: F.binary_cross_entropy(
            x.half(), torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.25]).half(), reduction="none"
        ).float(),
        [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.5],  # slopes: NaN twice, then infinite, but for the last
    ),
    "multilabel margins": (
        lambda x: F.multilabel_margin_loss(x[0], torch.tensor([3, -1, 1, 1]))
        + F.multilabel_margin_loss(x, torch.tensor([[1, 0, -1, 2], [2, 1, 0, 3]]), reduction="none"), OTHER,
    ),
    "the mean of multilabel margins": (lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, 3, -1, 0], [-1, 0, 0, 0]])), DISTINCT),
    "normalize": (lambda x: F.normalize(x, dim=1), ROWS),
    "pairwise distance": (lambda x, y: F.pairwise_distance(x, y, 3.0), TIES, OTHER),
    "a window that would start in the padding": (lambda x: F.max_pool2d(x, 3, 3, 1, ceil_mode=True), PLANE),
    "a window that ends beyond it": (lambda x: F.max_pool1d(x[0], 2, 2, ceil_mode=True), PLANE),
    "averages over the end of the padding": (
        lambda x: F.avg_pool2d(x, (4, 3), 2, 1, ceil_mode=True) * F.avg_pool1d(x[0], 2, 2, ceil_mode=True)[:, :1, None],
        PLANE,
    ),
    "averages over the end that count no padding": (
        lambda x: F.avg_pool2d(x, 4, 2, 1, True, count_include_pad=False) * F.lp_pool2d(x, 2, 2, ceil_mode=True),
        PLANE,
    ),
    "an average whose last window would start in the padding": (lambda x: F.avg_pool2d(x, 2, 2, 1, True), PLANE),
    "places in a padded plane": (lambda x: F.max_pool2d(x, 3, (2, 3), 1, 1, True, True)[1].to(x.dtype) + x.sum(), PLANE),
    "an axis of a scalar": (lambda x: x.sum(0) + x.amax(-1, keepdim=True), 2.0),
    "squeeze of a scalar": (lambda x: x.squeeze(0) * torch.squeeze(x, dim=-1) + x.squeeze((0,)) * x.squeeze(), 2.0),
    "squeeze of several axes": (lambda x: x[None, :, None].squeeze(0, 2) + x[None].squeeze(dim=(0, 2)), TIES),
}  # fmt: skip


# TorchScript does not know sizes as numbers, nor triu_indices; and it divides by the sizes of what is empty.
DYNAMO_ALONE = {
    "a window that would start in the padding", "averages over the end of the padding",
    "averages over the end that count no padding", "an average whose last window would start in the padding",
    "places in a padded plane", "pdist", "einsum of broadcast axes",
    "einsum of a list", "index_reduce to a amax", "index_reduce to a prod", "combinations",
    "combinations with replacement", "cdist of nothing", "pdist by the largest difference", "vecdot of nothing",
    "medians of infinities", "squeeze of a scalar", "squeeze of several axes", "hypot in place, of a part", "lgamma in place, of a part",  # it drops what is written to parts
    *(name for name in FUNCTIONS if "of others, " in name),
}  # fmt: skip


@pytest.mark.parametrize("exporter", [slow("dynamo"), "torchscript"])
def test_spelled_out_function_is_the_original(monkeypatch, exporter):
    def fail(job, forget_cached=False):
        raise RuntimeError("dynamo is off")

    functions = FUNCTIONS
    if exporter == "torchscript":
        monkeypatch.setattr(export_stage._Job, "dynamo", fail)
        functions = {name: case for name, case in FUNCTIONS.items() if name not in DYNAMO_ALONE}
    check(functions)


class _Certain(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x):
        return torch.sigmoid(x * self.scale)


def test_a_probability_of_0_or_1_has_a_gradient_as_in_torch():
    """Sigmoid of what is far from 0 is 0 or 1, where the logarithm has none."""
    x, label = torch.tensor([-300.0, 300.0, 0.5, -150.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    ours, theirs = _Certain(), _Certain()
    desc = ModelDescription(
        [IODescription("x", [4], torch.float32), IODescription("label", [4], torch.float32)],
        [IODescription("loss", [], torch.float32), IODescription("p", [4], torch.float32)],
    )
    trainer = ORTTrainer(
        ours, F.binary_cross_entropy, desc, "SGDOptimizer", None, IODescription("lr", [1], torch.float32), "cpu"
    )
    loss, _ = trainer.train_step(x, label, torch.tensor([1.0]))
    expected = F.binary_cross_entropy(theirs(x), label)
    (gradient,) = torch.autograd.grad(expected, [theirs.scale])
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(ours.scale.detach(), 1 - gradient)


class Products(nn.Module):
    """Of the rows of a batch and a matrix, either way around, and of complex numbers."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))

    def forward(self, x):
        x = x * self.matrix
        turned = torch.kron(torch.complex(x, -x), torch.complex(self.matrix, x[0]))
        return (
            torch.kron(x[:, 0], self.matrix).sin().sum()
            + torch.kron(self.matrix, x[:, 1]).cos().sum()
            + turned.imag.sin().sum()
        )


def test_kronecker_products_of_all_sizes_train_by_one_graph(exports):
    ours = Products()
    module = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    trainer = orttrainer.trainer(ours, None, torch.optim.SGD(ours.parameters(), 0.01))
    for rows in (4, 3, 6, 1):
        x = torch.randn(rows, 2, 2, generator=torch.Generator().manual_seed(rows))
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()
        trainer.step(x)
    torch.testing.assert_close(ours.state_dict(), module.state_dict())
    assert len(exports) == 1
