"""The moments of `orttrainer.trainer` are its optimizer's: who loads, clears or shares them has what PyTorch has."""

from __future__ import annotations

import copy

import pytest
import torch
from small import batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from test_sketch_optimizer import MOMENTS, make

KINDS = ["momentum", "adam"]


def assert_goes_on_alike(trainer, module, reference, theirs, steps=range(10, 14)):
    for step in steps:
        loss = trainer.step(*batch(step))[0]
        torch.testing.assert_close(loss, torch_step(reference, theirs, *batch(step)), rtol=1e-5, atol=1e-5)
    assert_parameters_close(module, reference)


# -- loaded -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", KINDS)
def test_an_empty_state_that_is_loaded_takes_the_moments_away(case):
    module, reference = net(), net()
    ours, theirs = MOMENTS[case](module), MOMENTS[case](reference)
    fresh = copy.deepcopy(theirs.state_dict())
    trainer = make(module, ours)
    for step in range(3):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    for optimizer in (ours, theirs):
        optimizer.load_state_dict(copy.deepcopy(fresh))
    assert_goes_on_alike(trainer, module, reference, theirs)


def test_an_empty_state_that_is_loaded_in_the_midst_of_a_block_leaves_its_gradients():
    module, reference = net(), net()
    ours, theirs = MOMENTS["adam"](module), MOMENTS["adam"](reference)
    fresh = copy.deepcopy(theirs.state_dict())
    trainer = make(module, ours, gradient_accumulation_steps=2)
    for block in range(3):
        batches = [batch(2 * block + index) for index in range(2)]
        trainer.step(*batches[0])
        if block == 1:
            for optimizer in (ours, theirs):
                optimizer.load_state_dict(copy.deepcopy(fresh))
        trainer.step(*batches[1])
        torch_step(reference, theirs, *(torch.cat(tensors) for tensors in zip(*batches)))
        assert_parameters_close(module, reference)


def test_an_empty_state_that_is_loaded_before_the_first_step_leaves_what_the_trainer_was_given():
    module = net()
    source = make(module, MOMENTS["adam"](module))
    source.step(*batch())
    other = net()
    optimizer = MOMENTS["adam"](other)
    trainer = make(other, optimizer)
    trainer.load_state_dict(source.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(trainer.step(*batch(1))[0], source.step(*batch(1))[0])
    assert_parameters_close(other, module, 0)


def test_moments_of_complex_parameters_are_taken_over_and_taken_away():
    class Wave(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = torch.nn.Parameter(torch.complex(torch.eye(4, 3), torch.ones(4, 3)))

        def forward(self, x):
            return (x @ self.phase.real) * (x @ self.phase.imag)

    reference = Wave()
    theirs = sgd(reference, momentum=0.9)
    fresh = copy.deepcopy(theirs.state_dict())
    torch_step(reference, theirs, *batch())
    module = copy.deepcopy(reference)
    ours = sgd(module, momentum=0.9)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    trainer = make(module, ours)
    assert_goes_on_alike(trainer, module, reference, theirs)
    for optimizer in (ours, theirs):
        optimizer.load_state_dict(copy.deepcopy(fresh))
    assert_goes_on_alike(trainer, module, reference, theirs)
