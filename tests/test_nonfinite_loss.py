"""A loss that is NaN or infinite from bad data is told, with its step; on request it is an error that changes nothing."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from marks import usual
from small import LR, OPTIMIZERS, assert_same, batch, make, net, snapshot
from torch import nn

from orttrainer.errors import ExecutionError, NonFiniteLossError, NonFiniteLossWarning


def spoiled() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(1)
    x[2, 1] = torch.nan
    return x, y


def test_the_first_loss_that_is_not_finite_is_told_with_its_step():
    trainer = make()
    for step in range(3):
        trainer.train_step(*batch(step), LR)
    with pytest.warns(NonFiniteLossWarning, match="the loss is nan at step 4; look at the batch of this step") as told:
        trainer.train_step(*spoiled(), LR)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train_step(*batch(), LR)  # the weights are NaN now, and it was told


def test_an_infinite_loss_is_told_as_such():
    trainer = make(loss_fn=lambda prediction, label: (prediction * 1e38).square().mean(), check_export=False)
    with pytest.warns(NonFiniteLossWarning, match="the loss is inf at step 1"):
        trainer.train_step(*batch(), 0.0)


def test_after_a_finite_loss_the_next_one_that_is_not_is_told_again():
    trainer = make()
    good = trainer.state_dict
    trainer.eval_step(*batch())
    weights = good()
    for step in (1, 3):
        with pytest.warns(NonFiniteLossWarning, match=f"at step {step}"):
            trainer.train_step(*spoiled(), LR)
        trainer.load_state_dict(weights)
        trainer.train_step(*batch(), LR)


@pytest.mark.parametrize("optimizer", usual(OPTIMIZERS, "LambOptimizer"))
def test_as_an_error_it_changes_nothing_and_training_goes_on(optimizer):
    trainer = make(net(dropout=0.2), optimizer, nonfinite_loss="error")
    twin = make(net(dropout=0.2), optimizer)
    for each in (trainer, twin):
        each.train_step(*batch(0), LR)
    before, counted = snapshot(trainer), (trainer.current_step, trainer.global_step_)
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 2; .* Nothing was updated"):
        trainer.train_step(*spoiled(), LR)
    assert_same(snapshot(trainer), before)
    assert (trainer.current_step, trainer.global_step_) == counted
    for step in (1, 2):
        assert torch.equal(trainer.train_step(*batch(step), LR)[0], twin.train_step(*batch(step), LR)[0])
    assert_same(snapshot(trainer), snapshot(twin))


def test_parameters_of_one_gradient_are_updated_each_where_a_check_comes_between():
    class TwoBiases(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bias = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.linear(x) + self.bias

    torch.manual_seed(0)
    ours = TwoBiases()
    module, trainer = copy.deepcopy(ours), make(ours, "SGDOptimizer", nonfinite_loss="error")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(2):
        x, y = batch(step)
        trainer.train_step(x, y, 0.1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(dict(ours.named_parameters()), dict(module.named_parameters()))


def test_within_a_block_the_state_is_that_of_before_the_block_and_the_next_batch_begins_another():
    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    trainer = make(normed(), nonfinite_loss="error", gradient_accumulation_steps=2)
    twin = make(normed(), gradient_accumulation_steps=2)
    for step in (0, 1):
        trainer.train_step(*batch(step), LR)
        twin.train_step(*batch(step), LR)
    trainer.train_step(*batch(2), LR)
    with pytest.raises(NonFiniteLossError, match=r"Nothing was updated\. .* before it are dropped: 1\."):
        trainer.train_step(*spoiled(), LR)
    assert_same(snapshot(trainer), snapshot(twin))
    for step in (3, 4):
        trainer.train_step(*batch(step), LR)
        twin.train_step(*batch(step), LR)
    assert_same(snapshot(trainer), snapshot(twin))


def test_an_error_for_the_loss_is_an_execution_error():
    assert issubclass(NonFiniteLossError, ExecutionError)


def test_it_can_be_ignored():
    trainer = make(nonfinite_loss="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer.train_step(*spoiled(), LR)[0].isnan()


def test_evaluation_says_nothing():
    trainer = make(nonfinite_loss="error")
    assert trainer.eval_step(*spoiled())[0].isnan()
