"""The loss scale is part of the state: a resumed run in float16 goes on as the one that was not stopped."""

from __future__ import annotations

import pytest
import torch
from small import LR, assert_same, batch, make, net
from test_sketch import sgd
from torch import nn

import orttrainer
from orttrainer import LossScaler, load_checkpoint, save_checkpoint
from orttrainer.errors import StateError
from orttrainer.scaler_state import SCALE, STABLE_STEPS


def scaler(**options):
    return LossScaler("loss_scale", **{"is_dynamic_scale": True, "loss_scale": 8.0, "up_scale_window": 3, **options})


class FirstGeneration:
    def __init__(self, seed=0, loss_scaler=None, **options):
        self.scaler = loss_scaler or scaler()
        precision = {"use_mixed_precision": True, "loss_scaler": self.scaler, **options}
        self.trainer = make(net(seed=seed), check_export=False, **precision)

    def step(self, number):
        return self.trainer.train_step(*batch(number), LR)[0]


class Sketch:
    def __init__(self, seed=0, loss_scaler=None, **options):
        module, self.scaler = net(seed=seed), loss_scaler or scaler()
        precision = {"mixed_precision": "float16", "loss_scaler": self.scaler, **options}
        self.trainer = orttrainer.trainer(
            module, nn.functional.cross_entropy, sgd(module), check_export=False, **precision
        )

    def step(self, number):
        return self.trainer.step(*batch(number))[0]


@pytest.mark.parametrize("steps_of_the_loader", [0, 2])
@pytest.mark.parametrize("kind", [FirstGeneration, Sketch])
def test_the_loss_scale_and_its_window_are_resumed(kind, steps_of_the_loader, tmp_path):
    whole, first, second = kind(), kind(), kind(seed=1)
    expected = [whole.step(number) for number in range(8)]
    losses = [first.step(number) for number in range(4)]
    save_checkpoint(first.trainer, tmp_path)
    for number in range(steps_of_the_loader):
        second.step(number)
    load_checkpoint(second.trainer, tmp_path, strict=True)
    assert (second.scaler.loss_scale_, second.scaler.stable_steps_) == (16.0, 1)  # doubled after 3
    losses += [second.step(number) for number in range(4, 8)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(second.trainer.state_dict(), whole.trainer.state_dict())


@pytest.mark.parametrize("kind", [FirstGeneration, Sketch])
def test_states_without_a_loss_scale_load_as_before_and_so_does_one_without_a_scaler(kind):
    source, other = kind(), kind(seed=1)
    source.step(0), other.step(0)
    state = source.trainer.state_dict()
    old = {name: value for name, value in state.items() if name not in (SCALE, STABLE_STEPS)}
    other.scaler.loss_scale_ = 4.0
    other.trainer.load_state_dict(old, strict=True)
    assert other.scaler.loss_scale_ == 4.0
    assert not {SCALE, STABLE_STEPS} & source.trainer.state_dict(include_optimizer_state=False).keys()
    whole = Sketch(mixed_precision=None) if kind is Sketch else FirstGeneration(use_mixed_precision=False)
    whole.step(0)
    assert not {SCALE, STABLE_STEPS} & whole.trainer.state_dict().keys()
    whole.trainer.load_state_dict(state, strict=True)
    torch.testing.assert_close(whole.step(1), source.step(1), rtol=0.01, atol=0.01)


def test_a_scale_that_stays_as_it_is_and_a_scaler_of_the_callers_own_are_no_part_of_the_state():
    class Own:
        loss_scale_ = 2.0

        def update_loss_scale(self, is_all_finite):
            pass

    for own in (scaler(is_dynamic_scale=False), Own()):
        ours, source = Sketch(loss_scaler=own), Sketch()
        ours.step(0), source.step(0)
        assert not {SCALE, STABLE_STEPS} & ours.trainer.state_dict().keys()
        before = own.loss_scale_
        source.scaler.loss_scale_ = 1024.0
        ours.trainer.load_state_dict(source.trainer.state_dict(), strict=True)
        assert own.loss_scale_ == before


WRONG = {
    "a scale of 0": ({SCALE: torch.tensor([0.0])}, "'Loss_Scale': the loss scale must be a finite number above 0"),
    "two scales": ({SCALE: torch.ones(2)}, "'Loss_Scale': the loss scale must have one element"),
    "half a step": ({STABLE_STEPS: torch.tensor([0.5])}, "'Loss_Scale_Stable_Steps' must be a whole number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_loss_scale_loads_nothing(case):
    wrong, text = WRONG[case]
    ours = Sketch()
    ours.step(0)
    before = ours.trainer.state_dict()
    changed = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    with pytest.raises(StateError, match=text):
        ours.trainer.load_state_dict(changed | {SCALE: torch.tensor([8.0])} | wrong)
    assert_same(ours.trainer.state_dict(), before)
