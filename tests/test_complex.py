"""Complex numbers: inside forward they are pairs of real ones; as state they are refused by name."""

import copy

import pytest
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import UnsupportedModelError


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.fft.rfft(self.linear(x)).abs().mean()


class Rotation(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=dtype) if dtype.is_complex else torch.randn(4, 4, 2))

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (x.to(torch.cfloat) @ weight).abs().mean()


def trainer_of(model):
    description = ModelDescription(
        [IODescription("x", ["n", 4], torch.float32)], [IODescription("loss", [], torch.float32)]
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    return ORTTrainer(model, None, description, "SGDOptimizer", None, rate, torch.device("cpu"))


@pytest.mark.parametrize("make", [Spectrum, lambda: Rotation(torch.float32)], ids=["rfft", "view_as_complex"])
def test_complex_numbers_inside_forward_train_like_pytorch(make):
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    trainer = trainer_of(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        loss, expected = trainer.train_step(x, torch.tensor([0.1])), twin(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_complex_parameter_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"'weight' is torch.complex64, .*\(torch.view_as_real\)"):
        trainer_of(Rotation(torch.cfloat)).train_step(torch.randn(3, 4), torch.tensor([0.1]))
