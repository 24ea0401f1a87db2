"""What forward keeps from call to call: buffers that it changes, tables that it fills, and what it may not change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, described, vectors
from small import make
from torch import nn

from orttrainer.errors import UnsupportedModelError


class Average(nn.Linear):
    """Keeps a moving average and a counter in buffers, and computes with both."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("steps", torch.tensor(0.0))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x) * self.steps / (1 + self.steps) + self.average


class CopiedInto(nn.Linear):
    """Copies what has fewer dimensions into a buffer, whole and in part, and into a new tensor."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(1, 6))
        self.register_buffer("queue", torch.zeros(5, 6))

    def forward(self, x):
        y = super().forward(x)
        result = y - self.mean + self.queue.sum(0)
        copied = torch.empty_like(y)
        copied.copy_(y.mean(0))
        with torch.no_grad():
            self.mean.copy_(y.mean(0))
            self.queue[1:3] = y.mean(0)
            self.queue[4].copy_(y.sum())
        return result * copied


class Positions(nn.Linear):
    """The first call computes a table and notes in an attribute that it is there."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("table", torch.zeros(9, 6), persistent=False)
        self.filled = 0

    def positions(self, width):
        if self.filled >= width:
            return self.table[0, :width]
        self.table[:, :width] = torch.arange(1.0, width + 1)
        self.filled = width
        return self.table[0, :width]

    def forward(self, x):
        return super().forward(x) * self.positions(x.shape[1]).cos()


class Changed(nn.Linear):
    """Changes a buffer through something that shows its memory."""

    def __init__(self, change, grad):
        super().__init__(6, 6)
        self.register_buffer("mean", torch.ones(3, 6))
        self.change, self.grad = change, grad

    def forward(self, x):
        y = super().forward(x)
        result = y * self.mean.clone()[1]
        with torch.set_grad_enabled(self.grad):
            self.change(self.mean, y.detach())
        return result


CHANGES = {
    "a row": lambda mean, y: mean[1].copy_(y.mean(0)),
    "a row, step by step": lambda mean, y: mean[1].mul_(0.9).add_(y.mean(0)),
    "rows": lambda mean, y: mean.narrow(0, 1, 2).add_(y.mean(0)),
    "all in a row": lambda mean, y: mean.view(-1).add_(y.mean()),
    "transposed": lambda mean, y: mean.t().mul_(0.5),
    "detached": lambda mean, y: mean.detach().copy_(mean * 0.5 + y.mean(0)),
    "data": lambda mean, y: mean.data.mul_(0.9).add_(y.mean(0), alpha=0.1),
    "a row of data": lambda mean, y: mean.data[1].copy_(y[0]),
}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class UnderTwoNames(nn.Module):
    """A network with running statistics that the module and a wrapper in it have, and a center that moves."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.encoder = Wrapped(self.inner)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x):
        y = self.encoder(x)
        result = y - self.center
        if self.training:
            with torch.no_grad():
                self.center.mul_(0.9).add_(y.mean(0) * 0.1 + 0.01)
        return result


ONLY_TRAINING = {  # what these do in forward they do in evaluation too, which a training graph has no other form for
    "buffers": Average,
    "copies of fewer dimensions": CopiedInto,
    "a table that the first call fills": Positions,
    **{
        f"a buffer by {name}{', under no_grad' * (not grad)}": lambda f=f, grad=grad: Changed(f, grad)
        for name, f in CHANGES.items()
        for grad in (True, False)
    },
}


@pytest.mark.parametrize("make_layer", ONLY_TRAINING.values(), ids=ONLY_TRAINING)
def test_buffers_change_as_in_pytorch(make_layer):
    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=False)


def test_a_network_under_two_names_changes_its_buffers_once():
    assert_trains_as_in_pytorch(UnderTwoNames, vectors, evaluates=True)


# ---------------------------------------------------------------- what is refused


class Scaled(nn.Linear):
    """Computes with a Python number that each call changes."""

    def __init__(self):
        super().__init__(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Counted(Scaled):
    """Only counts its calls."""

    def forward(self, x):
        self.calls += 1
        return F.linear(x, self.weight, self.bias)


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


class Moved(nn.Module):
    """Changes a parameter in forward, as momentum encoders and codebooks do."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.code = nn.Linear(6, 6), nn.Parameter(torch.ones(6), requires_grad=False)
        self.change = change

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.change(self.code, y.mean(0))
        return y * self.code


MOVES = {
    "data assigned": lambda code, y: setattr(code, "data", code.data * 0.999 + y * 0.001),
    "data changed": lambda code, y: code.data.mul_(0.999).add_(y, alpha=0.001),
    "in place": lambda code, y: code.lerp_(y, 0.001),
    "several": lambda code, y: torch._foreach_mul_([code], 0.999),
    "elements": lambda code, y: code.data.__setitem__(0, 2.0),
    "by an operator": lambda code, y: code.data.__iadd__(y),
}


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_a_parameter_that_forward_changes_is_refused_and_not_changed(change):
    layer = Moved(change)
    with pytest.raises(UnsupportedModelError, match=r"changes the parameter 'layer\.code' in place.*Make it a buffer"):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert torch.equal(layer.code, torch.ones(6))


def test_a_parameter_that_is_given_its_own_data_is_no_hindrance():
    layer = Moved(lambda code, y: setattr(code, "data", code.data.to(y.dtype)))
    expected = Loss(layer)(*vectors(0))[0].detach()
    found, _ = make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    torch.testing.assert_close(found, expected)


REFUSED = {
    "a number": (Scaled, "changes 'layer.calls' and computes with it.*register_buffer"),
    "a scale from the first batch": (ScaledByTheFirst, "changes 'layer.ready' and computes with it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_kept_outside_of_buffers_is_refused_by_name(case):
    make_layer, text = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=text):
        make(Loss(make_layer()), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)


def test_a_number_that_forward_changes_but_does_not_use_is_no_hindrance():
    module = Loss(Counted())
    trainer = make(module, loss_fn=None, desc=described(vectors(0)))
    expected = module(*vectors(0))[0].detach()
    torch.testing.assert_close(trainer.train_step(*vectors(0), RATE)[0], expected)
