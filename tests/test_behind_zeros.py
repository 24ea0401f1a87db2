"""What only a parameter hides that is all zeros at first is checked as what is in sight: gates of ReZero, B of LoRA."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, described, rebuilt, vectors
from marks import linux
from small import make
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from orttrainer.errors import ExportMismatchError, UnsupportedModelError
from orttrainer.export import child, torch_graph


class Gated(nn.Module):
    """x + gate * branch(x), of which `branch` gets the module, too."""

    def __init__(self, branch, gate=0.0, **attributes):
        super().__init__()
        self.one, self.gate = nn.Linear(6, 6), nn.Parameter(torch.full([1], gate))
        vars(self).update(attributes)
        self.branch = branch

    def forward(self, x):
        return x + self.gate * self.branch(self, x)


class LoRA(nn.Module):
    """A frozen layer and what is trained in its place: W x + B f(A x), B zeros at first."""

    def __init__(self, function=lambda x: x, dtype=torch.float32):
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(2, 6, dtype=dtype)), nn.Parameter(torch.zeros(6, 2, dtype=dtype))
        self.function = function

    def forward(self, x):
        return self.layer(x) + F.linear(self.function(F.linear(x, self.A)), self.B)


class Clipped(Function):
    """Decides by values in its backward."""

    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, dy):
        norm = dy.norm().item()
        return dy / norm if norm > 1e-6 else dy


def remembers(m, x):
    """As Transformer-XL does."""
    y = m.one(x)
    both = y if m.memory is None else torch.cat([m.memory, y])
    m.memory = y.detach()
    return (y @ both.T).softmax(-1) @ both


class Counting(Function):
    """Its backward counts in an attribute, and computes with it."""

    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.m.count += 1
        return dy * ctx.m.count, None


def refused(layer, error, match):
    with pytest.raises(error, match=match):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)


@pytest.mark.parametrize("gate", [0.3, 0.0], ids=["in sight", "behind a zero"])
def test_what_an_attribute_remembers_is_refused(gate):
    refused(Gated(remembers, gate, memory=None), UnsupportedModelError, "forward changes 'layer.memory'")


@pytest.mark.parametrize("gate", [0.3, 0.0], ids=["in sight", "behind a zero"])
def test_a_backward_that_decides_by_values_is_refused(gate):
    layer = Gated(lambda m, x: Clipped.apply(m.one(x)), gate)
    refused(layer, ExportMismatchError, "the gradient of parameter 'layer.one.(weight|bias)' differs from PyTorch's")


@pytest.mark.parametrize("gate", [0.3, 0.0], ids=["in sight", "behind a zero"])
def test_a_backward_that_computes_with_what_it_keeps_is_refused(gate):
    layer = Gated(lambda m, x: Counting.apply(m.one(x), m), gate, count=0)
    refused(layer, UnsupportedModelError, r"what runs in the backward, .*, changes 'layer.count'")


def test_a_wrong_gradient_of_a_in_lora_is_refused():
    refused(LoRA(Clipped.apply), ExportMismatchError, "the gradient of parameter 'layer.A' differs .* 'layer.B'")


@linux
def test_a_child_compares_what_is_behind_zeros(free):
    refused(LoRA(Clipped.apply), ExportMismatchError, "the gradient of parameter 'layer.A' differs .* 'layer.B'")
    assert child._forked == 1


class ZeroConvolutions(nn.Module):
    """Of a ControlNet."""

    def __init__(self):
        super().__init__()
        self.into, self.one, self.out = nn.Conv1d(1, 4, 1), nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 1, 1)
        for p in (*self.into.parameters(), *self.out.parameters()):
            nn.init.zeros_(p)

    def forward(self, x):
        y = x[:, None]
        return (y + self.out(self.one(self.into(y) + y).relu())).squeeze(1)


class ComplexGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.gate = nn.Linear(6, 6), nn.Parameter(torch.zeros(6, dtype=torch.complex64))

    def forward(self, x):
        return x + torch.view_as_real(self.gate * torch.complex(self.one(x), x)).sum(-1)


class Shared(nn.Module):
    """Zeros under two names and in a plain list."""

    def __init__(self):
        super().__init__()
        self.one, self.gate = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))
        self.same, self.listed = self.gate, [self.gate]

    def forward(self, x):
        return x + self.gate * self.one(x).tanh() + self.same.clamp(min=0) * self.listed[0] * x


class ZeroedNorm(nn.Module):
    """The last scale of each block is zero at first."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.0)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return (x + self.drop(self.norm(self.one(x)))).relu()


def decides(m, x):
    return m.one(x).sin() if m.gate != 0 else m.one(x).cos()


def decides_by_a_number(m, x):
    return m.one(x).sin() if m.gate.item() != 0 else m.one(x).cos()


def clamps(m, x):
    with torch.no_grad():
        m.gate.clamp_(-0.05, 0.05)
    return m.one(x).tanh()


def scaled_by_a_number(m, x):
    return m.one(x).sin() * (1 + float(m.gate.detach()))


FINE = {
    "ReZero": lambda: nn.Sequential(*(Gated(lambda m, x: m.one(x).tanh()) for _ in range(3))),
    "LoRA": lambda: nn.Sequential(LoRA(), nn.Tanh(), LoRA()),
    "LoRA with a Function": lambda: LoRA(lambda x: Straight.apply(x)),
    "ControlNet": ZeroConvolutions,
    "complex": ComplexGate,
    "shared": Shared,
    "norm": ZeroedNorm,
    "decides": lambda: Gated(decides),
    "decides by a number": lambda: Gated(decides_by_a_number),
    "clamps": lambda: Gated(clamps),
    "a number": lambda: Gated(scaled_by_a_number),
}


class Straight(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("layer", FINE.values(), ids=FINE)
def test_what_is_fine_trains_as_in_pytorch(layer):
    assert_trains_as_in_pytorch(layer, vectors, evaluates=True)


def test_float64():
    torch.manual_seed(0)
    module = Loss(LoRA(torch.tanh, torch.float64))
    twin, (x,) = copy.deepcopy(module), vectors(0)
    trainer = make(module, loss_fn=None, desc=described([x.double()]))
    for _ in range(3):
        loss, _ = twin(x.double())
        torch.testing.assert_close(trainer.train_step(x.double(), RATE)[0].double(), loss.detach(), rtol=1e-6, atol=0)
        for p, gradient in zip([twin.layer.A, twin.layer.B], torch.autograd.grad(loss, [twin.layer.A, twin.layer.B])):
            p.data.sub_(RATE * gradient)
    torch.testing.assert_close(module.layer.A, twin.layer.A, rtol=1e-9, atol=0)


def keeps_elsewhere(m, x):
    """Another way, which the first step does not go, keeps what no graph can keep."""
    return remembers(m, x) if m.gate != 0 else m.one(x)


def raises(m, x):
    assert not m.gate.any(), "not yet"
    return m.one(x)


def differs_elsewhere(m, x):
    return Clipped.apply(m.one(x)) if m.gate != 0 else m.one(x)


@pytest.mark.parametrize("branch", [keeps_elsewhere, raises, differs_elsewhere])
def test_another_way_tells_nothing_of_the_one_that_is_gone(branch):
    """It is for a later step to tell."""
    layer = lambda: Gated(branch, memory=None)  # noqa: E731
    reference, module = rebuilt(layer), rebuilt(layer)
    expected = reference(*vectors(0))[0]
    loss, _ = make(module, loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    torch.testing.assert_close(loss, expected.detach())
    expected.backward()
    torch.testing.assert_close(module.layer.gate, reference.layer.gate - RATE * reference.layer.gate.grad)


def test_the_first_step_begins_at_the_zeros_and_in_their_memory():
    module = rebuilt(lambda: LoRA(torch.tanh))
    memory, wrong = module.layer.B.data_ptr(), rebuilt(lambda: LoRA(Clipped.apply))
    refused(wrong.layer, ExportMismatchError, "differs")
    assert not wrong.layer.B.any()
    trainer = make(module, loss_fn=None, desc=described(vectors(0)))
    trainer.train_step(*vectors(0), 0.0)
    assert module.layer.B.data_ptr() == memory and not module.layer.B.any()


def test_a_graph_that_is_wrong_behind_zeros_is_not_taken(monkeypatch, caplog):
    by_dynamo = torch_graph.by_dynamo

    def wrong(*given):
        forward = by_dynamo(*given)
        for node in forward.model.graph:
            node.op_type = "Sigmoid" if node.op_type == "Tanh" else node.op_type
        return forward

    monkeypatch.setattr(torch_graph, "by_dynamo", wrong)
    caplog.set_level(logging.INFO, "orttrainer")
    assert_trains_as_in_pytorch(lambda: Gated(lambda m, x: m.one(x).tanh()), vectors, evaluates=False)  # by another one
    assert "on the first batch, with other values for 'layer.gate', which is all zeros" in caplog.text


SEEN = []


def lists(m, x):
    SEEN.append(x.mean())
    return m.one(x)


def test_what_it_warns_of_it_says_once(caplog):
    make(Loss(Gated(lists)), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert caplog.text.count("forward and loss write to 'test_behind_zeros.SEEN'") == 1


def test_frozen_zeros_hide_for_ever():
    layer = Gated(remembers, memory=None)
    layer.gate.requires_grad_(False)
    module = Loss(nn.Sequential(nn.Linear(6, 6), layer))
    loss, _ = make(module, loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert math.isfinite(loss)
