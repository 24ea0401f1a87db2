"""`torch.set_default_device` says where the program's new tensors are; a trainer's own are where it needs them."""

from __future__ import annotations

import pytest
import second_generation as second
import torch
from small import LR, batch, make, net
from torch import nn

import orttrainer
from orttrainer.schedules import LinearWarmup
from orttrainer.training import optim


def first_generation(module):
    trainer = make(module, "AdamOptimizer", gradient_accumulation_steps=2, get_lr_this_step=LinearWarmup(20, 0.1, 0.05))
    return trainer, trainer.train_step


def second_generation(module):
    trainer = second.make(module, optim.LambConfig(lr=LR.item()))
    return trainer, trainer.train_step


def around_a_torch_optimizer(module):
    optimizer = torch.optim.SGD(module.parameters(), LR.item(), momentum=0.9, dampening=0.5)
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, optimizer, mixed_precision="float16")
    return trainer, trainer.step


def train(front_end, modules, batches, path):
    """What a run gives that uses all that a trainer does, and the state in which another goes on."""
    orttrainer.set_seed(0)
    (trainer, step), (other, other_step) = (front_end(module) for module in modules)
    found = [*step(*batches[0]), *step(*batches[1]), *trainer.eval_step(*batches[2]), trainer.last_grad_norm]
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    other.load_state_dict(state)
    trainer.export_inference(path)
    trainer.profile(1)
    modules[1][0].requires_grad_(False)
    return [*found, *step(*batches[3]), *other_step(*batches[3]), *other_step(*batches[4])]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("front_end", [first_generation, second_generation, around_a_torch_optimizer])
def test_a_trainer_does_the_same_whatever_the_default_device_is(front_end, tmp_path):
    batches, found = [batch(step) for step in range(5)], []
    for device in ("cpu", "meta"):
        modules = net(dropout=0.1), net(seed=1)
        with torch.device(device):
            results = train(front_end, modules, batches, tmp_path / "model.onnx")
        found.append([*results, *modules[0].parameters(), *modules[1].parameters()])
    for expected, actual in zip(*found):
        assert torch.equal(actual, expected)
