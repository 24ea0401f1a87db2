"""Iterators that forward goes on with: a graph would have for ever what they gave on the first batch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import orttrainer
from orttrainer.errors import UnsupportedModelError


def rising():
    """As a warm-up: the same for longer than a first step asks."""
    for _ in range(100):
        yield 1.0
    while True:
        yield 2.0


SHARED = rising()
KEPT = {
    "a generator": rising,
    "a cycle": lambda: itertools.cycle([1.0] * 100 + [2.0]),
    "of a list": lambda: iter([1.0] * 100 + [2.0] * 100),
    "whole numbers": lambda: itertools.chain([1] * 100, itertools.count(2)),
    "tensors": lambda: itertools.cycle([torch.ones(4)] * 100 + [torch.zeros(4)]),
    "truths": lambda: itertools.chain([True] * 100, itertools.repeat(False)),
}


class Kept(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), kept

    def forward(self, x):
        return (self.layer(x) * self.value()).square().mean()

    def value(self):
        return next(self.kept)


class InAList(Kept):
    def value(self):
        return next(self.kept[0])


class Looped(Kept):
    def value(self):
        return next(iter(zip(self.kept, range(1))))[0]


class Closed(Kept):
    def value(self):
        return self.kept()


class OfAll(Kept):
    def value(self):
        return next(SHARED)


class OfTheClass(Kept):
    steps = rising()

    def value(self):
        return next(self.steps)


class Named(Kept):
    """Counts its calls for whoever looks."""

    def value(self):
        self.name = f"call {next(self.kept)}"
        return 2.0


def around(kept):
    return lambda: next(kept)


def made(module):
    return orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), 0.1))


@pytest.mark.parametrize("kind", KEPT)
def test_an_iterator_that_the_module_has_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match="forward changes 'kept' and computes with it in a later call"):
        made(Kept(KEPT[kind]())).step(torch.randn(5, 4))


ELSEWHERE = {
    "kept.0": lambda: InAList([rising()]),
    "kept": lambda: Looped(rising()),
    "kept.kept": lambda: Closed(around(rising())),
    "SHARED": lambda: OfAll(None),
    "steps": lambda: OfTheClass(None),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_iterator_is_refused_wherever_it_is(name):
    with pytest.raises(UnsupportedModelError, match=rf"forward changes '.*{name}' and computes with it"):
        made(ELSEWHERE[name]()).step(torch.randn(5, 4))
    assert next(SHARED) == 1.0  # and is back in its place


def test_one_whose_numbers_make_no_difference_is_not():
    torch.manual_seed(0)
    module = Named(itertools.count())
    twin = Named(itertools.count())
    twin.load_state_dict(copy.deepcopy(module.state_dict()))
    trainer, optimizer = made(module), torch.optim.SGD(twin.parameters(), 0.1)
    for step in range(2):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        loss, _ = trainer.step(x)
        expected = twin(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    assert isinstance(module.kept, itertools.count)
