"""What forward keeps from call to call and a graph keeps too: buffers and frozen parameters, and tables that it fills."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fidelity import RATE, Loss, Written, assert_trains_as_in_pytorch, described, rebuilt, vectors
from marks import in_turn
from small import make
from torch import nn

from orttrainer.errors import ExportMismatchError, StateError
from orttrainer.export.faithful import _Rewrites


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


class Usage(nn.Linear):
    """Buffers that the first batches leave as they are, which is the sum of zeros, and statistics of zeros."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("many", torch.zeros(()))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        result = super().forward(x) + self.many
        self.calls += 1
        late = (self.calls > 1).float()
        self.many.add_(late * len(x))
        return result + self.norm(x * late)


class StartsAtZero(nn.Linear):
    """Sums from a buffer on, which needs a gradient as soon as there are any, as VectorQuantize does."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("zero", torch.tensor(0.0))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        y = super().forward(x)
        total = self.zero.requires_grad_(y.requires_grad)
        self.mean.lerp_(y.mean(0), 0.1)
        return y + total + (x - y).square().mean() - self.mean.detach()


class Severed(nn.Linear):
    """Computes with a buffer to which it has written, by a way that autograd does not see, what has a gradient."""

    def __init__(self, change):
        super().__init__(6, 6)
        self.register_buffer("mean", torch.ones(6))
        self.change = change

    def forward(self, x):
        y = super().forward(x)
        self.change(self.mean, y.mean(0))
        return y * self.mean + y


SEVERED = {
    "data": lambda mean, y: mean.data.copy_(y),
    "data, step by step": lambda mean, y: mean.data.mul_(0.9).add_(y, alpha=0.1),
    "data assigned": lambda mean, y: setattr(mean, "data", y),
    "elements of data": lambda mean, y: mean.data.__setitem__(slice(1, 3), y[1:3]),
    "a view of data": lambda mean, y: mean.data.view(2, 3)[1].add_(y[:3]),
    "detached": lambda mean, y: mean.detach().lerp_(y, 0.1),
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


class Initialized(nn.Linear):
    """Takes its scale from the first batch, as ActNorm of Glow does (Kingma and Dhariwal 2018, section 3.1)."""

    def __init__(self, done):
        super().__init__(6, 6)
        self.register_buffer("done", torch.tensor(done))
        self.register_buffer("power", torch.tensor(2))
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x):
        if not self.done:
            self.scale.copy_(x.std())
            self.done.fill_(True)
        return super().forward(x) / self.scale ** self.power.item()


ONLY_TRAINING = {  # what these do in forward they do in evaluation too, which a training graph has no other form for
    "buffers": Average,
    "copies of fewer dimensions": CopiedInto,
    "a table that the first call fills": Positions,
    "what the first batch leaves as it is": Usage,
    "one that forward lets need a gradient": StartsAtZero,
    **{
        f"a buffer by {name}{', under no_grad' * (not grad)}": lambda f=f, grad=grad: Changed(f, grad)
        for name, f in CHANGES.items()
        for grad in (True, False)
    },
}


@pytest.mark.parametrize("make_layer", [  # of each change, with gradients and without in turn
    pytest.param(make_layer, id=name, marks=pytest.mark.slow if k > 3 and k % 4 in (1, 2) else ())
    for k, (name, make_layer) in enumerate(ONLY_TRAINING.items())
])  # fmt: skip
def test_buffers_change_as_in_pytorch(make_layer):
    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=False)


@pytest.mark.parametrize("change", SEVERED.values(), ids=SEVERED)
def test_what_is_written_to_a_buffer_unseen_by_autograd_has_no_gradient(change):
    assert_trains_as_in_pytorch(lambda: Severed(change), vectors, evaluates=False)


def test_a_network_under_two_names_changes_its_buffers_once():
    assert_trains_as_in_pytorch(UnderTwoNames, vectors, evaluates=True)


class FoundElsewhere(nn.Linear):
    """Reads its state from plain containers, as the cells of ncps do."""

    def __init__(self):
        super().__init__(6, 6)
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("mean", torch.zeros(6))
        self.named, self.listed = {"scale": self.scale, "shift": self.shift}, [self.mean]

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias) * 0.5
        result = torch.stack([y, self.named["scale"].expand_as(y)]).sum(0) + self.named["shift"] - self.listed[0]
        self.listed[0].mul_(0.9).add_(y.detach().mean(0))
        return result


def test_state_that_forward_reads_from_a_plain_container_trains_as_in_pytorch():
    assert_trains_as_in_pytorch(FoundElsewhere, vectors, evaluates=False)


class Group(tuple):
    """A tuple of which nobody is to ask how many it holds, as e3nn's irreps."""

    def __len__(self):
        raise NotImplementedError  # what e3nn's raise when they are asked; no stub


def test_containers_with_a_length_of_their_own_are_left_alone():
    class Holder(nn.Linear):
        group = Group((1, 2))

        def __init__(self):
            super().__init__(6, 6)
            self.own, self.listed = Group((1, 2)), [Group((3,))]

    assert_trains_as_in_pytorch(Holder, vectors, evaluates=True)


class Named(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "named"):
            self.named = {"bias": self.bias}
        return F.linear(x, self.weight) + self.named["bias"]


def test_a_parameter_that_the_graph_has_lost_is_not_left_behind(monkeypatch):
    monkeypatch.setattr(_Rewrites, "_registered", lambda self, argument: argument)
    layer = Named(6, 6)
    layer(*vectors(0))
    with pytest.raises(ExportMismatchError, match=r"the gradient of parameter 'layer\.bias' differs"):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)


# ---------------------------------------------------------------- buffers that forward decides by


def test_a_decision_by_a_buffer_that_stays_is_that_of_pytorch():
    assert_trains_as_in_pytorch(lambda: Initialized(True), vectors, evaluates=True)


def test_a_decision_by_a_buffer_that_is_another_later_is_refused_until_it_is_back():
    layer = Initialized(True)
    trainer = make(Loss(layer), loss_fn=None, desc=described(vectors(0)))
    trainer.train_step(*vectors(0), RATE)
    before = layer.weight.detach().clone()
    layer.done.fill_(False)
    with pytest.raises(StateError, match=r"by the value of the buffer 'layer\.done', which was True"):
        trainer.train_step(*vectors(1), RATE)
    assert torch.equal(layer.weight, before)
    layer.done.fill_(True)
    trainer.train_step(*vectors(1), RATE)
    assert not torch.equal(layer.weight, before)


def test_a_decision_by_a_buffer_that_forward_changes_is_that_of_pytorch():
    assert_trains_as_in_pytorch(lambda: Initialized(False), vectors, evaluates=True)


# ---------------------------------------------------------------- frozen parameters


MOVES = {
    "data assigned": lambda code, y: setattr(code, "data", code.data * 0.9 + y * 0.1),
    "data changed": lambda code, y: code.data.mul_(0.9).add_(y, alpha=0.1),
    "in place": lambda code, y: code.lerp_(y, 0.1),
    "several": lambda code, y: torch._foreach_addcmul_([code], [y], [y], 0.1),
    "elements": lambda code, y: code.data.__setitem__(0, y[1]),
    "by an operator": lambda code, y: code.data.__iadd__(y),
    "out": lambda code, y: torch.mul(code, y.cos(), out=code),
    "to zeros": lambda code, y: code.zero_(),
}


@pytest.mark.parametrize("change", in_turn(MOVES))
def test_a_frozen_parameter_changes_as_in_pytorch(change):
    assert_trains_as_in_pytorch(lambda: Written(change, trained=False), vectors, evaluates=False)


class MomentumEncoder(nn.Module):
    """MoCo (He et al. 2020, algorithm 1): frozen keys follow the queries, and go to a queue."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.keys = copy.deepcopy(self.queries).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 16), dim=0))

    def forward(self, x):
        q = F.normalize(self.queries(x), dim=1)
        with torch.no_grad():
            for query, key in zip(self.queries.parameters(), self.keys.parameters()):
                key.data = key.data * 0.9 + query.data * 0.1
            k = F.normalize(self.keys(x * 1.1), dim=1)
        result = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1)
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[:, 8:], k[:8].t()], 1))
        return result


def test_a_momentum_encoder_of_frozen_parameters_trains_as_in_pytorch():
    assert_trains_as_in_pytorch(MomentumEncoder, vectors, evaluates=True)


@pytest.mark.parametrize("make_layer", [MomentumEncoder, StartsAtZero])
def test_a_trainer_is_made_without_a_trace_of_it(make_layer):
    module, batch = rebuilt(make_layer), vectors(0)
    state = copy.deepcopy(module.state_dict())
    make(module, loss_fn=None, desc=described(batch)).eval_step(*batch)
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert not any(buffer.requires_grad for buffer in module.buffers())


def test_a_parameter_that_is_given_its_own_data_is_no_hindrance():
    layer = Written(lambda code, y: setattr(code, "data", code.data.to(y.dtype)), trained=False)
    expected = Loss(layer)(*vectors(0))[0].detach()
    found, _ = make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    torch.testing.assert_close(found, expected)


class Folded(nn.Linear):
    """Two layers while it trains; in eval mode one, whose parameters it folds the two into, as networks like SPAN do."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.second, self.both = nn.Linear(*sizes), nn.Linear(*sizes)

    def forward(self, x):
        if self.training:
            return self.second(super().forward(x))
        self.both.weight.data = self.second.weight.data @ self.weight.data
        self.both.bias.data.copy_(self.second(self.bias.data))
        return self.both(x)


def test_parameters_that_an_evaluation_folds_others_into_are_left_to_it():
    assert_trains_as_in_pytorch(lambda: Folded(6, 6), vectors, evaluates=True)


class ChangesItsInput(nn.Linear):
    """Prepares the batch in its own memory."""

    def forward(self, x):
        x.sub_(0.5).mul_(2)
        x[:, 0] = 1.0
        return super().forward(x)


def test_a_batch_that_forward_writes_to_is_trained_as_it_is_given_and_left_so():
    batch = vectors(0)
    assert_trains_as_in_pytorch(lambda: ChangesItsInput(6, 6), vectors, evaluates=False)
    make(rebuilt(lambda: ChangesItsInput(6, 6)), loss_fn=None, desc=described(batch)).train_step(*batch, RATE)
    assert torch.equal(batch[0], vectors(0)[0])


class Normalized(nn.Module):
    """Times a constant in a dtype that NumPy has not, as models of transformers keep one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("normalizer", torch.tensor(5.7, dtype=torch.bfloat16), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.normalizer.type(x.dtype)


def test_a_buffer_in_bfloat16_is_read_as_in_pytorch():
    assert_trains_as_in_pytorch(Normalized, vectors, evaluates=True)
