"""Moments that no step uses for a while: of an SGD whose momentum is 0."""

from __future__ import annotations

import copy

import pytest
import torch
from small import batch, net
from test_sketch import sgd, torch_step
from test_sketch_moments import assert_goes_on_alike
from test_sketch_optimizer import make


# -- a momentum of 0 --------------------------------------------------------------------------


@pytest.mark.parametrize("dampening", [0.0, 0.6])
@pytest.mark.parametrize("given", ["in the optimizer", "by its load_state_dict", "by the trainer's"])
def test_momentum_that_was_off_goes_on_with_the_buffers_from_before(dampening, given):
    module, reference = net(), net()
    ours, theirs = (sgd(m, momentum=0.9, dampening=dampening) for m in (module, reference))
    if given == "by the trainer's":
        earlier = make(module, ours)
        assert_goes_on_alike(earlier, module, reference, theirs, range(3))
        module = net(seed=1)
        ours = sgd(module, momentum=0.9, dampening=dampening)
        source = earlier.state_dict()
    else:
        for step in range(3):
            torch_step(reference, theirs, *batch(step))
        module.load_state_dict(reference.state_dict())
        source = copy.deepcopy(theirs.state_dict())
        if given == "in the optimizer":
            ours.load_state_dict(source)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["momentum"] = 0.0
    trainer = make(module, ours)
    if given == "by the trainer's":
        trainer.load_state_dict(source, strict=True)
    assert_goes_on_alike(trainer, module, reference, theirs, range(3, 5))
    if given == "by its load_state_dict":
        ours.load_state_dict(source)
        theirs.load_state_dict(copy.deepcopy(source))
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = 0.0
        assert_goes_on_alike(trainer, module, reference, theirs, range(5, 7))
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["momentum"] = 0.9
    assert_goes_on_alike(trainer, module, reference, theirs, range(7, 10))


def test_buffers_that_no_step_uses_are_in_the_state_dict():
    module = net()
    earlier = make(module, sgd(module, momentum=0.9))
    earlier.step(*batch())
    state = earlier.state_dict()
    other = net()
    trainer = make(other, sgd(other))
    trainer.load_state_dict(state)
    trainer.step(*batch(1))
    assert torch.equal(trainer.state_dict()["Momentum_0.weight"], state["Momentum_0.weight"])
    trainer.load_state_dict(trainer.state_dict(), strict=True)
