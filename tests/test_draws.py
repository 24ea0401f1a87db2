"""Random numbers of a generator of the user's: the graph draws its own; what forward seeds itself is refused, not drawn anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import orttrainer
from orttrainer.errors import UnsupportedModelError

GENERATOR = torch.Generator().manual_seed(0)


class Noisy(nn.Module):
    """The weight, 1, and the noise that `draw` gives for a batch."""

    def __init__(self, draw):
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.ones(())), draw

    def forward(self, x):
        return self.weight * x + self.draw(x)


def losses(draw, sizes=(2000, 2000, 1000)):
    model = Noisy(draw)
    trainer = orttrainer.trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0))
    return torch.stack([trainer.step(torch.zeros(size, 3), torch.zeros(size, 3))[0] for size in sizes])


SQUARES = {  # what the mean of the squares is
    "rand": (lambda x: torch.rand(len(x), 3, generator=GENERATOR), 1 / 3),
    "randn": (lambda x: torch.randn(x.shape, generator=GENERATOR, dtype=x.dtype), 1.0),
    "normal_": (lambda x: torch.empty_like(x).normal_(1.0, 2.0, generator=GENERATOR), 5.0),
    "seeded by NumPy": (
        lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(np.random.randint(2**31))), 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SQUARES)
def test_what_a_generator_of_the_users_would_draw_is_drawn_anew_in_each_step(name):
    draw, expected = SQUARES[name]
    found = losses(draw)
    torch.testing.assert_close(found, torch.full((3,), expected), rtol=0.1, atol=0.0)  # of 3,000 numbers and more
    assert len({*found.tolist()}) == 3


def reseeded(x):
    GENERATOR.manual_seed(3)
    return torch.empty_like(x).uniform_(generator=GENERATOR)


def forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.randn_like(x)


def dropped(x):
    torch.manual_seed(3)
    return nn.functional.dropout(x + 1, 0.5)


def twice(x):
    """What is drawn later from the same seed is the same, as in a Brownian path whose parts are not kept."""
    seed = np.random.randint(2**31)
    first, second = (torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)) for _ in range(2))
    return first + second


SEEDED = {
    "a new generator": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(3)),
    "integers": lambda x: torch.randint(0, 9, (len(x), 3), generator=torch.Generator().manual_seed(3)).float(),
    "an old generator": reseeded,
    "the common generator": forked,
    "dropout": dropped,
    "twice in one call": twice,
}


@pytest.mark.parametrize("name", SEEDED)
def test_numbers_that_each_call_draws_again_are_refused(name):
    with pytest.raises(UnsupportedModelError, match=r"seeds a random generator .* keep them in a buffer"):
        losses(SEEDED[name])


WITHOUT_OPERATOR = {
    "torch.poisson": lambda x: torch.poisson(x + 1),
    "torch.binomial": lambda x: torch.distributions.Binomial(3, torch.tensor(0.5)).sample(x.shape),
    "Gamma": lambda x: torch.distributions.Gamma(2.0, 3.0).sample(x.shape),
    "Beta": lambda x: torch.distributions.Beta(torch.ones(3), torch.ones(3)).sample(),
    "Tensor.random_ without bounds": lambda x: torch.empty_like(x).random_(),
}


@pytest.mark.parametrize("name", WITHOUT_OPERATOR)
def test_a_distribution_that_onnx_cannot_draw_from_is_refused_by_name(name):
    with pytest.raises(
        UnsupportedModelError, match=rf"draws random numbers by .*{name}.*before each step and pass them"
    ):
        losses(WITHOUT_OPERATOR[name])


def truncated(x):
    noise = torch.randn_like(x)
    while (noise.abs() > 1).any():
        noise = torch.where(noise.abs() > 1, torch.randn_like(x), noise)
    return noise


def first_above(x):
    while (drawn := torch.rand(()).item()) < 0.9:
        pass
    return drawn


REJECTED = {"by a truth": truncated, "by a number": first_above}


@pytest.mark.parametrize("name", REJECTED)
def test_numbers_that_are_drawn_until_they_fit_are_refused_where_they_are(name):
    """Where all draws are the same, the loop has no end."""
    with pytest.raises(UnsupportedModelError, match=r"until they are as it wants them, at .*test_draws\.py:\d+ \("):
        losses(REJECTED[name], sizes=(4,))
