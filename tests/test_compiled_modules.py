"""Modules and functions that `torch.compile` made: they are exported as the Python that they were made of."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from pairs import Pair
from torch import nn


def gate(x):
    return torch.relu(x) * x.sigmoid()


def eager(graph, inputs):
    return graph.forward


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.gate = gate

    def forward(self, x):
        return self.head(self.gate(self.first(x)))


def compiled_whole(module):
    return torch.compile(module, backend=eager)


def compiled_in_place(module):
    module.compile(backend=eager)
    return module


def compiled_function(module):
    module.gate = torch.compile(gate, backend=eager)
    return module


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_function])
def test_what_is_to_be_compiled_is_not_compiled_to_be_exported(compiled, caplog):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pair = Pair(Gated())
    pair.engine = pair._engine_of(compiled(pair.module))
    pair.steps(3)
    assert not torch._dynamo.utils.counters["frames"]
    assert caplog.text == ""


class Branching(nn.Module):
    """With functions that PyTorch compiles by itself."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.cond(x.sum() > 0, gate, torch.cos, (x,)))


def test_what_pytorch_compiles_in_forward_is_no_code_of_forward(caplog):
    torch._dynamo.reset()
    Pair(Branching()).steps(2)
    assert not [record for record in caplog.records if record.name == "orttrainer"]
