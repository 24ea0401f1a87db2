"""Sizes that Python is given as numbers, and what zeros hide of decisions by sizes: the few other sizes that are tried at the first
step show neither.
"""

from __future__ import annotations

import copy
import math
import operator

import numpy as np
import pytest
import torch
from in_step import check_equal, step
from marks import slow
from test_granted import RATE, batch, engine_of
from torch import nn

from orttrainer.export.module import _Job


class Gated(nn.Module):
    """loss of `function(a(x), b(x), gate)`, of which each also may have the rows themselves."""

    def __init__(self, function, gate=1.0):
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(6, 5), nn.Linear(6, 5), nn.Parameter(torch.full((5,), gate))
        self.function = function

    def forward(self, x, label):
        return self.function(self.a(x), self.b(x), self.gate).square().mean() + label.mean()


def chunks(a, b, gate):
    return torch.cat([gate * a[i : i + 8] - b[i : i + 8].mean(0) for i in range(0, len(a), 8)])


def thirtieth(a, b, gate):
    for place, row in enumerate(b):
        if place == 19:
            a = a + gate * row
    return a


def bits(a, b, gate):
    return a * gate + b * (len(a).bit_length() // 5)


def layers(a, b, gate):
    for _ in range(int(a.shape[0]) // 16):
        a = a + gate * b
    return a


NUMBERS = {  # what is done, after a batch of 7, of which 3, 15 and 9 tell nothing, with batches of which sizes; and how many graphs
    "int": (lambda a, b, gate: a + gate * b if int(a.shape[0]) > 16 else a * gate, (20, 9, 7), 2),
    "int, odd": (lambda a, b, gate: a + gate * b if int(a.shape[0]) % 2 else a * gate, (8, 9, 20), 2),
    "a shape of ints": (lambda a, b, gate: (a * gate + b).view(int(a.shape[0]) * 5, -1), (8, 3), 1),
    "a divisor": (lambda a, b, gate: a * gate + b / int(a.shape[0]), (8, 3), 1),
    "layers": (layers, (20, 8), 2),
    "chunks": (chunks, (8, 20, 5, 1), 2),
    "rows": (thirtieth, (24,), 2),
    "gcd": (lambda a, b, gate: a * gate + b * math.gcd(len(a), 2), (8, 9), 3),
    "index": (lambda a, b, gate: a * gate + b * (operator.index(len(a)) % 2), (8,), 2),
    "bits": (bits, (20,), 2),
    "elements": (lambda a, b, gate: a * gate + b * (a.shape.numel() // 100), (24,), 2),
    "numpy": (lambda a, b, gate: a * gate + b * float(np.int64(len(a)) % 2), (8,), 2),
    "numpy's product": (lambda a, b, gate: a * gate + b * (int(np.prod(a.shape)) // 100), (24,), 1),
    "the last of a range": (lambda a, b, gate: a * gate + b * (range(len(a))[-1] // 16), (20,), 1),
    "any of a range": (lambda a, b, gate: a * gate + b * any(i > 16 for i in range(len(a))), (20,), 2),
    "a truth": (lambda a, b, gate: a * gate + b * float(len(a) % 2 == 0), (8, 9, 20), 2),
    "a truth that looks up": (lambda a, b, gate: [a, a + b][len(a) % 2 == 0] * gate, (8, 9), 2),
}  # fmt: skip
FEW = ("int", "a shape of ints", "chunks", "rows", "gcd", "a truth")


def train(module, sizes):
    """How many graphs it has in the end."""
    twin, engine = copy.deepcopy(module), engine_of(module)
    for size in sizes:
        step(engine, twin, batch(size), RATE)
    check_equal(module, twin)
    return len(engine._ways.known)


@pytest.mark.parametrize("name", [name if name in FEW else slow(name) for name in NUMBERS])
def test_a_number_that_python_makes_of_a_size_is_that_of_each_batch(name):
    function, sizes, graphs = NUMBERS[name]
    torch.manual_seed(0)
    assert train(Gated(function), (7, *sizes)) == graphs


@pytest.mark.parametrize("name", ["int, odd", slow("layers"), slow("gcd"), slow("chunks"), "a truth"])
def test_so_it_is_in_a_graph_of_torchs_older_exporter(monkeypatch, name):
    def unable(*args):
        raise RuntimeError("not by this exporter")

    for exporter in ("dynamo", "dynamo_whole"):
        monkeypatch.setattr(_Job, exporter, unable)
    function, sizes, _ = NUMBERS[name]
    torch.manual_seed(0)
    train(Gated(function), (7, *sizes))


BEHIND_ZEROS = {
    "the spread of several rows": (lambda a, b, gate: a + gate * (b - b.mean(0) if len(b) > 1 else b), (8, 1, 3), 2),
    "of one size": (lambda a, b, gate: a + gate * (b if len(b) == 8 else 3.0), (8, 5, 8), 2),
    "the sum of places": (lambda a, b, gate: a + gate * sum(range(len(a))), (8, 5), 2),
    "a share": (lambda a, b, gate: a + gate / max(len(a), 4), (8, 1), 2),
}


@pytest.mark.parametrize("gate", [0.0, slow(1e-6)])
@pytest.mark.parametrize("name", BEHIND_ZEROS)
def test_a_decision_by_a_size_behind_zeros_is_seen(name, gate):
    function, sizes, graphs = BEHIND_ZEROS[name]
    torch.manual_seed(0)
    assert train(Gated(function, gate), sizes) == graphs


class Counted(Gated):
    """Its outputs are the same for one row, and not what it keeps of it."""

    def __init__(self):
        super().__init__(lambda a, b, gate: a * gate + b)
        self.register_buffer("share", torch.ones(()))

    def forward(self, x, label):
        self.share.mul_(0.5 if len(x) > 1 else 0.9)
        return super().forward(x, label)


def test_a_decision_by_a_size_for_a_buffer_alone_is_seen():
    module = Counted()
    assert train(module, (8, 1)) == 2
    torch.testing.assert_close(module.share, torch.tensor(0.45))


def test_a_dropout_by_a_size_is_seen():
    """Of one row it has none, so that what it trains can be compared."""
    torch.manual_seed(0)
    module = Gated(lambda a, b, gate: nn.functional.dropout(a * gate + b, 0.5 if len(a) > 1 else 0.0))
    engine = engine_of(module)
    engine.train_step(batch(8), RATE)
    twin = copy.deepcopy(module)
    step(engine, twin, batch(1), RATE)
    check_equal(module, twin)
    assert len(engine._ways.known) == 2


def without_gradients(x):
    with torch.no_grad():
        return x * 1


STOPPED = {"detach": torch.Tensor.detach, "no_grad": without_gradients, "data": lambda x: x.data}


@pytest.mark.parametrize("name", ["detach", "no_grad", slow("data")])
def test_a_gradient_that_is_stopped_by_a_size_is_seen(name):
    """The outputs are the same."""
    torch.manual_seed(0)
    assert train(Gated(lambda a, b, gate: a + gate * (STOPPED[name](b) if len(b) > 1 else b)), (8, 1, 3)) == 2
