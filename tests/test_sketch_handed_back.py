"""The moments that `orttrainer.trainer` has are where PyTorch has them, for whoever reads the optimizer's own state."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from marks import in_turn
from small import assert_same, batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from test_sketch_moments import KINDS, Wave, assert_goes_on_alike
from test_sketch_optimizer import MOMENTS, make
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def trained(case, model=net):
    """A model that a trainer has trained and one that PyTorch has, with their optimizers, and the trainer."""
    module, reference = model(), model()
    ours, theirs = MOMENTS[case](module), MOMENTS[case](reference)
    trainer = make(module, ours)
    assert_goes_on_alike(trainer, module, reference, theirs, range(3))
    return module, ours, trainer, reference, theirs


def through_a_state_dict(module, optimizer, case):
    other = copy.deepcopy(module)
    loaded = MOMENTS[case](other)
    loaded.load_state_dict(optimizer.state_dict())
    return other, loaded


def through_a_copy(module, optimizer, case):
    return copy.deepcopy((module, optimizer))


def through_a_pickle(module, optimizer, case):
    return pickle.loads(pickle.dumps((module, optimizer)))


COPIED = [through_a_state_dict, through_a_copy, through_a_pickle]


@pytest.mark.parametrize("copied", COPIED)
@pytest.mark.parametrize("case", KINDS)
def test_what_is_made_of_the_optimizer_has_the_moments(case, copied):
    module, ours, _, reference, theirs = trained(case)
    other, optimizer = copied(module, ours, case)
    assert not ours.state  # nothing twice in memory
    for step in range(3, 6):  # by PyTorch alone
        torch_step(other, optimizer, *batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(other, reference)
    assert {key: type(x) for key, x in optimizer.state[other[0].weight].items()} == {
        key: type(x) for key, x in theirs.state[reference[0].weight].items()
    }


@pytest.mark.parametrize("copied", COPIED)
def test_a_trainer_on_the_copy_goes_on_with_them_and_leaves_those_of_the_first(copied):
    module, ours, trainer, reference, theirs = trained("adam")
    other, optimizer = copied(module, ours, "adam")
    other_reference, other_theirs = copy.deepcopy((reference, theirs))
    assert_goes_on_alike(make(other, optimizer), other, other_reference, other_theirs)
    assert_goes_on_alike(trainer, module, reference, theirs)


@pytest.mark.parametrize("case, closes", in_turn(KINDS, {"gradients": False, "a closure": True}))
def test_the_optimizers_own_step_goes_on_with_them_and_the_trainer_with_its(case, closes):
    module, ours, trainer, reference, theirs = trained(case)
    x, label = batch(3)

    def closure():
        ours.zero_grad()
        loss = nn.functional.cross_entropy(module(x), label)
        loss.backward()
        return loss

    torch_step(reference, theirs, x, label)
    with pytest.warns(UserWarning, match="trains, with gradients that"):
        if closes:
            ours.step(closure)
        else:
            closure()
            ours.step()
    assert_parameters_close(module, reference)
    ours.zero_grad()
    assert_goes_on_alike(trainer, module, reference, theirs)
    del trainer
    gc.collect()
    torch_step(module, ours, *batch(5))
    torch_step(reference, theirs, *batch(5))
    assert_parameters_close(module, reference)


def test_those_of_complex_parameters_are_complex():
    module, reference = Wave(), Wave()
    ours, theirs = sgd(module, momentum=0.9), sgd(reference, momentum=0.9)
    assert_goes_on_alike(make(module, ours), module, reference, theirs, range(3))
    moment = ours.state_dict()["state"][0]["momentum_buffer"]
    torch.testing.assert_close(moment, theirs.state_dict()["state"][0]["momentum_buffer"])


def test_an_entry_that_was_given_to_the_optimizer_is_the_newer_one():
    module, ours, trainer, reference, theirs = trained("adam")
    for m, optimizer in ((module, ours), (reference, theirs)):
        moment = torch.ones_like(m[0].weight)
        optimizer.state[m[0].weight] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment.clone()}
    found, expected = ours.state_dict(), theirs.state_dict()
    for number, entry in expected["state"].items():
        torch.testing.assert_close(found["state"][number], entry, rtol=1e-5, atol=1e-6)
    assert_goes_on_alike(trainer, module, reference, theirs)


def test_an_optimizer_without_moments_has_none_in_its_state_dict():
    module = net()
    optimizer = sgd(module)
    make(module, optimizer).step(*batch())
    assert optimizer.state_dict()["state"] == {}
    assert_same(dict(copy.deepcopy(optimizer).state), {})


@pytest.mark.parametrize("case", KINDS)
def test_a_distributed_checkpoint_reads_and_sets_them_and_changes_nothing(case):
    """Where `state` is empty it makes a step of zeros by a rate of 0 first, to have entries."""
    module, ours, trainer, reference, theirs = trained(case)
    weights, moments = get_state_dict(module, ours)
    _, expected = get_state_dict(reference, theirs)
    for name, entry in expected["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(moments["state"][name][key], value, rtol=1e-4, atol=1e-6)
    assert_goes_on_alike(trainer, module, reference, theirs, range(3, 5))
    for model, optimizer in ((module, ours), (reference, theirs)):  # back to where they were read
        saved = copy.deepcopy((weights, moments))
        set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert_goes_on_alike(trainer, module, reference, theirs, range(5, 7))
