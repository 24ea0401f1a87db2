"""Inverses, systems of equations and logarithms of determinants train like PyTorch."""

import copy

import pytest
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer

FORMS = {
    "inv": lambda w, x: torch.linalg.inv(w).diagonal(dim1=-2, dim2=-1).sum(),
    "inverse": lambda w, x: (x @ torch.inverse(w)).square().mean(),
    "solve-matrix": lambda w, x: torch.linalg.solve(w, x.T).square().mean(),
    "solve-vector": lambda w, x: torch.linalg.solve(w, x.sum(0)).square().mean(),
    "solve-right": lambda w, x: torch.linalg.solve(w, x, left=False).square().mean(),
    "slogdet": lambda w, x: torch.linalg.slogdet(w)[1] + (x @ w).square().mean(),
    "logdet": lambda w, x: torch.logdet(w @ w.T + torch.eye(4)) + (x @ w).square().mean(),
}


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.randn(4, 4) + 3 * torch.eye(4))

    def forward(self, x):
        return self.form(self.weight, x)


@pytest.mark.parametrize("name", FORMS)
def test_linear_algebra_trains_like_pytorch(name):
    torch.manual_seed(0)
    model = Model(FORMS[name])
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    description = ModelDescription(
        [IODescription("x", ["n", 4], torch.float32)], [IODescription("loss", [], torch.float32)]
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, rate, torch.device("cpu"))
    for step in range(4):
        x = torch.randn(3 + step, 4)
        loss, expected = trainer.train_step(x, torch.tensor([0.01])), twin(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
