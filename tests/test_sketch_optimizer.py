"""The torch optimizer of `orttrainer.trainer`: what is taken of it, followed, refused."""

from __future__ import annotations

import copy

import pytest
import torch
from marks import in_turn
from small import assert_same, batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from torch import nn

import orttrainer
from orttrainer.errors import InvalidArgumentError, OptimizerError, UnsupportedFeatureError


def make(module, optimizer, criterion=nn.functional.cross_entropy, **options):
    """Without the check of the export, which is not the subject here and takes most of the time."""
    return orttrainer.trainer(module, criterion, optimizer, check_export=False, **options)


# -- learning rates ---------------------------------------------------------------------------


def test_a_rate_that_is_changed_by_hand_holds_from_the_next_step():
    module, reference = net(), net()
    ours, theirs = sgd(module), sgd(reference)
    trainer = make(module, ours)
    for step, rate in enumerate((0.1, 0.3, 0.0, 0.05)):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = rate
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
        assert_parameters_close(module, reference)


def test_a_rate_in_a_tensor_is_read():
    module, reference = net(), net()
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)) for m in (module, reference))
    trainer = make(module, ours)
    for step in range(5):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    assert_parameters_close(module, reference)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_used_updates_nothing(rate):
    module = net()
    optimizer = sgd(module)
    trainer = make(module, optimizer)
    trainer.step(*batch())
    before = trainer.state_dict()
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(InvalidArgumentError, match="the learning rate must be a finite number >= 0"):
        trainer.step(*batch())
    assert_same(trainer.state_dict(), before)


def test_groups_without_anything_to_train_do_not_shift_the_rates_of_others():
    module, reference = net(), net()
    reference[0].weight.requires_grad_(False)
    module[0].weight.requires_grad_(False)

    def optimizer(m):
        groups = [[m[0].weight], [], [m[0].bias], [m[3].weight, m[3].bias]]
        return torch.optim.SGD([{"params": p, "lr": 0.1 * (1 + i)} for i, p in enumerate(groups)])

    theirs = optimizer(reference)
    trainer = make(module, optimizer(module))
    for step in range(5):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)


# -- which parameters -------------------------------------------------------------------------


def test_parameters_in_no_group_are_not_trained():
    module, reference = net(), net()
    theirs = sgd(reference[3])
    trainer = make(module, sgd(module[3]))
    for step in range(5):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)
    assert torch.equal(module[0].weight, net()[0].weight)


def test_a_tied_parameter_is_found_under_its_first_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    module, reference = Tied(), Tied()
    theirs = sgd(reference, momentum=0.9)
    trainer = make(module, sgd(module, momentum=0.9))
    for step in range(5):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)
    assert module.a.weight is module.b.weight


def test_a_parameter_of_another_module_is_refused():
    module = net()
    with pytest.raises(InvalidArgumentError, match=r"param_groups\[1\].* shape \[8, 4\] that is in neither model nor"):
        make(module, torch.optim.SGD([{"params": module.parameters()}, {"params": net(seed=1).parameters()}], lr=0.1))


# -- what must not change, and what is not there ----------------------------------------------

CHANGES = {
    "nesterov": (sgd, {"nesterov": True}, "'nesterov'.* is True now.*it must be False where 'momentum' is 0"),
    "maximize": (sgd, {"maximize": "yes"}, "'maximize'.* is 'yes' now.*it must be a number"),
    "no momentum": (
        lambda m: sgd(m, momentum=0.9), {"momentum": 0.0}, "'momentum'.* is 0.0 now.*it must be above 0",
    ),
    "dampening": (
        lambda m: sgd(m, momentum=0.9), {"dampening": 0.5}, "'dampening'.* is 0.5 now, but was 0 before.*part of the graph",
    ),
    "sgd's decay": (sgd, {"weight_decay": -0.1}, "'weight_decay'.* is -0.1 now, but was 0.*must be finite and not neg"),
    "betas": (
        lambda m: torch.optim.Adam(m.parameters()),
        {"betas": (0.5, 1.0)},
        r"'betas'.* is \(0.5, 1.0\) now, but was.*it must be below 1",
    ),
    "eps": (lambda m: torch.optim.AdamW(m.parameters()), {"eps": "small"}, "'eps'.* is 'small' now.*must be a number"),
    "amsgrad": (lambda m: torch.optim.AdamW(m.parameters()), {"amsgrad": True}, "'amsgrad'.* is True now"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_number_that_no_step_can_follow_is_an_error(case):
    optimizer, change, text = CHANGES[case]
    module = net()
    optimizer = optimizer(module)
    trainer = make(module, optimizer)
    trainer.step(*batch())
    before, old = trainer.state_dict(), dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(change)
    with pytest.raises((InvalidArgumentError, UnsupportedFeatureError), match=text):
        trainer.step(*batch())
    assert_same(trainer.state_dict(), before)
    optimizer.param_groups[0].update(old)
    trainer.step(*batch())


@pytest.mark.parametrize("options", [{}, {"cycle_momentum": False}], ids=["momentum too", "rate alone"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_one_cycle_is_followed(kind, options):
    def optimizer(module):
        return kind(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    module, reference = net(), net()
    ours, theirs = optimizer(module), optimizer(reference)
    trainer = make(module, ours)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=20, **options) for o in (ours, theirs)]
    for step in range(15):
        loss = trainer.step(*batch(step))[0]
        torch.testing.assert_close(loss, torch_step(reference, theirs, *batch(step)), rtol=1e-5, atol=1e-5)
        for schedule in schedules:
            schedule.step()
    assert_parameters_close(module, reference)


FOLLOWED = {
    "SGD's momentum": (lambda p: torch.optim.SGD(p, 0.1), {"momentum": 0.9}, {"momentum": 0.5}),
    "momentum, of which the first is not dampened": (
        lambda p: torch.optim.SGD(p, 0.1, dampening=0.5), {"momentum": 0.9}, {"momentum": 0.5},
    ),
    "SGD's decay": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), {"weight_decay": 0.1}, {"weight_decay": 0.0}),
    "Adam": (
        lambda p: torch.optim.Adam(p, 0.02), {"betas": [0.5, 0.9]}, {"betas": (0.8, 0.99), "eps": 1e-2, "weight_decay": 0.1},
    ),
    "AdamW": (lambda p: torch.optim.AdamW(p, 0.02), {"weight_decay": 0.5, "eps": 1e-3}, {"weight_decay": 0.2}),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWED)
def test_numbers_of_one_group_that_change_hold_from_the_next_step(case):
    kind, *changes = FOLLOWED[case]
    module, reference = net(), net()
    ours, theirs = (kind([{"params": m[0].parameters()}, {"params": m[3].parameters()}]) for m in (module, reference))
    trainer = make(module, ours)
    for step, change in enumerate([{}, {}, changes[0], {}, changes[1], changes[0], {}]):
        for optimizer in (ours, theirs):
            optimizer.param_groups[1].update(change)
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
        assert_parameters_close(module, reference)


IN_TENSORS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=torch.tensor(0.9)),
    "weight_decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=torch.tensor(0.1)),
    "betas": lambda p: torch.optim.Adam(
        p, torch.tensor(0.02), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
}


@pytest.mark.parametrize("key", IN_TENSORS)
def test_numbers_in_tensors_that_are_written_to_hold_from_the_next_step(key):
    module, reference = net(), net()
    ours, theirs = (IN_TENSORS[key](m.parameters()) for m in (module, reference))
    trainer = make(module, ours)
    for step in range(5):
        for optimizer in (ours, theirs):
            value = optimizer.param_groups[0][key]
            (value if key != "betas" else value[step % 2]).mul_(0.8)
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
        assert_parameters_close(module, reference)


def test_a_group_that_is_added_trains_from_the_next_step():
    """As where layers are set free one by one."""
    module, reference = net(), net()
    ours, theirs = (torch.optim.Adam(m[3].parameters(), 0.01) for m in (module, reference))
    trainer = make(module, ours)
    for step in range(9):
        for m, optimizer in ((module, ours), (reference, theirs)):
            if step == 3:
                optimizer.add_param_group({"params": [m[0].bias], "lr": 0.05, "betas": (0.5, 0.9)})
            if step == 6:
                optimizer.add_param_group({"params": [m[0].weight]})
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
        assert_parameters_close(module, reference)


def test_a_group_that_is_added_before_the_first_step_is_trained():
    module, reference = net(), net()
    ours, theirs = (sgd(m[3]) for m in (module, reference))
    trainer = make(module, ours)
    for m, optimizer in ((module, ours), (reference, theirs)):
        optimizer.add_param_group({"params": m[0].parameters()})
    for step in range(2):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)


def test_a_layer_that_comes_after_the_first_step_wants_a_new_trainer():
    module = net()
    optimizer = sgd(module)
    trainer = make(module, optimizer)
    trainer.step(*batch())
    module.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": module[-1].parameters()})
    with pytest.raises(InvalidArgumentError, match=r"or came there after the first step.* a new trainer"):
        trainer.step(*batch())
    make(module, optimizer).step(*batch())


def test_a_group_that_cannot_be_taken_is_refused_until_it_is_gone():
    module = net()
    optimizer = torch.optim.Adam(module[3].parameters())
    trainer = make(module, optimizer)
    trainer.step(*batch())
    before = trainer.state_dict()
    foreign, unknown = {"params": net()[0].bias}, {"params": module[0].bias, "differentiable": True}
    for group, text in ((foreign, "is in neither model nor"), (unknown, "has differentiable=True")):
        optimizer.add_param_group(group)
        with pytest.raises((InvalidArgumentError, UnsupportedFeatureError), match=text):
            trainer.step(*batch())
        optimizer.param_groups.pop()
    assert_same(trainer.state_dict(), before)
    trainer.step(*batch())


class Other(torch.optim.SGD):
    pass


REFUSED = {
    "a subclass": (
        lambda p: Other(p, lr=0.1),
        "optimizer is a test_sketch_optimizer.Other; this front end takes objects",
    ),
    "NAdam": (lambda p: torch.optim.NAdam(p), "optimizer is a torch.optim.nadam.NAdam"),
    "the class": (lambda p: torch.optim.SGD, "optimizer is the class torch.optim.sgd.SGD"),
    "a name": (lambda p: "SGDOptimizer", "optimizer is a builtins.str"),
    "differentiable": (
        lambda p: torch.optim.AdamW(p, differentiable=True),
        r"param_groups\[0\] of the optimizer has differentiable=True, for which the training graph has no update",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_optimizer_that_has_no_update_here_is_refused_by_name(case):
    optimizer, text = REFUSED[case]
    module = net()
    with pytest.raises(UnsupportedFeatureError, match=text):
        make(module, optimizer(module.parameters()))


def test_dampening_without_momentum_has_no_effect_in_torch_and_is_taken():
    module, reference = net(), net()
    theirs = sgd(reference, dampening=0.5)
    trainer = make(module, sgd(module, dampening=0.5))
    for step in range(3):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)


MAXIMIZING = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
}


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", MAXIMIZING)
def test_a_group_that_maximizes_goes_up_and_another_down(name, max_norm):
    module, reference = net(), net()
    ours, theirs = MAXIMIZING[name](module[0].parameters()), MAXIMIZING[name](reference[0].parameters())
    for optimizer, own in ((ours, module), (theirs, reference)):
        optimizer.add_param_group({"params": own[3].parameters(), "maximize": False})
    trainer = make(module, ours, max_grad_norm=max_norm, gradient_accumulation_steps=2)
    for step in range(6):
        x, label = batch(step)
        trainer.step(x, label)
        (nn.functional.cross_entropy(reference(x), label) / 2).backward()
        if step % 2:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            theirs.step()
            theirs.zero_grad()
    assert_parameters_close(module, reference)


def test_nesterov_in_a_group_without_momentum_is_refused():
    module = net()
    optimizer = torch.optim.SGD([{"params": module.parameters(), "nesterov": True}], lr=0.1)
    with pytest.raises(OptimizerError, match=r"'nesterov' of parameter '0.weight' is 1; it must be 0"):
        make(module, optimizer).step(*batch())


# -- the optimizer's own step and state -------------------------------------------------------


def test_what_an_old_loop_still_calls_does_no_harm():
    plain, other = net(), net()
    first, optimizer = make(plain, sgd(plain, momentum=0.9)), sgd(other, momentum=0.9)
    second = make(other, optimizer)
    for step in range(5):
        first.step(*batch(step))
        optimizer.zero_grad()
        second.step(*batch(step))
        optimizer.step()
    assert_same(dict(other.state_dict()), dict(plain.state_dict()))
    assert optimizer.state == {}


def test_a_second_update_by_the_optimizer_is_warned_of_and_trained_on():
    module = net()
    optimizer = sgd(module)
    trainer = make(module, optimizer)
    trainer.step(*batch())
    nn.functional.cross_entropy(module(batch()[0]), batch()[1]).backward()
    with pytest.warns(UserWarning, match=r"leave out backward\(\) and optimizer.step\(\)"):
        optimizer.step()
    torch.testing.assert_close(trainer.eval(*batch())[1], module(batch()[0]).detach())


MOMENTS = {
    "momentum": lambda m: sgd(m, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.05, betas=(0.8, 0.5), amsgrad=True),
    "dampening": lambda m: sgd(m, momentum=0.9, dampening=0.6),
}


@pytest.mark.parametrize("case, through_a_file", in_turn(list(MOMENTS), [False, True]))
def test_moments_that_the_optimizer_has_are_taken_over(case, through_a_file):
    reference = net()
    theirs = MOMENTS[case](reference)
    for step in range(5):
        torch_step(reference, theirs, *batch(step))
    module = copy.deepcopy(reference)
    ours = MOMENTS[case](module)
    if through_a_file:  # an old script's order: the trainer is made, and has run, when the state is loaded
        trainer = make(module, ours)
        trainer.step(*batch())
        module.load_state_dict(reference.state_dict())
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        trainer = make(module, ours)
    for step in range(5, 15):
        loss = trainer.step(*batch(step))[0]
        torch.testing.assert_close(loss, torch_step(reference, theirs, *batch(step)), rtol=1e-5, atol=1e-5)
    assert_parameters_close(module, reference)


def test_moments_of_a_loaded_state_dict_win_over_the_optimizers_earlier_ones():
    module = net()
    source = make(module, MOMENTS["adam"](module))
    source.step(*batch())
    state = source.state_dict()
    other = net()
    optimizer = MOMENTS["adam"](other)
    torch_step(other, optimizer, *batch(7))
    trainer = make(other, optimizer)
    trainer.load_state_dict(state)
    assert torch.equal(trainer.step(*batch(1))[0], source.step(*batch(1))[0])
    assert_same(trainer.state_dict(), source.state_dict())


def test_moments_for_some_parameters_only_are_taken_over():
    module = net()
    reference = copy.deepcopy(module)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (module, reference)]
    for m, optimizer in zip((module, reference), optimizers):
        nn.functional.cross_entropy(m(batch()[0]), batch()[1]).backward()
        m[0].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    trainer = make(module, optimizers[0])
    for step in range(3):
        expected = torch_step(reference, optimizers[1], *batch(step))
        torch.testing.assert_close(trainer.step(*batch(step))[0], expected, rtol=1e-5, atol=1e-5)
    assert_parameters_close(module, reference)
