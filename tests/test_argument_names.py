"""Functions take their arguments by torch's and by NumPy's names, also those that have another form in an export."""

from __future__ import annotations

import copy

import torch
from torch import nn

import orttrainer

FORMS = {
    "mean": lambda y: y.mean(axis=1, keepdims=True),
    "mean of what is called a": lambda y: torch.mean(a=y, axis=1),
    "mean over all axes": lambda y: torch.mean(y, axis=None),
    "max": lambda y: y.max(axis=1, keepdims=True)[0],
    "amax": lambda y: torch.amax(y, axis=0, keepdims=True),
    "aminmax": lambda y: y.aminmax(axis=1)[0],
    "median": lambda y: y.median(axis=1, keepdims=True)[0],
    "kthvalue": lambda y: y.kthvalue(2, axis=1)[0],
    "a norm": lambda y: torch.linalg.norm(y, axis=1, keepdims=True),
    "a norm of vectors": lambda y: torch.linalg.vector_norm(y, axis=1),
    "cumprod": lambda y: y.cumprod(axis=1),
    "cummax": lambda y: y.cummax(axis=1)[0],
    "logcumsumexp": lambda y: y.logcumsumexp(axis=1),
    "sort": lambda y: y.sort(axis=1)[0][:, :2],
    "argsort": lambda y: y.take_along_dim(y.argsort(axis=1), 1).cumsum(1),
    "unbind": lambda y: torch.unbind(y, axis=1)[0],
    "chunk": lambda y: y.chunk(2, axis=1)[0],
    "where": lambda y: torch.where(condition=y > 0, input=y, other=y.square()),
    "an angle": lambda y: torch.atan2(input=y, other=y.roll(1, 1)) + y.atan2(other=y.exp()),
    "norms by torch's names": lambda y: torch.linalg.norm(input=y) + torch.linalg.vector_norm(input=y, ord=3),
    "the norm of a matrix": lambda y: torch.linalg.matrix_norm(input=y, ord="fro"),
    "powers of a matrix": lambda y: torch.matrix_power(input=y[:4], n=2),
    "an inverse": lambda y: torch.inverse(input=y[:4] + 5 * torch.eye(4)),
    "a determinant": lambda y: torch.det(input=y[:4]),
    "a system": lambda y: torch.linalg.tensorsolve(input=y[:4] + 5 * torch.eye(4), other=y[4]),
    "a triangular system": lambda y: torch.cholesky_solve(input=y[:4], input2=torch.eye(4) + y[:4].tril(-1)),
    "products of matrices": lambda y: torch.baddbmm(y[None], batch1=y[None], batch2=y[None, :4].square()),
    "which are in": lambda y: y[:, 0] * torch.isin(element=torch.tensor(2), test_elements=torch.tensor([1, 2])),
    "detach": lambda y: y[0] * torch.detach(input=y[1]),
    "a similarity, whose x1 is its own": lambda y: nn.functional.cosine_similarity(x1=y, x2=y.roll(1, 1), dim=1),
}
if torch.__version__ < (2, 10):  # which has no derivative of it
    del FORMS["aminmax"]


class Formed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scales = nn.Linear(6, 4), nn.Parameter(torch.linspace(0.5, 1.5, len(FORMS)))

    def forward(self, x):
        y = self.layer(x)
        return torch.stack([form(y).square().mean() for form in FORMS.values()]) * self.scales


def test_arguments_by_name_train_as_in_pytorch():
    torch.manual_seed(0)
    module, x, label = Formed(), torch.randn(5, 6), torch.zeros(len(FORMS))
    twin = copy.deepcopy(module)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=1e-3))
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    for _ in range(2):
        found, _ = trainer.step(x, label)
        loss = nn.functional.mse_loss(twin(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(found, loss.detach())
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(dict(module.named_parameters())[name], parameter)
