"""Hooks around an optimizer's step, as averages of weights and loggers set them: called after each update, refused before it."""

from __future__ import annotations

import pytest
import torch
from small import batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from test_sketch_optimizer import make
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from orttrainer import LossScaler
from orttrainer.errors import UnsupportedFeatureError


def test_hooks_behind_an_update_are_called_as_by_torch():
    seen = {}
    module, reference = net(), net()
    ours, theirs = sgd(module), sgd(reference)

    def hook(optimizer, args, kwargs):
        number = [ours, theirs].index(optimizer)
        weight = [module, reference][number][0].weight.detach().clone()
        seen.setdefault(number, []).append((len(args), args[0] is optimizer, kwargs, weight))
        optimizer.param_groups[0]["params"][0].data.mul_(0.9)  # the next step trains what a hook leaves

    handles = [optimizer.register_step_post_hook(hook) for optimizer in (ours, theirs)]
    trainer = make(module, ours)
    with register_optimizer_step_post_hook(hook):
        for step in range(3):
            trainer.step(*batch(step))
            torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)
    assert len(seen[0]) == 6
    for ours_seen, theirs_seen in zip(seen[0], seen[1]):
        assert ours_seen[:3] == theirs_seen[:3]
        torch.testing.assert_close(ours_seen[3], theirs_seen[3])
    handles[0].remove()
    trainer.step(*batch())
    assert len(seen[0]) == 6


def test_a_hook_is_not_called_where_no_update_was_made():
    module, calls = net(), []
    optimizer = sgd(module)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    trainer = make(module, optimizer, gradient_accumulation_steps=3)
    for step in range(7):
        trainer.step(*batch(step))
    trainer.eval(*batch())
    assert len(calls) == 2


def test_a_hook_is_not_called_where_gradients_overflowed():
    module, calls = net(), []
    optimizer = sgd(module)
    optimizer.register_step_post_hook(lambda *_: calls.append(scaler.loss_scale_))
    scaler = LossScaler("loss_scale", True, loss_scale=2.0**24, up_scale_window=1, max_loss_scale=2.0**24)
    trainer = make(module, optimizer, mixed_precision="float16", loss_scaler=scaler)
    for _ in range(30):
        trainer.step(*batch())
        if calls:
            break
    assert len(calls) == 1 and scaler.loss_scale_ < 2.0**24


def watches_gradients(optimizer, args, kwargs):
    raise AssertionError("is not called")


def test_a_hook_before_an_update_is_refused_by_name_until_it_is_gone():
    module = net()
    optimizer = sgd(module)
    trainer = make(module, optimizer)
    trainer.step(*batch())
    before = module[0].weight.detach().clone()
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        with register(watches_gradients):
            with pytest.raises(UnsupportedFeatureError, match=r"'watches_gradients'.*max_grad_norm"):
                trainer.step(*batch())
            trainer.eval(*batch())
    assert torch.equal(module[0].weight, before)
    make(module, optimizer, nn.functional.cross_entropy).step(*batch())
    trainer.step(*batch())
