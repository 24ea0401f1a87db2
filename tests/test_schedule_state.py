"""The step of a schedule within the trainer is part of the state: a resumed run goes on as the one that was not stopped."""

from __future__ import annotations

import warnings

import pytest
import second_generation
import small
import torch
from small import assert_same, batch, net
from torch import nn

import orttrainer
from orttrainer import load_checkpoint, save_checkpoint
from orttrainer.errors import StateError
from orttrainer.schedule_state import BATCHES, UPDATES
from orttrainer.training import amp, checkpoint, optim


class First:
    def __init__(self, seed=0, optimizer="AdamOptimizer", **options):
        self.trainer = small.make(
            net(seed=seed), optimizer, get_lr_this_step=lambda step: 0.1 / (1 + step), check_export=False, **options
        )

    def step(self, number):
        return self.trainer.train_step(*batch(number))[0]

    def save(self, folder):
        save_checkpoint(self.trainer, folder)

    def load(self, folder):
        load_checkpoint(self.trainer, folder, strict=True)

    @property
    def counts(self):
        return self.trainer.global_step_, self.trainer.current_step

    def state(self):
        return self.trainer.state_dict()


class Second(First):
    """With the state of the first, as its `checkpoint.experimental_*` functions have it."""

    def __init__(self, seed=0, config=None, **branches):
        schedule = optim.lr_scheduler.LinearWarmupLRScheduler(30, 0.3)
        config = config or optim.AdamConfig(lr=0.1)
        self.trainer = second_generation.make(net(seed=seed), config, lr_scheduler=schedule, **branches)

    def save(self, folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            checkpoint.experimental_save_checkpoint(self.trainer, folder)

    def load(self, folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            checkpoint.experimental_load_checkpoint(self.trainer, folder, strict=True)

    @property
    def counts(self):
        info = self.trainer._train_step_info
        return info.optimization_step, info.step

    def state(self):
        return self.trainer._flat_state_dict()


def scaled(**options):
    return {"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=8.0, up_scale_window=3), **options}


KINDS = {
    "first": First,
    "first, SGD": lambda seed=0: First(seed, "SGDOptimizer"),
    "first, in blocks": lambda seed=0: First(seed, gradient_accumulation_steps=2),
    "second": Second,
    "second, SGD": lambda seed=0: Second(seed, optim.SGDConfig(lr=0.1)),
    "second, in float16": lambda seed=0: Second(seed, mixed_precision=scaled()),
}


@pytest.mark.parametrize(
    ("kind", "steps_of_the_loader"), [*((kind, 0) for kind in KINDS), ("first", 2), ("second, in float16", 2)]
)
def test_a_schedule_goes_on_where_it_was(kind, steps_of_the_loader, tmp_path):
    whole, first, second = KINDS[kind](), KINDS[kind](), KINDS[kind](seed=1)
    expected = [whole.step(number) for number in range(8)]
    losses = [first.step(number) for number in range(5)]
    first.save(tmp_path)
    for number in range(steps_of_the_loader):
        second.step(number)
    second.load(tmp_path)
    assert second.counts == first.counts
    losses += [second.step(number) for number in range(5, 8)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert second.counts == whole.counts
    assert_same(second.state(), whole.state())


def test_a_state_goes_from_one_generation_to_the_other(tmp_path):
    first, second = First(), Second(seed=1)
    for number in range(3):
        first.step(number)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.counts == (3, 3)
    second.step(3)
    (tmp_path / "second").mkdir()
    second.save(tmp_path / "second")
    first.load(tmp_path / "second")
    assert first.counts == (4, 4)


def test_a_trainer_that_takes_the_rate_has_no_such_entries_and_loads_those_of_one_with_a_schedule():
    source = First()
    source.step(0)
    state = source.state()
    assert (state[UPDATES].item(), state[BATCHES].item()) == (1, 1)
    assert not {UPDATES, BATCHES} & source.trainer.state_dict(include_optimizer_state=False).keys()
    module = net()
    sketch = orttrainer.trainer(module, nn.functional.cross_entropy, torch.optim.Adam(module.parameters(), 0.1))
    rated = small.make(optimizer="AdamOptimizer")
    rated.train_step(*batch(), 0.1), sketch.step(*batch())
    for trainer in (rated, sketch):
        assert not {UPDATES, BATCHES} & trainer.state_dict().keys()
        trainer.load_state_dict(state, strict=True)


def test_a_state_that_does_not_say_where_its_schedule_was_leaves_the_step_and_says_so():
    source = First()
    source.step(0)
    old = {name: value for name, value in source.state().items() if name not in (UPDATES, BATCHES)}
    started = First(global_step=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started.trainer.load_state_dict(old, strict=True)  # as legacy scripts resume
        First().trainer.load_state_dict(net().state_dict())  # weights alone
    assert started.trainer.global_step_ == 4
    fresh = First()
    with pytest.warns(UserWarning, match="not the step of its schedule, which goes on at 0; set trainer.global_step_"):
        fresh.trainer.load_state_dict(old, strict=True)


@pytest.mark.parametrize("wrong", [torch.tensor([-1]), torch.tensor([0.5]), torch.ones(2)])
def test_what_is_no_number_of_updates_loads_nothing(wrong):
    first = First()
    first.step(0)
    before = first.state()
    changed = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    with pytest.raises(StateError, match="'Global_Step' must be a whole number >= 0"):
        first.trainer.load_state_dict(changed | {UPDATES: wrong})
    assert_same(first.state(), before)
    assert first.counts == (1, 1)
