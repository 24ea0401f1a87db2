"""Errors of Python's arithmetic, as of math.log(-1.0) and 1 / 0, that only some batches raise: caught, or told as PyTorch tells them."""

from __future__ import annotations

import math
import random
import statistics
from math import log as natural_logarithm
from statistics import mean as average

import numpy as np
import pytest
import torch
from said import RATE, Said, batch, engine_of, train
from test_caught import tried


def positive(x):
    return int((x > 0).sum())


def quotient(x):
    return 1 / positive(x)


def nan_if_negative(x):
    return (x.sum().sqrt() * 0 + 2).item()


ERRORS = ArithmeticError, ValueError
CAUGHT = {
    "logarithm": tried(lambda x: math.log(x.sum().item()), ERRORS),
    "logarithm, imported": tried(lambda x: natural_logarithm(x.sum().item()), ERRORS),
    "power": tried(lambda x: math.pow(x.sum().item(), 0.5), ERRORS),
    "overflow": tried(lambda x: min(math.exp(1000 * x.sum().item()), 2.0), ERRORS),
    "quotient of whole numbers": tried(lambda x: 7 // positive(x), ERRORS),
    "quotient in a function": tried(lambda x: quotient(x), ERRORS),
    "power of 0": tried(lambda x: positive(x) ** -1, ERRORS),
    "whole number of NaN": tried(lambda x: int(nan_if_negative(x)), ERRORS),
    "floor of NaN": tried(lambda x: math.floor(nan_if_negative(x)), ERRORS),
    "logarithm, of the layer": tried(lambda x: math.log((x.sum() * 1.0).item()) if x.sum() < 9 else 1.0, ERRORS),
    "remainder": tried(lambda x: 7 % positive(x) + 1, ERRORS),
    "root": tried(lambda x: math.sqrt(x.sum().item()), ERRORS),
    "divmod": tried(lambda x: divmod(7, positive(x))[0], ERRORS),
    "quotient of floats": tried(lambda x: 1.0 / x.clamp(min=0).sum().item(), ERRORS),
    "all errors": tried(lambda x: math.log(x.sum().item()), Exception),
}
SHORT = {"logarithm, imported", "overflow", "quotient in a function", "whole number of NaN"}


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in CAUGHT
])  # fmt: skip
def test_an_error_that_some_batches_raise_is_caught_for_these(name, first):
    assert train(CAUGHT[name], [batch(first + number) for number in range(4)]) == 2


RAISED = {
    "logarithm": lambda x: math.log(x.sum().item()),
    "quotient": lambda x: 1 / positive(x),
    "whole number of NaN": lambda x: int(nan_if_negative(x)),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "quotient" else pytest.mark.slow) for name in RAISED
])  # fmt: skip
def test_an_error_that_a_later_batch_raises_is_pythons_and_nothing_is_lost(name):
    torch.manual_seed(0)
    module = Said(RAISED[name])
    engine = engine_of(module)
    engine.train_step(batch(0), RATE)
    before = {key: x.clone() for key, x in module.state_dict().items()}
    with pytest.raises(ERRORS) as expected:
        module(**batch(1))
    with pytest.raises(type(expected.value), match=str(expected.value)):
        engine.train_step(batch(1), RATE)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    engine.train_step(batch(2), RATE)
    assert len(engine._ways.known) == 1


DEFINED = {
    "NaN, which is a logarithm": lambda x: 2.0 if math.isnan(math.log(nan_if_negative(x))) else 3.0,
    "NaN, which is no number": lambda x: 2.0 if (v := nan_if_negative(x)) != v else 3.0,
    "NaN, which is not more": lambda x: 2.0 if nan_if_negative(x) > 1 else 3.0,
    "NumPy's quotient": lambda x: float(np.minimum(1.0 / x.clamp(min=0).sum().numpy(), 7.0)),
    "the first that is true": tried(lambda x: (x[:, 0] > 0).tolist().index(True) + 2.0, ERRORS, 4.0),
    "numbers of two calls": lambda x: (
        min(x[0].tolist()[1] / x.amax().item(), math.exp(x.amin().item())) if x[0].tolist()[0] > 0 else 3.0
    ),
    "quotients below 0": lambda x: int(x.sum() * 3) // 4 + 7 // int(x.sum() * 9) + 0.5 * divmod(int(x.sum() * 5), 3)[0],
    "remainders of floats": lambda x: x.sum().item() % 1 + 7.5 // x.sum().item() + divmod(x.sum().item(), 0.3)[1],
    "a decision by a floor": lambda x: 2.0 if math.floor(x.sum().item()) > 1 else 3.0,
    "a generator's seed": lambda x: random.Random((x > 0).sum().item()).uniform(2, 3),
    "close": lambda x: 2.0 if math.isclose(x.sum().item(), 5.0, rel_tol=0.5) else 3.0,
    "rounded": lambda x: round(x.sum().item(), 1) + round(x.sum().item()),
    "sums": lambda x: math.fsum(x.sum(1).tolist()) + math.dist(x[0].tolist(), x[1].tolist()),
    "parts and means": lambda x: (
        math.cbrt(v := x.sum().item())
        + math.exp2(v / 4)
        + 2 * math.modf(v)[0]
        + math.modf(v)[1]
        + statistics.fmean(x[0].tolist())
        + average(x[1].tolist())
        + statistics.fmean([1.0, 2.0], weights=[1.0, 3.0])
    ),
    "functions": lambda x: (
        math.erfc(v := abs(x.sum().item()) + 2) + math.acosh(v) + math.atanh(1 / v) + math.lgamma(v) + math.fmod(v, 0.5)
    ),
}


ALSO_SHORT = {"NaN, which is not more", "numbers of two calls", "quotients below 0", "remainders of floats", "rounded"}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ALSO_SHORT else pytest.mark.slow) for name in DEFINED
])  # fmt: skip
def test_what_python_computes_without_an_error_is_each_batchs(name):
    train(DEFINED[name], [batch(number) for number in range(3)])


def matrix(x, scale=1.0):
    """[[s, 0], [0, 1]], s of the sum's sign."""
    return torch.diag(torch.stack([x.sum().sign() * scale, torch.ones(())]))


def safe_factor(x):
    """As libraries of Gaussian processes have it: more is added to the diagonal until there is a factor."""
    for jitter in (0.0, 0.5, 2.0):
        factor, info = torch.linalg.cholesky_ex(matrix(x) + jitter * torch.eye(2))
        if not torch.any(info):
            return factor.sum()
    return x.sum()


MATRICES = {
    "Cholesky": tried(lambda x: torch.linalg.cholesky(matrix(x)).sum()),
    "Cholesky, as torch reports it": safe_factor,
    "inverse": tried(lambda x: torch.linalg.inv(matrix(x.clamp(min=0))).sum()),
    "solution": tried(lambda x: torch.linalg.solve(matrix(x.clamp(min=0)), torch.ones(2)).sum()),
    "LU": tried(lambda x: torch.linalg.lu_factor(matrix(x.clamp(min=0)))[0].sum()),
    "inverse, as torch reports it": lambda x: (
        (torch.linalg.inv_ex(matrix(x.clamp(min=0)))[1] > 0).float() + torch.linalg.cholesky_ex(matrix(x))[1] + 1
    ),
}


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if "reports" in name else pytest.mark.slow) for name in MATRICES
])  # fmt: skip
def test_a_matrix_without_a_factor_is_that_of_its_batch(name, first):
    train(MATRICES[name], [batch(first + number) for number in range(4)])


def test_a_matrix_without_a_factor_in_a_later_batch_is_torchs_error():
    module = Said(lambda x: torch.linalg.cholesky(matrix(x)).sum())
    engine = engine_of(module)
    engine.train_step(batch(0), RATE)
    with pytest.raises(torch.linalg.LinAlgError, match="leading minor of order 1 is not positive-definite"):
        engine.train_step(batch(1), RATE)
    engine.train_step(batch(2), RATE)


def density(x, **options):
    normal = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2) + x[:2, :2].mT @ x[:2, :2], **options)
    return normal.log_prob(x[:, :2])


CHECKED = {  # each in one line, which is where its checks are, too
    "a factor": lambda x: density(x).mean(),
    "a factor, checks asked for": lambda x: density(x, validate_args=True).mean(),
    "an if": lambda x: 2.0 if torch.distributions.Normal(0.0, 1.0).log_prob(x + x[0].sum()).mean() < -2.0 else 3.0,
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_a_distribution_of_torchs_checks_is_no_decision_of_forwards(name):
    train(CHECKED[name], [batch(number) for number in range(4)])
