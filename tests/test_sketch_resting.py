"""Groups of the optimizer that come and go, and moments that no step uses for a while: of these, of an SGD without momentum."""

from __future__ import annotations

import copy

import pytest
import torch
from marks import in_turn
from small import assert_same, batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from test_sketch_moments import KINDS, assert_goes_on_alike
from test_sketch_optimizer import MOMENTS, make
from torch import nn

from orttrainer.errors import InvalidArgumentError


def in_groups(case, *parts):
    """The optimizer of `MOMENTS` with a group for each part of a model."""
    whole = MOMENTS[case](nn.ModuleList(parts))
    return type(whole)([{"params": [*part.parameters()]} for part in parts], **whole.defaults)


# -- groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case, anew", in_turn(KINDS, {"the same trainer": False, "a new trainer": True}))
def test_a_group_that_was_taken_out_for_a_while_goes_on_with_its_moments(case, anew):
    module, reference = net(), net()
    ours, theirs = (in_groups(case, m[0], m[3]) for m in (module, reference))
    trainer = make(module, ours)
    assert_goes_on_alike(trainer, module, reference, theirs, range(3))
    resting = [optimizer.param_groups.pop() for optimizer in (ours, theirs)]
    trainer = make(module, ours)
    assert_goes_on_alike(trainer, module, reference, theirs, range(3, 5))
    for optimizer, group in zip((ours, theirs), resting):
        optimizer.param_groups.append(group)
    trainer = make(module, ours) if anew else trainer
    assert_goes_on_alike(trainer, module, reference, theirs, range(5, 8))


@pytest.mark.parametrize("case", KINDS)
def test_a_group_that_rests_when_the_trainer_is_made_has_the_moments_that_pytorch_left(case):
    module, reference = net(), net()
    ours, theirs = (in_groups(case, m[0], m[3]) for m in (module, reference))
    for m, optimizer in ((module, ours), (reference, theirs)):
        torch_step(m, optimizer, *batch(9))
        optimizer.zero_grad()
    resting = [optimizer.param_groups.pop() for optimizer in (ours, theirs)]
    trainer = make(module, ours)
    assert_goes_on_alike(trainer, module, reference, theirs, range(2))
    for optimizer, group in zip((ours, theirs), resting):
        optimizer.param_groups.append(group)
    assert_goes_on_alike(trainer, module, reference, theirs, range(2, 4))


def test_moments_outlast_a_trainer_whose_model_lacks_their_parameters():
    def tasks(body, *heads):
        return [nn.Sequential(body, head) for head in heads]

    parts = [nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)]
    copies = copy.deepcopy(parts)
    ours, theirs = (torch.optim.Adam(body.parameters(), 0.02) for body in (parts[0], copies[0]))
    for number in (0, 1, 0, 1):  # the task, each with a head of its own in the optimizer's second group
        for optimizer, own in ((ours, parts), (theirs, copies)):
            del optimizer.param_groups[1:]
            optimizer.add_param_group({"params": [*own[1 + number].parameters()]})
        module, reference = tasks(*parts)[number], tasks(*copies)[number]
        assert_goes_on_alike(make(module, ours), module, reference, theirs, range(number, number + 3))


@pytest.mark.parametrize("way_out", ["an update", "taking it out"])
def test_a_group_that_is_added_within_a_block_is_refused_until_there_is_a_way_out(way_out):
    module, reference = net(), net()
    ours, theirs = (torch.optim.Adam(m[3].parameters(), 0.01) for m in (module, reference))
    trainer = make(module, ours, gradient_accumulation_steps=2)

    def accumulate(step):
        trainer.step(*batch(step))
        nn.functional.cross_entropy(reference(batch(step)[0]), batch(step)[1]).backward()

    def update(batches):
        for parameter in reference.parameters():
            parameter.grad /= batches
        theirs.step()
        reference.zero_grad()
        assert_parameters_close(module, reference)

    accumulate(0)
    ours.add_param_group({"params": module[0].parameters()})
    before = trainer.state_dict()
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"when 1 batches were accumulated, .* by trainer.update\(\), "):
            trainer.step(*batch(1))
    assert_same(trainer.state_dict(), before)
    if way_out == "an update":
        assert trainer.update()
        update(1)
        theirs.add_param_group({"params": reference[0].parameters()})
        accumulate(1)
    else:
        ours.param_groups.pop()
    accumulate(2)
    update(2)


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
