"""Special functions train like in PyTorch, and so do their gradients where forward asks for them."""

from __future__ import annotations

import math

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch, vectors
from marks import slow
from torch import nn

# Each with bounds of its argument.
FUNCTIONS = {
    "digamma": (torch.digamma, 0.2, 12.0),
    "trigamma": (lambda x: torch.polygamma(1, x), 0.2, 12.0),
    "polygamma below 0": (lambda x: x.polygamma(2), -1.9, -1.1),
    "i0": (torch.i0, -5.0, 5.0),
    "i0e": (torch.special.i0e, -30.0, 30.0),
    "i1": (torch.special.i1, -5.0, 5.0),
    "i1e": (torch.special.i1e, -30.0, 30.0),
    "erfinv": (torch.erfinv, -0.95, 0.95),
    "ndtri": (torch.special.ndtri, 0.02, 0.98),
    "log_ndtr": (torch.special.log_ndtr, -10.0, 5.0),
    "erfc": (lambda x: x.erfc().log(), -2.0, 6.5),
    "erfcx": (torch.special.erfcx, -2.0, 20.0),
}
if torch.special.bessel_j0(torch.ones(1, requires_grad=True)).requires_grad:  # since torch 2.15
    FUNCTIONS |= {
        # At 5 PyTorch's are off by 4e-7.
        "j0": (torch.special.bessel_j0, 0.5, 4.5),
        "j1": (torch.special.bessel_j1, 0.5, 4.5),
        "j0 far": (torch.special.bessel_j0, -25.0, -13.0),
        "j1 far": (torch.special.bessel_j1, -25.0, -13.0),
        "modified i0": (torch.special.modified_bessel_i0, -5.0, 5.0),
        "modified i1": (torch.special.modified_bessel_i1, -5.0, 5.0),
    }


class Special(nn.Module):
    """Each function, of its argument between its bounds; or the slope of each."""

    def __init__(self, slopes):
        super().__init__()
        self.slopes, self.weights = slopes, nn.Parameter(torch.rand(len(FUNCTIONS), 6) + 0.5)

    def forward(self, x):
        found = []
        for (function, low, high), weight in zip(FUNCTIONS.values(), self.weights):
            at = low + (high - low) * torch.sigmoid(x * weight)
            y = function(at)
            found.append(torch.autograd.grad(y.sum(), at, create_graph=True)[0] if self.slopes else y)
        return torch.asinh(torch.stack(found, 1))  # none is too large


@pytest.mark.parametrize("slopes", [False, slow(True)], ids=["values", "slopes"])
def test_special_functions_train_as_in_pytorch(slopes):
    assert_trains_as_in_pytorch(lambda: Special(slopes), vectors, evaluates=not slopes)


FAR = {
    "trigamma": (FUNCTIONS["trigamma"][0], [1e-10, 1e-3, 0.5, 40.0, 1e6, -0.3, -7.75]),
    "i0": (torch.i0, [0.0, 14.99, 15.01, -60.0]),
    "i1": (torch.special.i1, [0.0, 1e-20, 14.99, 15.01, -60.0]),
    "i0e": (torch.special.i0e, [0.0, 1e4, -1e6]),
    "i1e": (torch.special.i1e, [0.0, 1e4, -1e6]),
    "j0": (torch.special.bessel_j0, [0.0, 14.99, 15.01, -60.0, 1e4]),
    "j1": (torch.special.bessel_j1, [0.0, 1e-20, 14.99, 15.01, -60.0, 1e4]),
    "ndtri": (torch.special.ndtri, [1e-37, 1e-12, 3e-4, 0.5, 1 - 1e-6, 0.0, 1.0]),
    "log_ndtr": (torch.special.log_ndtr, [-1e6, -40.0, -0.0, 0.0, 9.0, 40.0]),
    "erfcx": (torch.special.erfcx, [-9.0, -0.5, -0.0, 0.0, 3.0, 12.0, 1e6, math.inf]),
}


@pytest.mark.parametrize("name", FAR)
def test_far_from_the_middle_they_are_torch_s(name):
    from orttrainer.export.rewrites.spelled_out import REWRITES

    function, at = FAR[name]
    at = torch.tensor(at)
    original = torch.polygamma if name == "trigamma" else function
    rewritten = REWRITES[original](1, at) if name == "trigamma" else REWRITES[original](at)
    expected = function(at.double()).float()
    torch.testing.assert_close(rewritten, expected, rtol=3e-7, atol=1e-37)


class Diffracted(nn.Module):
    """A function that has no gradient before torch 2.15, of a parameter that has one by another way."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        return torch.special.bessel_j1(9 * x * self.weight) * self.weight


def test_a_function_has_a_gradient_where_pytorch_has_one():
    assert_trains_as_in_pytorch(Diffracted, vectors, evaluates=True)


@pytest.mark.slow
def test_distributions_of_trained_parameters_train_as_in_pytorch():
    """What a policy or a variational posterior asks for: log-probabilities and entropies."""
    from torch import distributions as d

    class Distributions(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            a, b = nn.functional.softplus(self.linear(x)).chunk(2, -1)
            a, b = a + 0.1, b + 0.1
            value = torch.sigmoid(x[:, :3])
            found = [d.Beta(a, b), d.Gamma(a, b), d.VonMises(a, b)]
            dirichlet = d.Dirichlet(a)
            inside = torch.softmax(value, -1)
            rest = [dirichlet.log_prob(inside), dirichlet.entropy(), d.Beta(a, b).entropy().sum(-1)]
            return torch.stack([p.log_prob(value).sum(-1) for p in found] + rest, -1)

    assert_trains_as_in_pytorch(Distributions, vectors, evaluates=False)
