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


class Functions(nn.Module):
    """Of complex numbers z, from the batch, and w, a parameter: the weighted sum of squares of what each function gives."""

    def __init__(self, functions):
        super().__init__()
        self.linear, self.w = nn.Linear(4, 24), nn.Parameter(torch.randn(3, 4, 2))
        self.functions = functions

    def forward(self, x):
        z, w = torch.view_as_complex(self.linear(x).view(-1, 3, 4, 2))[0], torch.view_as_complex(self.w)
        total = x.sum() * 0
        for function in self.functions:
            y = function(z, w)
            y = torch.view_as_real(y) if y.is_complex() else y
            total = total + (y.square() * torch.arange(1.0, y.numel() + 1).view(y.shape)).mean()
        return total


def into_slices(z, w):
    """As a Fourier neural operator keeps the low frequencies (Li et al. 2021, section 4)."""
    result = torch.zeros(3, 6, dtype=torch.cfloat)
    result[:, 1:5] = z * w
    return torch.fft.irfft(result, n=10)


WHERE = torch.tensor([[True, False, True, False]] * 3)
FUNCTIONS = {
    "slices": [
        lambda z, w: z[1], lambda z, w: z[torch.tensor([0, 2])], lambda z, w: z[:, None] * w[..., 1:2], lambda z, w: z[:, ::2],
        lambda z, w: z.select(1, 2), lambda z, w: z.index_select(1, torch.tensor([3, 0])), lambda z, w: z.unbind(1)[1],
        lambda z, w: z.gather(1, torch.tensor([[1, 2], [0, 0], [3, 1]])), lambda z, w: z.chunk(2, 1)[1] * w.split(2, 1)[0],
    ],
    "forms": [
        lambda z, w: z.unsqueeze(1) * w.unsqueeze(0), lambda z, w: z[None].squeeze(0).permute(1, 0), lambda z, w: z.repeat(2, 1),
        lambda z, w: z[None].expand(2, -1, -1), lambda z, w: torch.nn.functional.pad(z, (1, 2)), lambda z, w: z.cumsum(1),
        lambda z, w: torch.where(WHERE, z, w), lambda z, w: z.masked_fill(WHERE, 2.0), lambda z, w: torch.ones_like(z) + z,
        into_slices, lambda z, w: torch.full((4,), 1 + 2j) * z, lambda z, w: torch.full_like(z, 2.0) * w, lambda z, w: z.new_zeros(3, 4) - z,
    ],
    "functions": [
        lambda z, w: z.exp(), lambda z, w: (z + 3).log(), lambda z, w: (z + 4).sqrt(), lambda z, w: z.sin() + w.cos(),
        lambda z, w: z.tanh(), lambda z, w: z**2 + w.square(), lambda z, w: (w + 4) ** 0.5, lambda z, w: torch.linalg.norm(z),
        lambda z, w: torch.exp(1j * z.real) * (2 - 1j) * w, lambda z, w: z / (1 + z.abs()),
    ],
    "products": [
        lambda z, w: torch.einsum("ij,kj->ik", z, w), lambda z, w: torch.einsum("ij,kj,kl->il", z, w, w),
        lambda z, w: z[None] @ w.T[None], lambda z, w: torch.bmm(z[None], w.T[None]), lambda z, w: nn.functional.linear(z, w),
        lambda z, w: torch.outer(z[0], w[1]), lambda z, w: torch.vdot(z[0], w[1]).abs(), lambda z, w: z @ w.mT,
    ],
}  # fmt: skip


@pytest.mark.parametrize("functions", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_complex_numbers_train_like_pytorch(functions):
    torch.manual_seed(0)
    model = Functions(functions)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    trainer = trainer_of(model)
    for _ in range(3):
        x = torch.randn(1, 4)
        loss, expected = trainer.train_step(x, torch.tensor([1e-3])), twin(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for parameter, expected in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_a_complex_parameter_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"'weight' is torch.complex64, .*\(torch.view_as_real\)"):
        trainer_of(Rotation(torch.cfloat)).train_step(torch.randn(3, 4), torch.tensor([0.1]))
