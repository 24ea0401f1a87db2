"""What forward computes of constants alone: PyTorch's numbers, to the last digit."""

from __future__ import annotations

import copy

import pytest
import torch
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.export import decompose
from orttrainer.export.forms import constants

N = 6
DESCRIBED = ModelDescription(
    [IODescription("x", [N], torch.float32)], [IODescription("loss", []), IODescription("y", [N])]
)
RATE = torch.tensor([0.5])


def window() -> torch.Tensor:
    """As SSIM has it, changed in place."""
    places = torch.arange(N).float() - N // 2
    found = torch.exp(-places.square() / 4.5)
    found /= found.sum()
    return found


def read_before_and_after(x):
    w = torch.sin(torch.arange(N) * 1.7)
    first = x + w
    w.mul_(3).add_(torch.cos(w))
    return first * 0.5 + w


def of_a_part(x):
    w = torch.zeros(N)
    w[1:3].copy_(torch.exp(torch.arange(2) + 0.3))
    w[4] = torch.tensor(0.7).tanh()
    return x + w


def written_by_the_batch(x):
    w = torch.exp(torch.arange(N) / 7)
    shown = w[2:4]
    first = w + x
    shown.copy_(x[:2])
    return first + w * shown.sum()


def under_no_grad(x):
    with torch.no_grad():
        w = torch.hann_window(N + 2)[1:-1].pow(0.3)
    return x * w


def filters(x):
    """Of a bank that is normalized, and a table of frequencies."""
    places = torch.linspace(0.0, 1.0, N)[:, None] - torch.tensor([0.1, 0.5, 0.8])
    bank = torch.softmax(-places.abs() * 10, 0)
    return torch.sigmoid(bank @ torch.tensor([0.2, -0.4, 1.1])) * x + torch.outer(x, x).sum(0)


def parts(x):
    first, second = torch.exp(torch.arange(2 * N) / 5).chunk(2)
    first.div_(second.sum())
    deviation, mean = torch.std_mean(torch.sin(torch.arange(N) * 0.7))
    return (x + first - mean) / deviation


KEPT = torch.arange(2.0 * N) / 9


def of_what_is_kept(x):
    """A tensor that is no buffer, by its parts; and one that is written to."""
    changed = torch.tensor([0.3] * N)
    changed[1:3] = x[:2].detach()
    return x + torch.sin(KEPT[::2]) * torch.exp(changed) + torch.cos(KEPT).view(2, N)[1]


FORMS = {
    "a window": lambda x: x + window(), "read before and after a change": read_before_and_after, "changed by parts": of_a_part,
    "written by the batch": written_by_the_batch, "under no_grad": under_no_grad, "filters": filters, "parts": parts, "kept": of_what_is_kept,
    "repeated": lambda x: x + window().repeat(2)[N:] + window().expand(3, N).sum(0),
}  # fmt: skip


class Constants(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.scale, self.form = nn.Parameter(torch.ones(N)), form

    def forward(self, x):
        y = self.form(x * self.scale)
        return y.square().mean(), y


@pytest.mark.parametrize("most", [constants.MOST, N - 1], ids=["small enough", "too many"])
@pytest.mark.parametrize("name", FORMS)
def test_trains_as_in_pytorch(name, most, monkeypatch):
    monkeypatch.setattr(constants, "MOST", most)
    module, x = Constants(FORMS[name]), torch.randn(N, generator=torch.Generator().manual_seed(3))
    twin = copy.deepcopy(module)
    trainer = make(module, loss_fn=None, desc=DESCRIBED)
    for _ in range(2):
        found, y = trainer.train_step(x, RATE)
        loss, expected = twin(x)
        (gradient,) = torch.autograd.grad(loss, [twin.scale])
        with torch.no_grad():
            twin.scale -= RATE * gradient
        torch.testing.assert_close((found, y), (loss.detach(), expected.detach()))
        torch.testing.assert_close(module.scale, twin.scale)


@pytest.mark.parametrize("name", ["a window", "read before and after a change", "under no_grad", "parts"])
def test_the_numbers_are_pytorch_s(name):
    module = Constants(FORMS[name])
    x = torch.ones(N) if name == "under no_grad" else torch.zeros(N)
    trainer = make(copy.deepcopy(module), loss_fn=None, desc=DESCRIBED)
    _, y = trainer.train_step(x, RATE)
    assert torch.equal(y, module(x)[1].detach())
    operators = {node.op_type for node in trainer.training_graph.graph.graph}
    assert operators.isdisjoint({"Exp", "Sin", "Cos", "HannWindow"})


@pytest.mark.parametrize("whole", [False, True])
def test_sizes_stay_those_of_the_batch(whole, monkeypatch):
    """FastAP: edges of a histogram, beside a matrix of as many rows and columns as the batch has samples.

    Also where torch decomposes the program and traces it anew for that.
    """

    class Histogram(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x, label):
            h, n = self.linear(x), label.size(0)
            distances = (h[:, None] - h).square().sum(-1)
            first, second = torch.where((label[:, None] == label) ^ torch.eye(n, dtype=torch.bool))
            same = torch.zeros(n, n)
            same[first, second] = 1
            edges = torch.linspace(0.0, 4.0, steps=11).view(-1, 1, 1)
            counts = ((1 - (distances - edges).abs() / 0.4).relu() * same).sum(2).T
            return (counts * counts.cumsum(1)).mean() + torch.zeros_like(counts).sum()

    if whole:
        monkeypatch.setattr(decompose, "_expansions", lambda *_: 1 / 0)
    torch.manual_seed(0)
    module = Histogram()
    twin = copy.deepcopy(module)
    inputs = [IODescription("x", ["batch", 4]), IODescription("label", ["batch"], torch.int64)]
    trainer = make(module, loss_fn=None, desc=ModelDescription(inputs, [IODescription("loss", [])]))
    for n in (12, 7):
        x, label = torch.randn(n, 4), torch.randint(0, 3, (n,))
        expected = twin(x, label)
        gradients = torch.autograd.grad(expected, list(twin.parameters()))
        torch.testing.assert_close(trainer.train_step(x, label, RATE), expected.detach())
        for ours, theirs, gradient in zip(module.parameters(), twin.parameters(), gradients):
            theirs.data -= RATE * gradient
            torch.testing.assert_close(ours, theirs)
    assert trainer._engine._forward.exporter == "dynamo"  # the older exporter gives one size to all batches


def test_draws_are_drawn_anew():
    module = Constants(lambda x: x + torch.rand(N).exp())
    trainer = make(module, loss_fn=None, desc=DESCRIBED)
    first, second = (trainer.train_step(torch.zeros(N), 0 * RATE)[1] for _ in range(2))
    assert not torch.equal(first, second)
