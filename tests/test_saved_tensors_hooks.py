"""Hooks of forward that pack what autograd saves: those that give it back are of no effect, others are refused."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import orttrainer
from orttrainer.errors import UnsupportedModelError


def in_a_file(folder: pathlib.Path):
    """As PyTorch's tutorial writes them."""

    def pack(x):
        path = folder / f"{len([*folder.iterdir()])}.pt"
        torch.save(x, path)
        return path

    return saved_tensors_hooks(pack, torch.load)


class Packed(nn.Module):
    def __init__(self, hooks, power=1.0):
        super().__init__()
        self.first, self.second, self.hooks, self.power = nn.Linear(4, 4), nn.Linear(4, 1), hooks, power

    def forward(self, x):
        with self.hooks():
            return self.second(self.first(x).tanh() * self.power).exp().mean()


def xs(step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", ["as it is", "on the CPU", "in a file", "in float64"])
def test_what_is_given_back_trains_like_pytorch(kind, tmp_path):
    hooks = {
        "as it is": lambda: saved_tensors_hooks(lambda x: x.detach(), lambda x: x),
        "on the CPU": save_on_cpu,
        "in a file": lambda: in_a_file(tmp_path),
        "in float64": lambda: saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()),
    }[kind]
    torch.manual_seed(0)
    module = Packed(hooks)
    twin = Packed(hooks)
    twin.load_state_dict(copy.deepcopy(module.state_dict()))
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    trainer = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), 0.1))
    for step in range(2):
        loss, _ = trainer.step(xs(step))
        expected = twin(xs(step))
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    for parameter, like in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(parameter, like)


REFUSED = {
    "rounded to half precision": lambda: saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()),
    "held in half precision, of this batch without rounding": lambda: saved_tensors_hooks(
        lambda x: x.detach().bfloat16(), lambda x: x.float()
    ),
    "a little larger": lambda: saved_tensors_hooks(lambda x: x.detach() * 1.0001, lambda x: x),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_given_back_is_refused_with_its_place(kind):
    torch.manual_seed(0)
    module = Packed(REFUSED[kind])
    if "without rounding" in kind:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    before = copy.deepcopy(module.state_dict())
    trainer = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(
        UnsupportedModelError, match=r"do not give it back as it was, at .*test_saved_tensors_hooks.py:\d+ \(with "
    ):
        trainer.step(torch.ones(5, 4))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
