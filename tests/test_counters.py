"""What a loss or forward counts or averages for itself, wherever it is kept, is refused by name where it is computed with."""

from __future__ import annotations

import collections
import functools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fidelity import RATE, Loss, described, vectors
from small import make
from torch import nn

import orttrainer
from orttrainer.errors import UnsupportedModelError


def of_variable():
    calls = 0

    def loss(y, t):
        nonlocal calls
        calls += 1
        return annealed(y, t, calls)

    return loss


def of_global(y, t):
    global CALLS
    CALLS += 1
    return annealed(y, t, CALLS)


CALLS = 0


def of_dict():
    numbers = {"calls": 0}

    def loss(y, t):
        numbers["calls"] += 1
        return annealed(y, t, numbers["calls"])

    return loss


def of_function():
    def loss(y, t):
        loss.calls += 1
        return annealed(y, t, loss.calls)

    loss.calls = 0
    return loss


class Counting:
    def __init__(self, first=0):
        self.calls = first

    def __call__(self, y, t):
        self.calls = self.calls + 1
        return annealed(y, t, self.calls)

    def by_name(self, y, t, weight):
        return self(y, t) * weight


class CountingInASlot(Counting):
    __slots__ = ("calls",)


class CountingOfAll(Counting):
    calls = 0

    def __init__(self):
        pass

    def __call__(self, y, t):
        type(self).calls += 1
        return annealed(y, t, self.calls)


def of_rate():
    weight = SimpleNamespace(rate=1.0)

    def loss(y, t):
        weight.rate *= 0.9999
        return nn.functional.mse_loss(y, t) + weight.rate

    return loss


def annealed(y, t, calls):
    """The weight of a term grows by 1e-4 a call, as that of a variational autoencoder's divergence: two calls tell little."""
    return nn.functional.mse_loss(y, t) + 0.01 * torch.as_tensor(min(1.0, calls / 10000)).sum()


def trained_with(loss):
    """The loss of a step of a linear layer."""
    layer = nn.Linear(6, 6)
    return orttrainer.trainer(layer, loss, torch.optim.SGD(layer.parameters(), lr=0.1)).step(
        torch.randn(4, 6), torch.zeros(4, 6)
    )[0]


SLOW = {
    "a variable": (of_variable, "loss_fn.calls"),
    "a global": (lambda: of_global, f"{__name__}.CALLS"),
    "an entry of a dict": (of_dict, "loss_fn.numbers.calls"),
    "an attribute of a function": (of_function, "loss_fn.calls"),
    "an attribute of an object": (Counting, "loss_fn.calls"),
    "a tensor of an object": (lambda: Counting(torch.zeros(())), "loss_fn.calls"),
    "an array of an object": (lambda: Counting(np.zeros(1)), "loss_fn.calls"),
    "an attribute of a slot": (CountingInASlot, "loss_fn.calls"),
    "an attribute of a class": (CountingOfAll, "loss_fn.calls"),
    "an attribute of a method's object": (lambda: functools.partial(Counting().by_name, weight=1.0), "loss_fn.calls"),
    "a rate that goes down": (of_rate, "loss_fn.weight.rate"),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_loss_that_counts_its_calls_is_refused_by_name(case):
    make_loss, name = SLOW[case]
    with pytest.raises(UnsupportedModelError, match=f"changes '{name}' and computes.*a loss may be a module"):
        trained_with(make_loss())


def centered_by_variable():
    center = None

    def loss(y, t):
        nonlocal center
        center = averaged(center, y)
        return nn.functional.mse_loss(y - center, t)

    return loss


def centered_by_dict():
    centers = {"one": None}

    def loss(y, t):
        centers["one"] = averaged(centers["one"], y)
        return nn.functional.mse_loss(y - centers["one"], t)

    return loss


def centered_by_deque():
    seen = collections.deque(maxlen=10)

    def loss(y, t):
        seen.append(y.detach().mean(0))
        return nn.functional.mse_loss(y - torch.stack([*seen]).mean(0), t)

    return loss


class CenteredInPlace:
    center = None

    def __call__(self, y, t):
        if self.center is None:
            self.center = averaged(None, y)
        else:
            self.center.copy_(averaged(self.center, y))
        return nn.functional.mse_loss(y - self.center, t)


def averaged(center, y):
    """Begins with the first batch, so that a second call on it gives the same."""
    return y.detach().mean(0) if center is None else 0.9 * center + 0.1 * y.detach().mean(0)


AVERAGES = {
    "a variable": (centered_by_variable, "loss_fn.center"),
    "an entry of a dict": (centered_by_dict, "loss_fn.centers.one"),
    "a deque": (centered_by_deque, "loss_fn.seen"),
    "an attribute that is written to": (CenteredInPlace, "loss_fn.center"),
}


@pytest.mark.parametrize("case", AVERAGES)
def test_a_loss_that_computes_with_an_average_of_its_own_is_refused_by_name(case):
    make_loss, name = AVERAGES[case]
    with pytest.raises(UnsupportedModelError, match=f"changes '{name}' and computes"):
        trained_with(make_loss())


LAST, LASTS = None, {}


class Remembers(nn.Linear):
    """Computes with what the batch before gave."""

    def __init__(self, last):
        super().__init__(6, 6)
        self.last = last

    def forward(self, x):
        y = super().forward(x)
        return y + self.last(y.detach().mean(0))


def of_a_global(mean):
    global LAST
    last, LAST = mean if LAST is None else LAST, mean
    return last


def of_an_entry(mean):
    last = LASTS.get("mean", mean)
    LASTS["mean"] = mean
    return last


def of_an_entry_that_is_asked_for(mean):
    last = LASTS["mean"] if "mean" in LASTS else mean  # noqa: SIM401
    LASTS["mean"] = mean
    return last


REMEMBERED = {
    "a global": (of_a_global, "test_counters.LAST"),
    "an entry": (of_an_entry, "test_counters.LASTS.mean"),
    "an entry that is asked for": (of_an_entry_that_is_asked_for, "test_counters.LASTS.mean"),
}


@pytest.mark.parametrize("begun", [False, True], ids=["empty", "begun"])
@pytest.mark.parametrize("case", REMEMBERED)
def test_a_forward_that_computes_with_the_batch_before_is_refused_by_name(case, begun, monkeypatch):
    last, name = REMEMBERED[case]
    monkeypatch.setitem(globals(), "LAST", torch.ones(6) if begun else None)
    monkeypatch.setitem(globals(), "LASTS", {"mean": torch.ones(6)} if begun else {})
    module = Remembers(last)
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=RATE))
    with pytest.raises(UnsupportedModelError, match=f"changes '{name}' and computes"):
        trainer.step(*vectors(0), *vectors(0))


def test_a_loss_that_keeps_its_values_trains_and_is_told_that_later_ones_are_not_kept(caplog):
    values = []

    def loss(y, t):
        values.append(nn.functional.mse_loss(y, t).detach())
        return nn.functional.mse_loss(y, t)

    with caplog.at_level(logging.WARNING, "orttrainer"):
        assert trained_with(loss).isfinite()
    assert "write to 'loss_fn.values'" in caplog.text


def test_a_layers_buffer_that_is_an_attribute_of_another_is_not_told_to_be_written_to(caplog):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.statistics, model[0].mean = [model[1].running_mean], model[1].running_mean  # as the degrees of nflows' MADE
    x = torch.randn(4, 3)
    with caplog.at_level(logging.WARNING, "orttrainer"):
        orttrainer.trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)).step(x, x)
    assert "write to" not in caplog.text


def test_a_loss_that_only_counts_trains_and_the_count_goes_on_by_few():
    counting = Counting()

    def loss(y, t):
        counting(y, t)
        return nn.functional.mse_loss(y, t)

    assert trained_with(loss).isfinite()
    assert counting.calls < 20  # of the first step, not of a million


class Bank(nn.Linear):
    """Keeps outputs in rows of a buffer, which no output of this call or the next shows."""

    def __init__(self, place):
        super().__init__(6, 6)
        self.place = place
        self.register_buffer("rows", torch.zeros(3, 6))
        self.calls = 0

    def forward(self, x):
        y = super().forward(x)
        result = y + self.rows.sum()
        row = self.place(self)
        if row is not None:
            self.rows[row] = y.detach()[0]
        return result


def next_row(layer):
    layer.calls = (layer.calls + 1) % 3
    return layer.calls


def every_fifth(layer):
    layer.calls += 1
    return 0 if layer.calls % 5 == 0 else None


@pytest.mark.parametrize("place", [next_row, every_fifth])
def test_what_is_written_by_a_count_is_refused_by_its_name(place):
    with pytest.raises(UnsupportedModelError, match=r"changes 'layer\.calls' and computes"):
        make(Loss(Bank(place)), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
