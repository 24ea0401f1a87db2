"""Amsgrad and dampening of a torch optimizer: the greatest second moment, and a first gradient that is not dampened."""

from __future__ import annotations

import copy

import pytest
import torch
from marks import in_turn
from small import assert_same, batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from test_sketch_moments import Wave, assert_goes_on_alike
from test_sketch_optimizer import MOMENTS, make
from torch import nn

from orttrainer import LossScaler, load_checkpoint, save_checkpoint

KINDS = ["amsgrad", "dampening"]


# -- groups -----------------------------------------------------------------------------------

GROUPS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.5), weight_decay=0.05, amsgrad=True),
    "AdamW, up": lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.5), amsgrad=True, maximize=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    "SGD, up": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=-0.3, maximize=True),
}


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", GROUPS)
def test_one_group_has_it_and_another_not(name, max_norm):
    module, reference = net().double(), net().double()
    ours, theirs = (GROUPS[name](m[0].parameters()) for m in (module, reference))
    for optimizer, own in ((ours, module), (theirs, reference)):
        optimizer.add_param_group({"params": own[3].parameters(), "amsgrad": False, "dampening": 0.0})
    trainer = make(module, ours, max_grad_norm=max_norm, gradient_accumulation_steps=2)
    for step in range(10):
        x, label = batch(step)
        trainer.step(x.double(), label)
        (nn.functional.cross_entropy(reference(x.double()), label) / 2).backward()
        if step % 2:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            theirs.step()
            theirs.zero_grad()
    # Rates are float32 in the graph; what PyTorch clips by is the norm and 1e-6.
    assert_parameters_close(module, reference, 1e-7 if max_norm is None else 1e-5)
    kept = "Max_Moment_2_" if "Adam" in name else "Update_Count_"
    assert {key for key in trainer.state_dict() if key.startswith(kept)} == {f"{kept}0.weight", f"{kept}0.bias"}


@pytest.mark.parametrize("case", KINDS)
def test_groups_that_are_added_begin_for_themselves(case):
    module, reference = net(), net()
    ours, theirs = (MOMENTS[case](m[3]) for m in (module, reference))
    trainer = make(module, ours)
    for step in range(8):
        if step == 3:
            for m, optimizer in ((module, ours), (reference, theirs)):
                optimizer.add_param_group({"params": m[0].parameters()})
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
        assert_parameters_close(module, reference)


# -- which gradient is the first --------------------------------------------------------------


class Adapter(nn.Module):
    """Of whose two factors the second is 0, as at the start of a LoRA: the first one's gradient is 0 then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(2, 3)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.b(self.a(x))


def test_a_first_gradient_of_zero_is_the_first():
    module, reference = Adapter(), Adapter()
    trainer, theirs = make(module, MOMENTS["dampening"](module)), MOMENTS["dampening"](reference)
    assert_goes_on_alike(trainer, module, reference, theirs)


def test_a_momentum_without_dampening_has_had_its_first_gradient():
    module, reference = net(), net()
    ours, theirs = sgd(module, momentum=0.9), sgd(reference, momentum=0.9)
    first = make(module, ours)
    first.step(*batch())
    torch_step(reference, theirs, *batch())
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["dampening"] = 0.5
    assert_goes_on_alike(make(module, ours), module, reference, theirs)


@pytest.mark.parametrize("case", KINDS)
def test_an_update_that_overflows_leaves_no_trace(case):
    plain, other = net(), net()
    expected = make(plain, MOMENTS[case](plain), mixed_precision="float16")
    scaler = LossScaler("loss_scale", True, loss_scale=2.0**40, max_loss_scale=2.0**40)
    trainer = make(other, MOMENTS[case](other), mixed_precision="float16", loss_scaler=scaler)
    overflows = 0
    while torch.equal(other[0].weight, net()[0].weight):
        trainer.step(*batch())
        overflows += 1
    assert overflows > 2
    expected.step(*batch())
    for step in range(1, 4):
        trainer.step(*batch(step))
        expected.step(*batch(step))
    # Another loss scale rounds the gradients in another way.
    assert_parameters_close(other, plain, 2e-3)
    counts = {name: value for name, value in expected.state_dict().items() if name.startswith("Update_Count_")}
    assert counts and {value.item() for value in counts.values()} == {5}
    assert_same({name: trainer.state_dict()[name] for name in counts}, counts)


# -- saved and loaded -------------------------------------------------------------------------


@pytest.mark.parametrize("case, strict", in_turn(KINDS, [False, True]))
def test_a_run_that_is_resumed_in_the_midst_of_a_block_goes_on_as_one(case, strict, tmp_path):
    whole, first, second = (make(m, MOMENTS[case](m), gradient_accumulation_steps=2) for m in (net(), net(), net()))
    for step in range(12):
        whole.step(*batch(step))
        if step < 7:
            first.step(*batch(step))
    save_checkpoint(first, tmp_path)
    load_checkpoint(second, tmp_path, strict=strict)
    for step in range(7, 12):
        second.step(*batch(step))
    assert_same(second.state_dict(), whole.state_dict())
    reference = net()
    theirs = MOMENTS[case](reference)
    for step in range(0, 12, 2):
        torch_step(reference, theirs, *map(torch.cat, zip(batch(step), batch(step + 1))))
    assert_parameters_close(second.model, reference)


def test_the_greatest_moment_of_complex_parameters_is_taken_over():
    reference = Wave()
    theirs = MOMENTS["amsgrad"](reference)
    for step in range(3):
        torch_step(reference, theirs, *batch(step))
    module = copy.deepcopy(reference)
    ours = MOMENTS["amsgrad"](module)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert_goes_on_alike(make(module, ours), module, reference, theirs)
