"""Dropouts that ONNX has no operator for, such as that of everything, `RReLU`, and draws that the exporters lack.

Whether a graph trains or evaluates is decided when it runs, and what a layer can tell it by is a Dropout:
that of 1 is 0 or 1 / (1 - p) where it trains, and 1 where it does not.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites.ordered import searchsorted

__all__ = ["OF_FLAG", "REWRITES", "dropout"]

OF_FLAG = 0.5  # the rate of a Dropout that only tells whether the graph trains
_ALPHA = 1.7580993408473766  # minus the limit of SELU for x -> -inf


def _evaluates(device):
    """bool [], from the graph's flag."""
    return F.dropout(torch.ones((), device=device), OF_FLAG, training=True) == 1.0


def dropout(input, p, train):
    """torch.dropout; of a rate of 1 a product with 0, as in PyTorch: ONNX's rates are below 1."""
    return _all_dropped(input)[0] if train and p == 1.0 else torch.dropout(input, p, train)


def _native_dropout(input, p, train):
    train = train is None or train
    return _all_dropped(input) if train and p == 1.0 else torch.native_dropout(input, p, train)


def _all_dropped(input):
    """Nothing where the graph trains, else the input; and what is kept of it."""
    kept = _evaluates(input.device)
    return input * kept.to(input.dtype), kept.expand(input.shape)


def _feature_dropout(input, p, train):
    """Drop whole channels: one dropout per sample and channel, spread over the rest."""
    if not train or p == 0.0:
        return input
    samples_and_channels = list(input.shape[:2]) + [1] * (input.dim() - 2)
    return input * dropout(input.new_ones(samples_and_channels), p, train)


def _alpha_dropout(input, p, train):
    """a x + alpha a p where kept and -alpha a (1 - p) where dropped, a = 1 / sqrt((1 - p) (1 + p alpha^2))."""
    return _alpha_dropped(input, tuple(input.shape), p, train)


def _feature_alpha_dropout(input, p, train):
    """The same with one decision for each sample and channel."""
    return _alpha_dropped(input, (*input.shape[:2], *[1] * (input.dim() - 2)), p, train)


def _alpha_dropped(input, shape, p, train):
    if not train or p in (0.0, 1.0):
        return dropout(input, p, train)
    a = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * _ALPHA**2))
    # In float32: 1 / (1 - p) must not round to 1.
    drawn = F.dropout(torch.ones(shape, dtype=torch.float32, device=input.device), p, training=True)
    evaluates, kept = drawn == 1.0, drawn > 0.0
    slope = torch.where(evaluates, 1.0, torch.where(kept, a, 0.0)).to(input.dtype)
    shift = torch.where(evaluates, 0.0, torch.where(kept, _ALPHA * a * p, -_ALPHA * a * (1.0 - p))).to(input.dtype)
    return input * slope + shift


def _rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False):
    """x for x > 0, else r x: r uniform in [lower, upper] for each element where it trains, else their mean."""
    slope = (lower + upper) / 2
    if training:
        drawn = lower + (upper - lower) * torch.rand_like(input)
        slope = torch.where(_evaluates(input.device), slope, drawn).to(input.dtype)
    return torch.where(input > 0, input, input * slope)


def _bernoulli(input, p=None, *, generator=None):
    """1 with the probability `input`; not ONNX's Bernoulli, which ONNX Runtime's CPU (1.31) draws with 1 - p."""
    return (torch.rand_like(input) < (input if p is None else p)).to(input.dtype)


def _normal(mean=0.0, std=1.0, size=None, *, generator=None, **options):
    """torch.normal, which passes no gradient on."""
    if size is not None:
        return torch.randn(size, **options) * std + mean
    like = mean if isinstance(mean, torch.Tensor) else std
    shape = (mean + torch.zeros_like(like) * std) if isinstance(std, torch.Tensor) else like
    return stop_gradient(torch.randn_like(shape) * std + mean)


def _randint(*args, generator=None, dtype=torch.int64, **options):
    """torch.randint(low=0, high, size), from uniform numbers."""
    bounds, size = (args, options.pop("size")) if "size" in options else (args[:-1], args[-1])
    low, high = _bounds(bounds, options)
    return _whole(torch.rand(size, **options), low, high).to(dtype)


def _whole(uniform, low, high):
    """Whole numbers from [low, high); without any there PyTorch raises an error, too."""
    if isinstance(low, int) and isinstance(high, int) and low >= high:
        raise RuntimeError(f"random whole numbers need a bound below the other one, got {low} and {high}")
    return (uniform * (high - low)).floor() + low


def _bounds(given, named, low="low", high="high"):
    """Both bounds, of which `given` has the upper one or both and `named` what is given by name; these are taken out there."""
    bounds = [*given, *(named.pop(name) for name in (low, high) if name in named)]
    return bounds if len(bounds) == 2 else (0, *bounds)


def _randint_like(input, *bounds, generator=None, dtype=None, **options):
    """torch.randint_like(input, low=0, high), in the input's own type."""
    low, high = _bounds(bounds, options)
    drawn = torch.rand_like(input, dtype=torch.float32, **options)
    return _whole(drawn, low, high).to(dtype or input.dtype)


def _randperm(n, *, generator=None, dtype=torch.int64, **options):
    """The order of n uniform numbers."""
    return torch.rand(n, **options).argsort().to(dtype)


def _uniform_(input, *bounds, generator=None, **named):
    """Tensor.uniform_(from=0, to=1)."""
    low, high = (*bounds, *(named.get(*end) for end in (("from", 0.0), ("to", 1.0))[len(bounds) :]))
    return input.copy_(torch.rand_like(input) * (high - low) + low)


def _normal_(input, mean=0.0, std=1.0, *, generator=None):
    return input.copy_(torch.randn_like(input) * std + mean)


def _random_(input, *bounds, generator=None, **named):
    """Whole numbers from [from, to), from=0; without bounds all of the type, of which uniform numbers leave some out."""
    if not bounds and not named:
        return _refused("Tensor.random_ without bounds")()
    low, high = _bounds(bounds, named, "from", "to")
    return input.copy_(_whole(torch.rand_like(input, dtype=torch.float32), low, high))


def _exponential_(input, lambd=1.0, *, generator=None):
    return input.copy_(-torch.log(1.0 - torch.rand_like(input)) / lambd)


def _log_normal_(input, mean=1.0, std=2.0, *, generator=None):
    return input.copy_(torch.exp(torch.randn_like(input) * std + mean))


def _cauchy_(input, median=0.0, sigma=1.0, *, generator=None):
    return input.copy_(torch.tan(math.pi * (torch.rand_like(input) - 0.5)) * sigma + median)


def _geometric_(input, p, *, generator=None):
    """How often one tries until what has the probability p comes: 1 at least; for other p PyTorch raises an error, too."""
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ needs a probability between 0 and 1, got {p}")
    tries = torch.log(1.0 - torch.rand_like(input, dtype=torch.float32)) / math.log1p(-p)
    return input.copy_(tries.ceil().clamp(min=1.0))


def _bernoulli_(input, p=0.5, *, generator=None):
    return input.copy_((torch.rand_like(input) < p).to(input.dtype))


def _multinomial(input, num_samples, replacement=False, *, generator=None):
    """Places by their weights; not ONNX's Multinomial, which draws the same place again, and by a seed of its own.

    Of places whose times are exponential, w times as fast, the first are those that come without replacement.
    """
    weights = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    if replacement and num_samples > 1:
        sums = weights.cumsum(-1)
        drawn = torch.rand((*input.shape[:-1], num_samples), dtype=weights.dtype, device=input.device)
        return searchsorted(sums, drawn * sums[..., -1:], right=True)
    times = -torch.log(1.0 - torch.rand_like(weights))
    # Above 0, so that a place of weight 0 is none of the first.
    return (weights / times.clamp(min=torch.finfo(times.dtype).tiny)).topk(num_samples, dim=-1).indices


def _of_no_generator(function):
    """What the user's generator would draw is drawn by the graph, as all is."""
    return lambda *args, generator=None, **options: function(*args, **options)


def _refused(name):
    def draw(*args, **kwargs):
        raise UnsupportedModelError(
            f"forward draws random numbers by {name}, for which ONNX has no operator. Draw them before each step and pass "
            f"them as an input, or draw uniform or normal numbers (torch.rand, torch.randn) and compute with these."
        )

    return draw


def _in_place_dropout(dropout):
    """The in-place form as the plain one and a copy, which export alike."""

    def dropped(input, p, train):
        return input.copy_(dropout(input, p, train)) if train and p > 0.0 else input

    return dropped


def _in_place(function):
    return lambda input, *args, **kwargs: input.copy_(function(input, *args, **kwargs))


REWRITES = {
    torch.dropout: dropout,
    torch.dropout_: _in_place_dropout(dropout),
    torch.native_dropout: _native_dropout,
    torch.feature_dropout: _feature_dropout,
    torch.feature_dropout_: _in_place_dropout(_feature_dropout),
    torch.alpha_dropout: _alpha_dropout,
    torch.alpha_dropout_: _in_place_dropout(_alpha_dropout),
    torch.feature_alpha_dropout: _feature_alpha_dropout,
    torch.feature_alpha_dropout_: _in_place_dropout(_feature_alpha_dropout),
    torch.rrelu: _rrelu,
    torch.rrelu_: _in_place(_rrelu),
    **dict.fromkeys([torch.bernoulli, torch.Tensor.bernoulli], _bernoulli),
    **{drawn: _of_no_generator(drawn) for drawn in (torch.rand, torch.randn, torch.rand_like, torch.randn_like)},
    **dict.fromkeys([torch.multinomial, torch.Tensor.multinomial], _multinomial),
    torch.normal: _normal,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.poisson: _refused("torch.poisson"),
    torch.binomial: _refused("torch.binomial"),
    torch._standard_gamma: _refused("torch.distributions.Gamma (which Chi2, StudentT and others are made of)"),
    torch._sample_dirichlet: _refused("torch.distributions.Dirichlet, or Beta"),
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.cauchy_: _cauchy_,
    torch.Tensor.exponential_: _exponential_,
    torch.Tensor.geometric_: _geometric_,
    torch.Tensor.log_normal_: _log_normal_,
    torch.Tensor.normal_: _normal_,
    torch.Tensor.random_: _random_,
    torch.Tensor.uniform_: _uniform_,
}
