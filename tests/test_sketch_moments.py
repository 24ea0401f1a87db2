"""The moments of `orttrainer.trainer` are its optimizer's: who loads, clears or shares them has what PyTorch has."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import defaultdict

import pytest
import torch
from marks import in_turn, usual
from small import assert_same, batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from test_sketch_optimizer import MOMENTS, make
from torch import nn

from orttrainer import trainer as trainer_of
from orttrainer.errors import StateError

KINDS = ["momentum", "dampening", "adam", "amsgrad"]


class Wave(nn.Module):
    """Of complex parameters."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.complex(torch.eye(4, 3), torch.ones(4, 3)))

    def forward(self, x):
        return (x @ self.phase.real) * (x @ self.phase.imag)


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


# -- edited in the optimizer's state ----------------------------------------------------------


def replaced(optimizer, module):
    optimizer.state = defaultdict(dict)


def one_entry(optimizer, module):
    moment = torch.ones_like(module[0].weight)
    optimizer.state[module[0].weight] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment.clone()}


def cleared(optimizer, module):
    optimizer.state.clear()


def one_taken_out(optimizer, module):
    del optimizer.state[module[3].bias]


# Of the last two the optimizer has updated by itself before there is a trainer.
@pytest.mark.parametrize("edit", [replaced, one_entry, cleared, one_taken_out])
def test_entries_of_its_state_that_are_others_are_the_moments_of_the_next_step(edit):
    module, reference = net(), net()
    ours, theirs = MOMENTS["adam"](module), MOMENTS["adam"](reference)
    if edit in (cleared, one_taken_out):
        for m, optimizer in ((module, ours), (reference, theirs)):
            torch_step(m, optimizer, *batch(9))
            optimizer.zero_grad()
    trainer = make(module, ours)
    for step in range(5):
        if step == 2:
            edit(ours, module)
            edit(theirs, reference)
        for optimizer in (ours, theirs):
            len(optimizer.state[module[0].bias])  # looking makes an entry that is empty
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
        ours.step()  # as an old loop has it: without gradients
        assert_parameters_close(module, reference)


def test_what_is_written_to_moments_from_before_the_first_step_is_refused_until_all_is_given():
    module = net()
    optimizer = MOMENTS["adam"](module)
    torch_step(module, optimizer, *batch())
    optimizer.zero_grad()
    trainer = make(module, optimizer)
    optimizer.state[module[0].weight]["exp_avg"].zero_()  # before the first step it is taken over
    trainer.step(*batch(1))
    optimizer.state[module[0].weight]["exp_avg"].zero_()
    before = trainer.state_dict()
    for _ in range(2):
        with pytest.raises(StateError, match=r"shape \[8, 4\] was changed, .* Nothing was updated"):
            trainer.step(*batch(2))
    assert_same(trainer.state_dict(), before)
    before["Moment_1_0.weight"].zero_()
    trainer.load_state_dict(before)
    assert not trainer.state_dict()["Moment_1_0.weight"].any()
    trainer.step(*batch(2))


# -- shared -----------------------------------------------------------------------------------


def smooth(prediction, label):
    return nn.functional.cross_entropy(prediction, label, label_smoothing=0.3)


@pytest.mark.parametrize("case, gone", in_turn(KINDS, {"stays": False, "is gone": True}))
def test_a_second_trainer_on_the_optimizer_goes_on_with_its_moments(case, gone):
    module, reference = net(), net()
    ours, theirs = MOMENTS[case](module), MOMENTS[case](reference)
    first = make(module, ours)
    for step in range(3):
        first.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    if gone:
        del first
        gc.collect()
    second = make(module, ours, smooth)
    for step in range(3, 7):
        second.step(*batch(step))
        torch_step(reference, theirs, *batch(step), smooth)
    assert_parameters_close(module, reference)


@pytest.mark.parametrize("case", usual(KINDS, "momentum", "amsgrad"))
def test_trainers_that_step_in_turns_share_the_moments(case):
    module, reference = net(), net()
    ours, theirs = MOMENTS[case](module), MOMENTS[case](reference)
    fresh = copy.deepcopy(theirs.state_dict())
    trainers = [(make(module, ours, loss), loss) for loss in (nn.functional.cross_entropy, smooth)]
    for step in range(12):
        if step == 7:
            for optimizer in (ours, theirs):
                optimizer.load_state_dict(copy.deepcopy(fresh))
        trainer, loss = trainers[(step // 2) % 2]
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step), loss)
        assert_parameters_close(module, reference)


class Heads(nn.Module):
    """A body, and a head for each of two tasks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)


class Task(nn.Module):
    """One of the tasks, whose steps leave the other head alone."""

    def __init__(self, heads, number):
        super().__init__()
        self.head = heads.left if number == 0 else heads.right
        setattr(self, f"body_{number}", heads.body)  # each has names of its own
        self.all, self.number = heads, number

    def forward(self, x):
        return self.head(self.all.body(x))


def test_parameters_that_one_trainer_leaves_alone_keep_their_moments_and_counts():
    ours, theirs = Heads(), Heads()
    tasks, references = ([Task(m, number) for number in range(2)] for m in (ours, theirs))
    our_optimizer, their_optimizer = (torch.optim.Adam(m.parameters(), 0.02) for m in (ours, theirs))
    trainers = [make(task, our_optimizer) for task in tasks]
    for step, number in enumerate([0, 0, 1, 0, 1, 1, 0, 1]):
        trainers[number].step(*batch(step))
        torch_step(references[number], their_optimizer, *batch(step))
        assert_parameters_close(ours, theirs)


def test_gradients_of_a_block_are_kept_while_another_trainer_steps():
    module, reference = net(), net()
    ours, theirs = MOMENTS["adam"](module), MOMENTS["adam"](reference)
    accumulating, other = make(module, ours, gradient_accumulation_steps=2), make(module, ours, smooth)
    accumulating.step(*batch(0))
    nn.functional.cross_entropy(reference(batch(0)[0]), batch(0)[1]).div(2).backward()
    kept = [parameter.grad.clone() for parameter in reference.parameters()]
    other.step(*batch(1))
    torch_step(reference, theirs, *batch(1), smooth)
    accumulating.step(*batch(2))
    theirs.zero_grad()
    nn.functional.cross_entropy(reference(batch(2)[0]), batch(2)[1]).div(2).backward()
    for parameter, gradient in zip(reference.parameters(), kept):
        parameter.grad += gradient
    theirs.step()
    assert_parameters_close(module, reference)


def test_the_state_of_each_trainer_has_the_moments_that_they_share():
    module = net()
    optimizer = MOMENTS["adam"](module)
    first, second = make(module, optimizer), make(module, optimizer, smooth)
    for step, trainer in enumerate((first, second, second)):
        trainer.step(*batch(step))
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours["Update_Count_0.weight"] == 4
    shared = [name for name in ours if name.startswith(("Moment", "Update"))]
    assert_same({name: ours[name] for name in shared}, {name: theirs[name] for name in shared})


def test_what_one_trainer_loads_before_its_first_step_the_other_goes_on_with():
    module, reference = net(), net()
    theirs = MOMENTS["adam"](reference)
    source = make(module, MOMENTS["adam"](module))
    for step in range(3):
        source.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    other = net()
    optimizer = MOMENTS["adam"](other)
    first, second = make(other, optimizer), make(other, optimizer, smooth)
    second.load_state_dict(source.state_dict())
    first.step(*batch(3))
    torch_step(reference, theirs, *batch(3))
    second.step(*batch(4))
    torch_step(reference, theirs, *batch(4), smooth)
    assert_parameters_close(other, reference)


def test_weights_alone_that_a_trainer_loads_leave_the_moments():
    reference = net()
    theirs = MOMENTS["adam"](reference)
    torch_step(reference, theirs, *batch())
    module = copy.deepcopy(reference)
    ours = MOMENTS["adam"](module)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    trainer = make(module, ours)
    trainer.load_state_dict(dict(module.state_dict()))
    assert_goes_on_alike(trainer, module, reference, theirs)


# -- nothing is left behind -------------------------------------------------------------------


def test_a_trainer_that_is_gone_leaves_its_optimizer_nothing_but_moments():
    module = net()
    optimizer = MOMENTS["adam"](module)
    hooks = []
    for _ in range(2):
        trainer = make(module, optimizer)
        trainer.step(*batch())
        engine = weakref.ref(trainer._engine)
        module.whose = trainer  # as a module does that makes its own trainer
        del trainer, module.whose
        gc.collect()
        assert engine() is None
        hooks.append([len(held) for name, held in sorted(vars(optimizer).items()) if name.endswith("_hooks")])
    assert hooks[0] == hooks[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_step(module, optimizer, *batch())  # no second update: it is nobody else's any more


def test_a_trainer_that_its_own_criterion_knows_is_collected():
    class Learner:
        def __init__(self):
            self.module = net()
            self.optimizer = MOMENTS["adam"](self.module)
            self.trainer = make(self.module, self.optimizer, self.loss)

        def loss(self, prediction, label):
            return nn.functional.cross_entropy(prediction, label)

    learner = Learner()
    learner.trainer.step(*batch())
    engine = weakref.ref(learner.trainer._engine)
    del learner
    gc.collect()
    assert engine() is None


def test_momentum_that_is_loaded_strictly_without_momentum_waits_for_it_as_in_pytorch():
    modules = [net() for _ in range(3)]
    made = [sgd_of(module, momentum) for module, momentum in zip(modules, (0.9, 0.0, 0.9))]
    (before, after), twin = [trainer_of(m, nn.functional.cross_entropy, o) for m, o in zip(modules, made[:2])], made[2]
    for step in range(3):
        before.step(*batch(step))
        torch_step(modules[2], twin, *batch(step))
    after.step(*batch())
    after.load_state_dict(before.state_dict(), strict=True)
    assert_same(after.state_dict(), before.state_dict())
    made[1].param_groups[0]["momentum"] = 0.9
    assert_goes_on_alike(after, modules[1], modules[2], twin)


def test_moments_of_another_optimizer_are_unexpected_where_a_load_is_strict():
    module, adam_module = net(), net()
    plain = trainer_of(module, nn.functional.cross_entropy, sgd_of(module, 0.0))
    adam = trainer_of(adam_module, nn.functional.cross_entropy, torch.optim.Adam(adam_module.parameters()))
    plain.step(*batch()), adam.step(*batch())
    with pytest.raises(StateError, match=r"unexpected.*Moment_1_"):
        plain.load_state_dict(adam.state_dict(), strict=True)


def sgd_of(module, momentum):
    return torch.optim.SGD(module.parameters(), 0.1, momentum)
