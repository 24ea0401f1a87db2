"""RMSprop, Adagrad, Adadelta, Adamax and RAdam of torch in `orttrainer.trainer`: step for step as in PyTorch, in float64."""

from __future__ import annotations

import copy

import pytest
import small
import torch
from small import assert_same, batch, net
from torch import nn

import orttrainer
from orttrainer.errors import InvalidArgumentError, UnsupportedFeatureError

of = torch.optim
KINDS = {
    "RMSprop": (lambda p: of.RMSprop(p, 0.01), {"alpha": 0.5, "eps": 1e-3, "weight_decay": 0.1}),
    "RMSprop centered": (lambda p: of.RMSprop(p, 0.01, momentum=0.9, centered=True, eps=0.1), {"momentum": 0.5}),
    "Adagrad": (lambda p: of.Adagrad(p, 0.05, lr_decay=0.1), {"lr_decay": 0.2, "eps": 1e-2, "weight_decay": 0.1}),
    "Adadelta": (lambda p: of.Adadelta(p, 1.0), {"rho": 0.5, "eps": 1e-3, "weight_decay": 0.1}),
    "Adamax": (lambda p: of.Adamax(p, 0.01), {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    "RAdam": (lambda p: of.RAdam(p, 0.01, betas=(0.8, 0.9)), {"betas": (0.5, 0.99), "eps": 1e-3, "weight_decay": 0.1}),
    "RAdam, decay apart": (
        lambda p: of.RAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True), {"weight_decay": 0.2},
    ),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def both(kind):
    """A module and its optimizer, twice."""
    modules = net().double(), net().double()
    return modules, [KINDS[kind][0](m.parameters()) for m in modules]


def make(module, optimizer, **options):
    return orttrainer.trainer(module, nn.functional.cross_entropy, optimizer, check_export=False, **options)


def data(step):
    x, label = batch(step)
    return x.double(), label


def torch_step(module, optimizer, step, share=1.0, max_norm=None, updates=True):
    (share * nn.functional.cross_entropy(module(data(step)[0]), data(step)[1])).backward()
    if updates:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def assert_close(module, reference):
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@kinds
def test_numbers_that_change_hold_from_the_next_step(kind):
    (module, reference), optimizers = both(kind)
    trainer = make(module, optimizers[0])
    for step in range(6):
        for optimizer in optimizers:
            optimizer.param_groups[0].update({2: KINDS[kind][1], 4: {"lr": 0.003}}.get(step, {}))
        trainer.step(*data(step))
        torch_step(reference, optimizers[1], step)
        assert_close(module, reference)


@kinds
def test_the_state_goes_to_the_trainer_and_back(kind):
    (module, reference), (ours, theirs) = both(kind)
    for step in range(3):
        torch_step(module, ours, step)
        torch_step(reference, theirs, step)
    trainer = make(module, ours)
    for step in range(3, 7):
        trainer.step(*data(step))
        torch_step(reference, theirs, step)
    states = [optimizer.state_dict()["state"] for optimizer in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for own, expected in zip(*(state.values() for state in states)):
        assert own.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(own[key], value, rtol=1e-9, atol=1e-12)
    with pytest.warns(UserWarning, match="leave out backward"):
        torch_step(module, ours, 7)
    torch_step(reference, theirs, 7)
    trainer.step(*data(8))
    torch_step(reference, theirs, 8)
    assert_close(module, reference)


@kinds
def test_a_resumed_run_goes_on_to_the_bit(kind):
    (module, other), optimizers = both(kind)
    trainer = make(module, optimizers[0])
    for step in range(3):
        trainer.step(*data(step))
    resumed = make(other, optimizers[1])
    resumed.load_state_dict(copy.deepcopy(trainer.state_dict()), strict=True)
    for step in range(3, 6):
        assert torch.equal(trainer.step(*data(step))[0], resumed.step(*data(step))[0])
    assert_same(trainer.state_dict(), resumed.state_dict())


@kinds
def test_a_layer_that_is_set_free_later_counts_its_own_updates(kind):
    (module, reference), optimizers = both(kind)
    trainer = make(module, optimizers[0])
    for step in range(7):
        for m in (module, reference):
            m[0].requires_grad_(step not in (0, 1, 2, 5))
        trainer.step(*data(step))
        torch_step(reference, optimizers[1], step)
        assert_close(module, reference)


@kinds
def test_clipped_sums_of_batches_that_maximize(kind):
    (module, reference), optimizers = both(kind)
    for optimizer in optimizers:
        optimizer.param_groups[0]["maximize"] = True
    trainer = make(module, optimizers[0], max_grad_norm=0.1, gradient_accumulation_steps=2)
    for step in range(6):
        trainer.step(*data(step))
        torch_step(reference, optimizers[1], step, 0.5, 0.1, step % 2 == 1)
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        # The norm is float32 in the graph.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["RMSprop centered", "Adamax", "RAdam"])
def test_one_cycle_changes_momentum_and_betas_too(kind):
    (module, reference), optimizers = both(kind)
    trainer = make(module, optimizers[0])
    schedules = [of.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10) for optimizer in optimizers]
    for step in range(8):
        trainer.step(*data(step))
        torch_step(reference, optimizers[1], step)
        for schedule in schedules:
            schedule.step()
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        # What each step feeds is float32.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_centered_that_changes_is_refused():
    (module, _), (optimizer, _) = both("RMSprop")
    trainer = make(module, optimizer)
    trainer.step(*data(0))
    before = trainer.state_dict()
    optimizer.param_groups[0]["centered"] = True
    with pytest.raises(InvalidArgumentError, match=r"'centered'.* is True now.*It is part of the graph"):
        trainer.step(*data(1))
    assert_same(trainer.state_dict(), before)


def test_sums_that_do_not_begin_at_0_are_refused():
    module = net()
    optimizer = of.Adagrad(module.parameters(), initial_accumulator_value=0.1)
    with pytest.raises(
        UnsupportedFeatureError, match=r"initial_accumulator_value=0.1; the training graph's sums begin at 0"
    ):
        make(module, optimizer)


def test_the_first_generation_has_them_by_name():
    module, reference = net(), net()
    theirs = of.RMSprop(reference.parameters(), 0.01, momentum=0.9, eps=1e-2)
    attributes = {"momentum": 0.9, "epsilon": 1e-2}
    trainer = small.make(module, "RMSpropOptimizer", lambda name: attributes)
    for step in range(4):
        trainer.train_step(*batch(step), torch.tensor([0.01]))
        nn.functional.cross_entropy(reference(batch(step)[0]), batch(step)[1]).backward()
        theirs.step()
        theirs.zero_grad()
    for ours, expected in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert "Square_Average_0.weight" in trainer.state_dict()
