"""Python's functions of numbers that only a batch tells, such as schedules by a counter, train as in PyTorch."""

from __future__ import annotations

import math
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fidelity import assert_trains_as_in_pytorch, vectors
from torch import nn

from orttrainer.engine.source import Source

# Of the module, which has counted its steps, and its output: `t` is a float, `n` a whole number.
SCHEDULES = {
    "warm-up": lambda m, y: y * min(1.0, m.n.item() / 3),
    "bounds of a list": lambda m, y: y * max([0.1, m.t.item() / 10, m.n.item() / 20]),
    "cosine": lambda m, y: y * (0.5 * (1 + math.cos(math.pi * m.n.item() / 10))),
    "exponential": lambda m, y: y * math.exp(-m.t.item() / 5),
    "logarithm to a base": lambda m, y: y * math.log(m.t.item() + 1, 2),
    "of NumPy": lambda m, y: y / np.sqrt(m.n.item()) * np.exp(-m.t.item() / 9),
    "of NumPy, of a size": lambda m, y: y / np.sqrt(y.shape[0]),
    "clipped by NumPy": lambda m, y: y * float(np.clip(m.t.item() / 3, 0, 1)),
    "of the values": lambda m, y: y / max(y.detach().abs().max().item(), 1e-3),
    "a decision": lambda m, y: y * (2.0 if math.exp(-m.t.item() / 5) > 0.6 else 3.0),
    "a decision that never comes": lambda m, y: y * 2 if math.isnan(y.sum().item()) else y,
    "floats of comparisons": lambda m, y: y * (1 + float(m.n.item() > 2) + 2 * float(m.t.item() < 3.5)),
    "a float of a comparison of sizes": lambda m, y: y * (1 + float(y.shape[0] > 4)),
    "the kind of a size": lambda m, y: y * (2.0 if isinstance(y.shape[0], int) else 3.0),
    "the kinds of numbers": lambda m, y: (
        y * (2.0 if isinstance(m.n.item(), (int, str)) and not isinstance(m.t.item(), int) else m.t.item())
    ),
    "columns": lambda m, y: y[:, : int(6 * math.exp(-m.t.item() / 5))],
}
ARGUMENTS = {
    "exponent": lambda m, y: (y * y + 1) ** (m.t.item() / 3),
    "exponent of a whole number": lambda m, y: y + torch.arange(6) ** (m.t.item() / 3),
    "exponent by a size": lambda m, y: (y * 0.1) ** y.shape[0],
    "exponent in double": lambda m, y: torch.float_power(y * y + 1, m.t.item() / 3).float(),
    "in place": lambda m, y: (y * y + 1).pow_(m.t.item() / 3),
    "leaky_relu": lambda m, y: F.leaky_relu(y, 0.1 * m.t.item()),
    "elu": lambda m, y: F.elu(y, m.t.item()),
    "celu": lambda m, y: F.celu(y, m.t.item()),
    "softplus": lambda m, y: F.softplus(y, beta=m.t.item()),
    "addcmul": lambda m, y: torch.addcmul(y, y, y, value=m.t.item()),
    "addcdiv": lambda m, y: y.addcdiv(y, y * y + 1, value=m.t.item()),
    "addmm": lambda m, y: torch.addmm(y, y, m.weight, beta=m.t.item(), alpha=1 / m.t.item()),
    "pad": lambda m, y: F.pad(y, (1, 2), value=m.t.item()),
    "huber_loss": lambda m, y: F.huber_loss(y, y.sin(), delta=0.1 * m.t.item()) * y,
    "smooth_l1_loss": lambda m, y: F.smooth_l1_loss(y, y.sin(), reduction="none", beta=0.1 * m.t.item()),
    "new_full": lambda m, y: y * y.new_full((6,), m.t / 3),
    "full": lambda m, y: y * torch.full((y.shape[0], 1), m.n),
    "full_like": lambda m, y: y * torch.full_like(y, y.detach().max()),
    "pad by a tensor": lambda m, y: F.pad(y, (1, 2), value=m.t),
    "elu by a tensor": lambda m, y: F.elu(y, m.t),
    "addcmul by a tensor": lambda m, y: torch.addcmul(y, y, y, value=m.t),
    "a tensor": lambda m, y: y * torch.tensor([m.t.item(), 1 - m.t.item()]).prod(),
}
LONG = {
    "of NumPy, of a size",
    "bounds of a list",
    "exponent in double",
    "celu",
    "addcdiv",
    "smooth_l1_loss",
    "in place",
    "full_like",
    "pad by a tensor",
    "addcmul by a tensor",
}


class Counted(nn.Linear):
    def __init__(self, function):
        super().__init__(6, 6)
        self.function = function
        self.register_buffer("t", torch.tensor(1.0))
        self.register_buffer("n", torch.tensor(1))

    def forward(self, x):
        self.t += 1
        self.n += 1
        return self.function(self, super().forward(x))


@pytest.mark.parametrize("function", [
    pytest.param(function, id=name, marks=pytest.mark.slow if name in LONG else ())
    for name, function in {**SCHEDULES, **ARGUMENTS}.items()
])  # fmt: skip
def test_a_number_of_a_tensor_in_a_function_of_pythons_or_torchs(function):
    assert_trains_as_in_pytorch(lambda: Counted(function), vectors, evaluates=False)


LIBRARY = """
def chosen(y, of):
    if len(of) == 0:
        return y.sum() * 0
    return y[of].square().sum() / max(len(of), 2)
"""


@pytest.fixture(params=["a_library_of_functions"])
def library(monkeypatch, request):
    """A module of functions that a forward calls, which has no forward itself."""
    module = types.ModuleType(request.param)
    exec(LIBRARY, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_count_that_a_function_of_another_file_asks_for_is_part_of_the_graph(library, monkeypatch):
    monkeypatch.setattr(Source, "later_graph", mock.Mock(side_effect=AssertionError("exported anew")))
    assert_trains_as_in_pytorch(
        lambda: Counted(lambda m, y: y + library.chosen(y, (y.detach().sum(1) > 0).nonzero()[:, 0])),
        vectors,
        evaluates=False,
    )


@pytest.mark.parametrize("library", [f"{__name__}.functions"], indirect=True)
def test_it_is_also_in_a_process_that_is_profiled(library, monkeypatch):
    """As by cProfile, in whose place nobody can see which code forward runs: functions beside it count as such."""
    before = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        test_a_count_that_a_function_of_another_file_asks_for_is_part_of_the_graph(library, monkeypatch)
    finally:
        sys.setprofile(before)
