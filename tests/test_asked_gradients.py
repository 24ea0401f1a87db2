"""Forwards that ask whether there are gradients: they do as in PyTorch's training, where there are."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch
from fidelity import Loss, assert_trains_as_in_pytorch, described, vectors
from torch import nn

import orttrainer
from orttrainer.export.call import LossModule
from orttrainer.export.checks.observation import observe


class Queue(nn.Module):
    """Compares with what came before, as contrastive losses with a memory do; `asked(z)`: whether z is to be kept."""

    def __init__(self, asked):
        super().__init__()
        self.linear, self.asked = nn.Linear(6, 6), asked
        self.register_buffer("kept", torch.linspace(-1, 1, 6))

    def forward(self, x):
        z = self.linear(x).tanh()
        compared = z * self.kept.clone()
        if self.asked(z):
            with torch.no_grad():
                self.kept.mul_(0.5).add_(z.mean(0))
        return compared


def of_a_detached(z):
    return not z.detach().requires_grad


def of_one_under_no_grad(z):
    with torch.no_grad():
        return not (z * 2).requires_grad and not torch.is_grad_enabled()


def by_a_leaf(z):
    return not z.is_leaf and (z + 1).requires_grad


ASKED = {
    "requires_grad": lambda z: z.requires_grad,
    "grad_fn": lambda z: z.grad_fn is not None,
    "is_leaf": by_a_leaf,
    "is_grad_enabled": lambda z: torch.is_grad_enabled(),
    "a detached one": of_a_detached,
    "under no_grad": of_one_under_no_grad,
    "a parameter beside it": lambda z: torch.is_grad_enabled() and any(p.requires_grad for p in [torch.zeros(1), z]),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_forward_does_where_there_are_gradients_is_what_the_graph_does(asked):
    assert_trains_as_in_pytorch(lambda: Queue(ASKED[asked]), vectors, evaluates=False)


class Scales(nn.Module):
    """Does something else without gradients, where it is no training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) * (2.0 if torch.is_grad_enabled() else 3.0)


def test_what_is_computed_may_depend_on_it():
    assert_trains_as_in_pytorch(Scales, vectors, evaluates=False)


@pytest.mark.parametrize(
    ("module", "asks"),
    [(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), False), (Queue(lambda z: z.requires_grad), True)],
    ids=["torch", "forward"],
)
def test_only_where_forward_itself_asks_a_first_look_makes_what_gradients_need(module, asks):
    """Which are all activations."""
    wrapper = LossModule(Loss(module), None, described(vectors(0)))
    observe(wrapper, vectors(0))
    assert wrapper.sees_gradients == asks


class Insists(nn.Module):
    """Does without gradients what cannot be trained."""

    def __init__(self, compute):
        super().__init__()
        self.linear, self.compute = nn.Linear(6, 6), compute

    def forward(self, x):
        return self.compute(self.linear(x), x)


def insisting(z, x):
    assert z.requires_grad, "there are no gradients"
    z.retain_grad()
    return z, z.sum(1)


def more_outputs(z, x):
    return (z, z.sum(1)) if torch.is_grad_enabled() else z


def trace_of_a_hessian(z, x):
    """Of SiLU, whose derivative has none in forward mode without gradients."""
    hessian = torch.func.hessian(lambda y: nn.functional.silu(y).sum())
    return z, torch.vmap(hessian)(z).diagonal(dim1=-2, dim2=-1).sum(-1)


@pytest.mark.parametrize("compute", [insisting, more_outputs, trace_of_a_hessian])
def test_a_first_batch_has_the_gradients_that_forward_needs(compute):
    torch.manual_seed(0)
    module, reference = (Insists(compute) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    loss = lambda outputs, label: (outputs[0] - label).square().mean() + outputs[1].square().mean()  # noqa: E731
    trainer = orttrainer.trainer(module, loss, torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        (x,), (label,) = vectors(step), vectors(step)
        outputs = reference(x)
        expected = loss(outputs, label)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        found, found_outputs = trainer.step(x, label)
        torch.testing.assert_close(found, expected.detach())
        for output, other in zip(found_outputs, outputs, strict=True):
            torch.testing.assert_close(output, other.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(module.linear.weight, reference.linear.weight)


def test_an_error_of_forwards_own_is_that_which_it_raises_with_gradients():
    def fails(z, x):
        raise KeyError("with gradients" if torch.is_grad_enabled() else "without")

    module = Insists(fails)
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(KeyError, match="with gradients"):
        trainer.step(*vectors(0), *vectors(0))


def test_a_profiler_of_the_users_goes_on():
    profiler = cProfile.Profile()
    with profiler:
        assert_trains_as_in_pytorch(Scales, vectors, evaluates=False)
    assert any(function == "forward" for _, _, function in pstats.Stats(profiler).stats)
