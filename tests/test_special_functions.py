"""Special functions in the forms that are exported: in float64, at their ends and poles."""

import math

import numpy as np
import torch
from scipy import special

from orttrainer.export.rewrites import incomplete_gamma, modified_bessel
from orttrainer.export.rewrites import special as gamma


def test_ends_of_the_incomplete_gamma_functions_are_torch_s():
    ends = torch.tensor([0.0, 0.5, math.inf, math.nan, -1.0], dtype=torch.float64)
    a, x = torch.cartesian_prod(ends, ends).T
    for ours, theirs in ((incomplete_gamma._igamma, torch.igamma), (incomplete_gamma._igammac, torch.igammac)):
        torch.testing.assert_close(ours(a, x), theirs(a, x), equal_nan=True)


def test_special_functions_are_those_of_scipy_in_float64():
    dice = np.random.default_rng(0)
    a = np.exp(dice.uniform(-5, 7, 500))
    x = a * np.exp(dice.normal(0, 2, 500) / np.sqrt(1 + a))
    z = np.exp(dice.uniform(-9, 5, 500))
    for ours, theirs, *operands in (
        (incomplete_gamma._igamma, special.gammainc, a, x),
        (incomplete_gamma._igammac, special.gammaincc, a, x),
        (gamma._zeta, special.zeta, 1 + a[a < 50], z[a < 50]),
        (modified_bessel.REWRITES[torch.special.modified_bessel_k0], special.k0, z),
        (modified_bessel.REWRITES[torch.special.modified_bessel_k1], special.k1, z),
        (modified_bessel.REWRITES[torch.special.scaled_modified_bessel_k0], special.k0e, z),
        (modified_bessel.REWRITES[torch.special.scaled_modified_bessel_k1], special.k1e, z),
    ):
        np.testing.assert_allclose(ours(*map(torch.tensor, operands)), theirs(*operands), rtol=2e-11, atol=1e-300)


def test_poles_of_the_gamma_function_are_torch_s():
    poles = torch.tensor([0.0, -1.0, -2.0, -7.0])
    for ours, theirs in ((gamma.lgamma, torch.lgamma), (gamma._digamma, torch.digamma)):
        torch.testing.assert_close(ours(poles), theirs(poles), equal_nan=True)
