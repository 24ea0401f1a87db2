"""The update of a block of batches that has fewer than the others, as at the end of an epoch."""

from __future__ import annotations

import pytest
import torch
from launched import ONE_LAUNCHER, results
from small import RATE, batch, make, net
from test_sketch import assert_parameters_close, sgd
from test_sketch_optimizer import make as sketch
from torch import nn

from orttrainer import LossScaler
from orttrainer.errors import InvalidArgumentError, StateError

BLOCK = 4


def block_step(module, optimizer, batches) -> None:
    """One step of PyTorch with the mean of the gradients of these batches."""
    optimizer.zero_grad()
    for x, label in batches:
        (nn.functional.cross_entropy(module(x), label) / len(batches)).backward()
    optimizer.step()


OPTIMIZERS = {
    "sgd": lambda module: sgd(module, momentum=0.9),
    "adam": lambda module: torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_epochs_that_end_within_a_block_train_as_in_pytorch(optimizer):
    module, reference = (nn.Sequential(nn.BatchNorm1d(4), net()) for _ in range(2))
    ours, theirs = optimizer(module), optimizer(reference)
    trainer, calls = sketch(module, ours, gradient_accumulation_steps=BLOCK), []
    ours.register_step_post_hook(lambda *_: calls.append(1))
    for epoch in range(3):
        batches = [batch(10 * epoch + index) for index in range(BLOCK + 1 + epoch)]
        for x, label in batches:
            trainer.step(x, label)
        assert trainer.update()
        assert not trainer.update()
        for first in range(0, len(batches), BLOCK):
            block_step(reference, theirs, batches[first : first + BLOCK])
        assert_parameters_close(module, reference)
        assert len(calls) == 2 * (epoch + 1)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_without_accumulated_batches_there_is_no_update():
    module = net()
    trainer = sketch(module, sgd(module))
    assert not trainer.update()  # before the first step
    trainer.step(*batch())
    before = trainer.state_dict()
    assert not trainer.update()
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())


def test_a_block_that_was_resumed_is_updated_too():
    module, resumed = net(), net()
    first = sketch(module, sgd(module, momentum=0.9), gradient_accumulation_steps=BLOCK)
    second = sketch(resumed, sgd(resumed, momentum=0.9), gradient_accumulation_steps=BLOCK)
    for step in range(BLOCK + 2):
        first.step(*batch(step))
    second.step(*batch())
    second.load_state_dict(first.state_dict())
    assert first.update() and second.update()
    assert_parameters_close(module, resumed)


def test_a_changed_learning_rate_holds_for_the_update():
    module, reference = net(), net()
    ours, theirs = sgd(module), sgd(reference)
    trainer = sketch(module, ours, gradient_accumulation_steps=BLOCK)
    batches = [batch(step) for step in range(2)]
    for x, label in batches:
        trainer.step(x, label)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"] *= 0.3
    trainer.update()
    block_step(reference, theirs, batches)
    assert_parameters_close(module, reference)


def test_gradients_that_overflow_update_nothing_and_halve_the_scale():
    module = net()
    scaler = LossScaler("loss_scale", True, loss_scale=2.0**24, up_scale_window=1, max_loss_scale=2.0**24)
    trainer = sketch(
        module, sgd(module), gradient_accumulation_steps=BLOCK, mixed_precision="float16", loss_scaler=scaler
    )
    trainer.step(*batch())
    before = trainer.state_dict(False)
    assert not trainer.update()
    assert scaler.loss_scale_ == 2.0**23
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict(False).items())


def test_a_learning_rate_that_cannot_be_used_leaves_the_block():
    module, reference = net(), net()
    ours = sgd(module)
    trainer = sketch(module, ours, gradient_accumulation_steps=BLOCK)
    trainer.step(*batch())
    rate, ours.param_groups[0]["lr"] = ours.param_groups[0]["lr"], float("nan")
    with pytest.raises(InvalidArgumentError, match="learning rate"):
        trainer.update()
    ours.param_groups[0]["lr"] = rate
    assert trainer.update()
    block_step(reference, sgd(reference), [batch()])
    assert_parameters_close(module, reference)


def test_a_block_may_be_made_shorter_and_longer_while_it_lasts():
    trainer, twin = make(gradient_accumulation_steps=BLOCK), make(gradient_accumulation_steps=3)
    for steps in ((BLOCK, 3, 3), (2, BLOCK, 3)):
        for step, batches in enumerate(steps):
            trainer.gradient_accumulation_steps = batches
            trainer.train_step(*batch(step), RATE)
            twin.train_step(*batch(step), RATE)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(trainer.state_dict()[name], value)


@pytest.mark.parametrize("launcher", ONE_LAUNCHER)
def test_two_ranks_update_with_what_both_have_and_refuse_different_numbers(launcher, tmp_path):
    reference = net()
    batches = [batch(step + 50 * rank) for step in range(3) for rank in range(2)]
    block_step(reference, sgd(reference), batches[:4])
    block_step(reference, sgd(reference), batches[4:])
    for rank in results(launcher, "other_trainers.py", tmp_path, "uneven"):
        updated, refused, then = rank["uneven"]["said"]
        assert updated == [True, False]
        assert "summed the gradients of different numbers of batches for one update: [1, 2]" in refused
        assert then == "fine"
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(rank["uneven"]["state"][name], value, rtol=1e-5, atol=1e-6)


def test_a_loaded_block_is_ended_once_there_is_a_graph_and_is_not_passed_over_before():
    first, second = (sketch(m, sgd(m, momentum=0.9), gradient_accumulation_steps=BLOCK) for m in (net(), net()))
    for index in range(BLOCK + 2):
        first.step(*batch(index))
    state = first.state_dict()
    second.load_state_dict(state)
    with pytest.raises(StateError, match=r"midst of a block, after 2 batches.*run one eval_step\(\) before it"):
        second.update()
    second.eval_step(*batch())
    assert first.update() and second.update()
    for index in range(BLOCK):
        first.step(*batch(index))
        second.step(*batch(index))
    assert_parameters_close(second.model, first.model)
    single = sketch(module := net(), sgd(module))  # which has no sums to take them up
    single.load_state_dict(state)
    assert not single.update()
