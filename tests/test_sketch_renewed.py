"""Numbers of a torch optimizer's groups that are part of the graph: from the next step on there is another update."""

from __future__ import annotations

import pytest
import torch
from small import assert_same, batch, net
from test_sketch import assert_parameters_close, torch_step
from test_sketch_optimizer import make
from torch import nn

SGD = dict(lr=0.1, momentum=0.9, weight_decay=0.05)
CHANGES = {  # of the second group, before these steps
    "nesterov": (torch.optim.SGD, SGD, {3: {"nesterov": True}, 6: {"nesterov": False}}),
    "nesterov, with a dampening": (torch.optim.SGD, SGD | {"dampening": 0.3}, {3: {"nesterov": True}}),
    "nesterov and momentum": (torch.optim.SGD, SGD, {3: {"nesterov": True, "momentum": 0.5}, 5: {"momentum": 0.7}}),
    "maximize": (torch.optim.SGD, SGD, {3: {"maximize": True}, 4: {"nesterov": True}, 6: {"maximize": False}}),
    "Adam's": (torch.optim.Adam, {"lr": 0.05, "eps": 1e-3, "amsgrad": True}, {3: {"maximize": True}}),
}


def optimizer_of(module, kind, options):
    return kind([{"params": module[0].parameters()}, {"params": module[3].parameters(), "lr": 0.03}], **options)


@pytest.mark.parametrize("case", CHANGES)
def test_what_the_update_is_made_of_is_followed(case):
    kind, options, changes = CHANGES[case]
    module, reference = net(), net()
    ours, theirs = (optimizer_of(m, kind, options) for m in (module, reference))
    trainer = make(module, ours)
    for step in range(9):
        for optimizer in (ours, theirs):
            optimizer.param_groups[1].update(changes.get(step, {}))
        loss = trainer.step(*batch(step))[0]
        torch.testing.assert_close(loss, torch_step(reference, theirs, *batch(step)), rtol=1e-5, atol=1e-5)
    assert_parameters_close(module, reference)
    states = (optimizer.state_dict()["state"] for optimizer in (ours, theirs))  # all moments go on as they were
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


def test_nesterov_may_change_in_the_midst_of_a_block_of_batches_and_before_the_first_step():
    module, reference = net(), net()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, reference))
    trainer = make(module, ours, gradient_accumulation_steps=2)
    for step in range(8):
        for optimizer in (ours, theirs) if step in (0, 3, 5) else ():
            optimizer.param_groups[0]["nesterov"] ^= True
        trainer.step(*batch(step))
        x, label = batch(step)
        (nn.functional.cross_entropy(reference(x), label) / 2).backward()
        if step % 2:
            theirs.step()
            theirs.zero_grad()
    assert_parameters_close(module, reference)


@pytest.mark.parametrize("kind, number", [(torch.optim.SGD, "momentum"), (torch.optim.AdamW, "betas")])
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_a_schedule_of_the_momentum_too_goes_on_exactly_from_a_checkpoint(kind, number, scheduler):
    def start():
        module = net()
        optimizer = optimizer_of(module, kind, {number: 0.9 if number == "momentum" else (0.9, 0.999)})
        scheduled = {
            "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
            "CyclicLR": lambda: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4),
        }[scheduler]()
        return module, optimizer, scheduled, make(module, optimizer)

    def train(steps, trainer, schedule):
        for step in steps:
            trainer.step(*batch(step))
            schedule.step()

    module, optimizer, schedule, trainer = start()
    train(range(1), trainer, schedule)
    graph = trainer.training_graph
    train(range(1, 4), trainer, schedule)
    assert trainer.training_graph is graph  # compiled once
    resumed, other_optimizer, other_schedule, other = start()
    resumed.load_state_dict(module.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    other_schedule.load_state_dict(schedule.state_dict())
    train(range(4, 7), trainer, schedule)
    train(range(4, 7), other, other_schedule)
    assert_same(dict(resumed.state_dict()), dict(module.state_dict()))
