"""Random numbers: of a generator of the user's the graph draws its own; what forward seeds itself is refused, not drawn anew; what they always say is no decision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fidelity import assert_trains_as_in_pytorch, vectors
from marks import in_turn
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


class Dropped(nn.Linear):
    """A layer that is left out with a probability of 0, as torchaudio asks for it, or always."""

    def __init__(self, skips):
        super().__init__(6, 6)
        self.skips = skips

    def forward(self, x):
        return x + self.bias if self.training and self.skips(torch.rand(1)) else super().forward(x)


SKIPS = {
    "never, up to 0": lambda draw: draw.item() <= 0.0,
    "never, below": lambda draw: float(draw) < 0,
    "never, to keep it": lambda draw: not draw.item() < 1 - 0.0,
    "never, from 1": lambda draw: draw.item() >= 1.0,
    "never, of each": lambda draw: torch.rand(2, 3).tolist()[1][2] > 1,
    "never, by a truth": lambda draw: draw <= 0.0,
    "always, up to 1": lambda draw: draw.item() <= 1.0,
    "always, from 0": lambda draw: draw.item() >= 0,
}


@pytest.mark.parametrize("skips", in_turn(SKIPS))
def test_what_drawn_numbers_always_say_is_no_decision_by_chance(skips):
    assert_trains_as_in_pytorch(lambda: Dropped(skips), vectors, evaluates=False)


@pytest.mark.parametrize("change", [lambda draw: draw - 0.5, lambda draw: draw.sub_(0.5)])
def test_what_is_computed_of_drawn_numbers_is_a_decision_by_chance(change):
    with pytest.raises(UnsupportedModelError, match="decides by random numbers"):
        assert_trains_as_in_pytorch(lambda: Dropped(lambda draw: change(draw).item() <= 0.0), vectors, evaluates=False)
