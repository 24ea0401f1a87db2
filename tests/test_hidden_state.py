"""What forward keeps where a graph cannot keep it is refused by name, and the module is left as it was."""

from __future__ import annotations

import collections
import copy
import itertools
import logging
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fidelity import RATE, Loss, Written, described, vectors
from small import make
from torch import nn

from orttrainer.errors import UnsupportedModelError


class Layer(nn.Linear):
    """forward(x) = linear(x) * change(self), a number or a tensor."""

    def __init__(self, change, **attributes):
        super().__init__(6, 6)
        vars(self).update(attributes)
        self.change = change

    def forward(self, x):
        return super().forward(x) * self.change(self)


class Recurrent(nn.Module):
    """Goes on from the state in which the last batch left it, as truncated backpropagation through time does."""

    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.LSTMCell(6, 6), None

    def forward(self, x):
        h, c = self.cell(x, self.state)
        self.state = h.detach(), c.detach()
        return h


class Codebook(nn.Module):
    """Makes a parameter anew in each call, as a well-known VQ-VAE does."""

    def __init__(self):
        super().__init__()
        self.linear, self.code = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x):
        y = self.linear(x)
        result = y * self.code.detach()
        self.code = nn.Parameter(self.code * 0.9 + y.mean(0) * 0.1)
        return result


class Unregistered(nn.Linear):
    """Has a buffer from the first call on."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mean", None)

    def forward(self, x):
        y = super().forward(x)
        self.mean = y.detach().mean(0) if self.mean is None else self.mean * 0.9
        return y + self.mean


class Averaged(nn.Linear):
    """Begins an average, in a buffer that is None before, with the first batch, so that this one again gives the same."""

    def __init__(self, once=False):
        super().__init__(6, 6)
        self.register_buffer("mean", None)
        self.once = once

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        elif not self.once:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean)


class AveragedWhenItIsThere(nn.Linear):
    """Has an average from the first call on."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        return super().forward(x - self.mean)


class Tabled(nn.Linear):
    """Makes a table of constants in the first call."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("table", None)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(6.0)
        return super().forward(x) * self.table


class ScaledByTheFirst(nn.Linear):
    """Takes its scale from the first batch, as the activation normalization of a flow does."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("scale", torch.ones(()))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.scale.copy_(x.std())
            self.ready = True
        return super().forward(x) / self.scale


class RunningMean(nn.Linear):
    """Begins a moving average with the first batch, so that the same batch again does not change it."""

    def __init__(self):
        super().__init__(6, 6)
        self.mean = None

    def forward(self, x):
        y = super().forward(x)
        self.mean = y.detach().mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Random(nn.Linear):
    """Draws from torch, which a graph does as well, and counts its calls."""

    def __init__(self):
        super().__init__(6, 6)
        self.calls = [0]

    def forward(self, x):
        return super().forward(x + torch.randn_like(x)) * counted(self)


class Masked(nn.Linear):
    """Makes its mask by NumPy; its first call sets a hook, which later ones have."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        if not self._forward_hooks:
            self.register_forward_hook(lambda *of_a_call: None)
        mask = np.random.rand(6) < 0.5
        return super().forward(x) * torch.from_numpy(mask)


def counted(layer):
    layer.calls[0] += 1
    return layer.calls[0]


def counted_in_dict(layer):
    layer.calls["n"] += 1
    return layer.calls["n"]


def counted_in_attribute(layer):
    layer.calls += 1
    return layer.calls


def kept(layer):
    layer.calls.append(torch.ones(6))
    return sum(layer.calls)


def kept_apart(layer):
    layer.other.calls = layer.other.calls + 1
    return layer.other.calls


class Holder:
    calls = 0


def counted_apart():
    numbers = itertools.count(1)
    return Layer(lambda layer: next(numbers))


def drawn_apart():
    generator = random.Random(0)
    return Layer(lambda layer: 2 if generator.random() < 1e-6 else 1)


def counted_for_long(layer):
    layer.calls += 1
    return 2.0 if layer.calls < 500 else 1.0


def kept_for_long(layer):
    layer.calls.append(0.0)
    return 2.0 if len(layer.calls) > 30 else 1.0


def kept_by_number(layer):
    layer.calls[len(layer.calls)] = 0.0
    return 2.0 if len(layer.calls) > 30 else 1.0


class Largest(nn.Linear):
    """Divides by the largest mean of all batches, which the same batch again does not change."""

    def __init__(self, begun=-math.inf):
        super().__init__(6, 6)
        self.largest = torch.tensor(begun)

    def forward(self, x):
        self.largest = self.largest.maximum(x.mean())
        return super().forward(x) / (3 + self.largest)


class Found(nn.Linear):
    """Is another once a batch has had a mean below zero."""

    def __init__(self):
        super().__init__(6, 6)
        self.found = False

    def forward(self, x):
        if x.mean() < 0:
            self.found = True
        return super().forward(x) * (2.0 if self.found else 1.0)


REFUSED = {
    "a number": (lambda: Layer(counted_in_attribute, calls=0), "changes 'layer.calls' and computes"),
    "a number that counts to a warm-up's end": (lambda: Layer(counted_for_long, calls=0), "changes 'layer.calls' and"),
    "a tensor, in place": (lambda: Layer(counted_in_attribute, calls=torch.zeros(6)), "changes 'layer.calls' and"),
    "an array": (lambda: Layer(lambda layer: float(counted_in_attribute(layer)), calls=np.zeros(())), "'layer.calls' and"),
    "a list": (lambda: Layer(counted, calls=[0]), "changes 'layer.calls' and computes"),
    "a dict": (lambda: Layer(counted_in_dict, calls={"n": 0}), "changes 'layer.calls' and computes"),
    "a deque": (lambda: Layer(kept, calls=collections.deque()), "changes 'layer.calls' and computes"),
    "a list that is longer after many calls": (lambda: Layer(kept_for_long, calls=[]), "changes 'layer.calls' and computes"),
    "a deque that is full after many calls": (
        lambda: Layer(kept_for_long, calls=collections.deque(maxlen=40)), "changes 'layer.calls' and computes",
    ),
    "a dict by the number of a call": (lambda: Layer(kept_by_number, calls={}), "changes 'layer.calls' and computes"),
    "a list of another object, that is longer": (
        lambda: Layer(lambda layer: kept_for_long(layer.other), other=SimpleNamespace(calls=[])), "'layer.other.calls' and",
    ),
    "the largest of all batches": (Largest, "changes 'layer.largest' and computes"),
    "the largest of later batches": (lambda: Largest(0.1), "changes 'layer.largest' and computes"),
    "what another batch sets": (Found, "changes 'layer.found' and computes"),
    "a list beside random numbers": (Random, "changes 'layer.calls' and computes"),
    "the state of a recurrence": (Recurrent, "changes 'layer.state' and computes.*register_buffer"),
    "an average that begins with the first batch": (RunningMean, "changes 'layer.mean' and computes"),
    "a scale from the first batch": (ScaledByTheFirst, "changes 'layer.ready' and computes"),
    "a parameter made anew": (Codebook, "makes 'layer.code' anew.*requires_grad_"),
    "a buffer made by the first call": (Unregistered, "makes 'layer.mean' anew.*run one batch through the module"),
    "an average in a buffer that was None": (Averaged, "makes 'layer.mean' anew.*run one batch through the module"),
    "a mean of the first batch in a buffer that was None": (lambda: Averaged(once=True), "makes 'layer.mean' anew"),
    "a mean of the first batch in a new buffer": (AveragedWhenItIsThere, "makes 'layer.mean' anew.*run one batch through"),
    "another object": (lambda: Layer(kept_apart, other=Holder()), "changes 'layer.other.calls' and computes"),
    "a closure": (counted_apart, "when it is called again.*global variable.*or the time"),
    "random numbers of Python's": (lambda: Layer(lambda layer: random.random()), "random numbers of Python's or NumPy's"),
    "random numbers of NumPy's": (lambda: Layer(lambda layer: np.random.rand()), "random numbers of Python's or NumPy's"),
    "random numbers beside hooks of the first call": (  # as Wav2Vec2 of transformers
        Masked, r"NumPy's at .*test_hidden_state.py:\d+ \(mask = np.random.rand\(6\) < 0.5\).*apply_spec_augment=False",
    ),
    "random numbers of little weight": (lambda: Layer(lambda layer: 1 + 1e-4 * random.random()), "of Python's or NumPy's"),
    "a choice of NumPy's of little weight": (
        lambda: Layer(lambda layer: 1 + 1e-5 * np.random.choice(9)), "random numbers of Python's or NumPy's",
    ),
    **{
        f"a rare decision by a generator, {name}": (
            lambda rng=rng: Layer(lambda layer: 2 if layer.other.random() < 1e-6 else 1, other=rng()),
            "random numbers of Python's or NumPy's, of the generator 'layer.other', and computes",
        )
        for name, rng in {
            "of NumPy's": lambda: np.random.default_rng(0),
            "of NumPy's, the old way": lambda: np.random.RandomState(0),
            "of Python's": lambda: random.Random(0),
        }.items()
    },
    "a generator around a function": (drawn_apart, "of the generator '.*generator', and computes"),
    **{
        f"a rare decision by {name} numbers": (
            lambda draw=draw: Layer(lambda layer: 2 if draw() < 1e-6 else 1), "random numbers of Python's or NumPy's.*layerdrop",
        )
        for name, draw in {
            "Python's": lambda: random.random(),
            "Python's uniform": lambda: random.uniform(0, 1),
            "NumPy's": lambda: np.random.rand(),
            "NumPy's uniform": lambda: np.random.uniform(size=(2, 3))[1, 2],
            "an array of NumPy's": lambda: np.random.random((2, 3)).max(),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_kept_outside_of_buffers_is_refused_by_name(case):
    make_layer, text = REFUSED[case]
    random.seed(1)
    module = Loss(make_layer())
    with pytest.raises(UnsupportedModelError, match=text):
        make(module, loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)


def test_a_table_that_the_first_call_makes_is_a_constant_and_said_not_to_be_kept(caplog):
    module = Loss(Tabled())
    with caplog.at_level(logging.WARNING, "orttrainer"):
        assert make(module, loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)[0].isfinite()
    assert "makes 'layer.table', which no later call computes with" in caplog.text


@pytest.mark.parametrize("calls", [torch.zeros(6), [0], {"n": 0, "more": [1]}, collections.deque([1.0])], ids=type)
def test_a_refusal_leaves_attributes_as_they_were(calls):
    change = {torch.Tensor: counted_in_attribute, list: counted, dict: counted_in_dict, collections.deque: kept}
    layer, before = Layer(change[type(calls)], calls=calls), copy.deepcopy(calls)
    with pytest.raises(UnsupportedModelError):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert layer.calls is calls
    assert torch.equal(calls, before) if isinstance(calls, torch.Tensor) else calls == before


WRITES = {
    "data assigned": lambda code, y: setattr(code, "data", code.data * 0.999 + y * 0.001),
    "data changed": lambda code, y: code.data.mul_(0.999).add_(y, alpha=0.001),
    "in place": lambda code, y: code.lerp_(y, 0.001),
    "several": lambda code, y: torch._foreach_mul_([code], 0.999),
    "by an operator": lambda code, y: code.data.__iadd__(y),
    "out": lambda code, y: torch.mul(code, 0.999, out=code),
}


@pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
def test_a_trained_parameter_that_forward_changes_is_refused_and_not_changed(change):
    layer = Written(change, trained=True)
    with pytest.raises(
        UnsupportedModelError, match=r"changes the parameter 'layer\.code' in place.*requires_grad_\(False"
    ):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert torch.equal(layer.code, torch.ones(6))


def test_a_frozen_parameter_in_the_memory_of_a_trained_one_is_refused():
    layer = Written(lambda code, y: None, trained=True)
    layer.other = nn.Parameter(torch.zeros(6), requires_grad=False)
    layer.change = lambda code, y: setattr(layer.other, "data", code.data)
    with pytest.raises(UnsupportedModelError, match=r"gives 'layer\.other' the memory of 'layer\.code'.*clone"):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert torch.equal(layer.other, torch.zeros(6))
    assert layer.other.data_ptr() != layer.code.data_ptr()


# ---------------------------------------------------------------- what is no hindrance


def only_counts(layer):
    layer.calls += 1
    return 2.0


def cached(layer):
    if "mask" not in layer.calls:
        layer.calls["mask"] = torch.arange(6.0)
    return layer.calls["mask"]


class Watched(nn.Linear):
    """Shows what it computed last, and keeps a moving average in a buffer."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.last = super().forward(x) - self.mean
        return self.last


HARMLESS = {
    "what is only shown": Watched,
    "a number that is not used": lambda: Layer(only_counts, calls=0),
    "a cache in a dict": lambda: Layer(cached, calls={}),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_makes_no_difference_is_no_hindrance(case):
    module = Loss(HARMLESS[case]())
    expected = copy.deepcopy(module)(*vectors(0))[0].detach()
    found, _ = make(module, loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    torch.testing.assert_close(found, expected)


def test_random_numbers_that_make_no_difference_are_warned_of(caplog):
    layer = Layer(lambda layer: 2.0 if random.random() < 2.0 else 1.0)
    with caplog.at_level(logging.WARNING, logger="orttrainer"):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert "random numbers of Python's or NumPy's" in caplog.text


def test_the_generators_are_left_as_they_were():
    layer = Layer(lambda layer: 2.0 if random.random() + np.random.rand() < 3.0 else 1.0)
    random.seed(5)
    np.random.seed(5)
    make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    found = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    assert found == (random.random(), np.random.rand())


def test_a_forward_in_vmap_is_no_hindrance():
    layer = Layer(lambda layer: torch.func.vmap(lambda row: row.square().sum())(layer.weight).clamp(max=2.0))
    expected = Loss(layer)(*vectors(0))[0].detach()
    found, _ = make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    torch.testing.assert_close(found, expected)
