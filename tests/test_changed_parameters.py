"""Trained parameters that forward writes to, as a weight that is clamped: they train as in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, described, vectors
from small import make
from torch import nn

from orttrainer.errors import UnsupportedModelError


class Constrained(nn.Linear):
    """Changes its weight, then multiplies by it."""

    def __init__(self, change):
        super().__init__(6, 6)
        self.change = change

    def forward(self, x):
        with torch.no_grad():
            self.change(self.weight)
        return super().forward(x)


class Tied(nn.Module):
    """Writes to a weight that has two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        self.second.weight.data.clamp_(-0.2, 0.2)
        return self.second(self.first(x).tanh())


class Repeated(nn.Module):
    """A layer that changes its weight, called twice."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Asserted(Constrained):
    """Says of its weight what it has made of it."""

    def forward(self, x):
        y = super().forward(x)
        assert self.weight.norm(dim=1).max() < 0.51
        return y


class Clipped(nn.Sequential):
    """Clips all it has, as the critic of a Wasserstein GAN."""

    def forward(self, x):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Late(nn.Linear):
    """Changes its weight when it has been used."""

    def forward(self, x):
        y = super().forward(x)
        self.weight.data.clamp_(-0.2, 0.2)
        return y


class LookedUp(nn.Module):
    """Two lookups in one table, each of which shortens the rows that it reads."""

    def __init__(self, norm_type=2.0, **options):
        super().__init__()
        self.table = nn.Embedding(10, 4, max_norm=0.8, norm_type=norm_type, **options)

    def forward(self, x, y):
        return self.table(x) * self.table(y)


class Twice(torch.autograd.Function):
    """sin(x), with twice its gradient if one is asked for."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x.cos() if ctx.needs_input_grad[0] else None


class OfItsOwnGradient(Constrained):
    """Has its weight from an autograd function, after the change."""

    def forward(self, x):
        with torch.no_grad():
            self.change(self.weight)
        return F.linear(x, Twice.apply(self.weight), self.bias)


class ReadApart(Constrained):
    """Reads its weight without a gradient, too: before the change, after it, and a view of it."""

    def forward(self, x):
        before = self.weight.detach().abs().mean()
        self.weight.data.clamp_(-0.2, 0.3)
        self.weight.data[0].mul_(0.0)
        row = self.weight.data[1]
        y = super().forward(x) / self.weight.detach().norm()
        return y * before + row.sin() + (self.weight.data @ self.bias) * self.weight.sum()


class Averaged(nn.Linear):
    """Follows its weight, which it may clamp, with a buffer."""

    def __init__(self, clamps):
        super().__init__(6, 6)
        self.register_buffer("average", torch.zeros(6, 6))
        self.clamps = clamps

    def forward(self, x):
        if self.clamps:
            self.weight.data.clamp_(-0.2, 0.3)
        with torch.no_grad():
            self.average.lerp_(self.weight, 0.1)
            self.average.add_(self.weight, alpha=0.01)
            self.average[0] = self.weight[0]
        self.average[1].copy_(self.weight.data[1])
        return super().forward(x) + x @ self.average


def shorten(weight):
    weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5)


CHANGES = {
    "data clamped": lambda w: w.data.clamp_(min=0),
    "clamped": lambda w: w.clamp_(-0.1, 0.2),
    "data assigned": shorten,
    "normalized": lambda w: w.copy_(F.normalize(w, dim=1)),
    "divided by its norm": lambda w: w.data.div_(w.data.norm(dim=1, keepdim=True)),
    "a column": lambda w: w[:, 0].zero_(),
    "elements": lambda w: w.data.__setitem__(0, 1.0),
    "the diagonal": lambda w: w.fill_diagonal_(0),
    "all": lambda w: w.fill_(0.1),
}
LAYERS = {name: lambda change=change: Constrained(change) for name, change in CHANGES.items()} | {
    "two layers with one weight": Tied,
    "a decision": lambda: Asserted(shorten),
    "an autograd function": lambda: OfItsOwnGradient(shorten),
    "read without a gradient": lambda: ReadApart(lambda weight: weight.clamp_(-0.2, 0.3)),
    "all parameters": lambda: Clipped(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)),
    "twice": lambda: Repeated(Constrained(shorten)),
    "afterwards": lambda: Late(6, 6),
}
LONG = {"clamped", "divided by its norm", "a column", "the diagonal"}


def smoothed(x):
    """By a layer that forward makes, and gives its weights."""
    filters = nn.Conv1d(1, 1, 3, padding=1)
    filters.weight.data.copy_(torch.tensor([[[1.0, 2.0, 1.0]]]))
    filters.bias.data.zero_()
    return filters(x[:, None])[:, 0]


def shifted(x):
    layer = nn.Linear(6, 6, bias=False)
    layer.weight.data = torch.eye(6).roll(1, 0)
    nn.init.kaiming_uniform_(torch.empty(3, 3)), nn.init.normal_(torch.empty(2))  # which nobody reads
    return layer(x) + nn.init.uniform_(torch.empty(6), -1, 1) * 0


class Making(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(6, 6), form

    def forward(self, x):
        return self.form(self.linear(x)).tanh()


@pytest.mark.parametrize("form", [smoothed, shifted])
def test_a_layer_that_forward_makes(form):
    assert_trains_as_in_pytorch(lambda: Making(form), vectors, evaluates=True)


@pytest.mark.parametrize("make_layer", [
    pytest.param(make_layer, id=name, marks=pytest.mark.slow if name in LONG else ())
    for name, make_layer in LAYERS.items()
])  # fmt: skip
def test_a_parameter_that_forward_changes(make_layer):
    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


@pytest.mark.parametrize("clamps", [False, True])
def test_a_buffer_that_follows_a_parameter(clamps):
    assert_trains_as_in_pytorch(lambda: Averaged(clamps), vectors, evaluates=True)


def tokens(step):
    """Rows that other batches have not read keep their length."""
    return [x[: 5 - step] for x in torch.randint(0, 10, (2, 5, 3), generator=torch.Generator().manual_seed(step))]


@pytest.mark.parametrize("make_layer", [
    LookedUp, pytest.param(lambda: LookedUp(1.0, padding_idx=2), marks=pytest.mark.slow),
], ids=["Euclidean", "sum, with a padding row"])  # fmt: skip
def test_an_embedding_with_max_norm(make_layer):
    assert_trains_as_in_pytorch(make_layer, tokens, evaluates=True)


def test_a_bag_with_max_norm():
    make_layer = lambda: nn.EmbeddingBag(10, 4, max_norm=0.8, mode="sum")  # noqa: E731
    assert_trains_as_in_pytorch(make_layer, lambda step: tokens(step)[:1], evaluates=True)


@pytest.mark.parametrize("batches", [1, 2])
def test_adam_decays_what_forward_has_left(batches):
    torch.manual_seed(0)
    ours = Loss(Constrained(shorten))
    twin = copy.deepcopy(ours)
    own = torch.optim.AdamW(twin.parameters(), RATE, weight_decay=0.1)
    settings = {"weight_decay_mode": 0, "lambda": 0.1, "do_bias_correction": True}
    trainer = make(
        ours, "AdamOptimizer", lambda name: settings, None, described(vectors(0)),
        gradient_accumulation_steps=batches, enable_grad_norm_clip=False,
    )  # fmt: skip
    for step in range(2 * batches):
        loss = twin(*vectors(step))[0]
        torch.testing.assert_close(trainer.train_step(*vectors(step), RATE)[0], loss.detach())
        (loss / batches).backward()
        if (step + 1) % batches == 0:
            own.step()
            own.zero_grad()
    for mine, other in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_taken_into_an_update_is_refused():
    module, inputs = Loss(LookedUp()), tokens(0)
    several = make(module, loss_fn=None, desc=described(inputs), gradient_accumulation_steps=2)
    with pytest.raises(UnsupportedModelError, match=r"parameter 'layer\.table\.weight' in its memory, by the batch"):
        several.train_step(*inputs, RATE)
    mixed = make(Loss(Constrained(shorten)), loss_fn=None, desc=described(vectors(0)), use_mixed_precision=True)
    with pytest.raises(UnsupportedModelError, match=r"'layer\.weight' in its memory, which mixed precision"):
        mixed.train_step(*vectors(0), RATE, 1.0)


class Target(nn.Module):
    """Follows its own layer with one that it computes with under `no_grad`, and that is not frozen."""

    def __init__(self, ahead: float, frozen: bool = False):
        super().__init__()
        self.online = nn.Linear(6, 6)
        self.target = copy.deepcopy(self.online).requires_grad_(not frozen)
        self.target.weight.data.add_(ahead)

    def forward(self, x):
        with torch.no_grad():
            for slow, quick in zip(self.target.parameters(), self.online.parameters()):
                slow.lerp_(quick, 0.01)
            wanted = self.target(x).tanh()
        return self.online(x) - wanted


@pytest.mark.filterwarnings("error:no path from")  # for it changes
@pytest.mark.parametrize("ahead", [0.0, 0.3], ids=["begins as its layer", "goes on"])
def test_a_target_that_nobody_froze_follows(ahead):
    assert_trains_as_in_pytorch(lambda: Target(ahead), vectors, evaluates=True)


@pytest.mark.parametrize("settings", [{"use_mixed_precision": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_target_that_nobody_froze_follows_as_a_frozen_one_with(settings):
    found = []
    for frozen in (False, True):
        torch.manual_seed(0)
        module = Loss(Target(0.3, frozen))
        trainer = make(module, loss_fn=None, desc=described(vectors(0)), **settings)
        for step in range(4):
            trainer.train_step(*vectors(step), RATE, *([1.0] if "use_mixed_precision" in settings else []))
        found.append(copy.deepcopy(module.state_dict()))
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, msg=lambda text, name=name: f"{name}: {text}")
