"""Integers of 8 and 16 bits compute as in PyTorch, also where ONNX or ONNX Runtime has no operator of them."""

import copy

import pytest
import torch
from torch import nn

import orttrainer

FUNCTIONS = {
    "the mask of Transformer-XL": lambda n: torch.triu(n.new_ones(len(n), 6), diagonal=1).sum(0),
    "below 0, or beyond the largest": lambda n: -n,
    "powers": lambda n: n**3,
    "extrema": lambda n: n.amax(1, keepdim=True) - n.cummax(1)[0] + torch.maximum(n, n.flip(1)),
    "choices": lambda n: torch.where(n > 2, n, n.argmax(1, keepdim=True)) + n.clamp(1, 3),
    "sums": lambda n: n.cumsum(1, dtype=n.dtype) + torch.einsum("bi,ij->bj", n, n.new_ones(6, 6)),
    "products": lambda n: (n @ n.new_ones(6, 6)) + n.prod(1, keepdim=True, dtype=n.dtype),
    "shifts": lambda n: (n << 2) + (n >> 1),
    "padding": lambda n: nn.functional.pad(n, (1, 0), value=7)[:, :6],
    "rounded": lambda n: torch.floor(n // 2) - n.ceil() + torch.trunc(n),
    "what is of floats": lambda n: n.softmax(1, dtype=torch.float32) ** 2,
    "finite": lambda n: torch.isfinite(n) * n.median(1, keepdim=True)[0],
}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, len(FUNCTIONS)))

    def forward(self, numbers):
        return sum((w * f(numbers)).sum() for w, f in zip(self.weight, FUNCTIONS.values()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_short_integers_compute_as_in_pytorch(dtype):
    module = Scaled()
    reference = copy.deepcopy(module)
    sgd = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (module, reference)]
    trainer = orttrainer.trainer(module, None, sgd[0])
    for seed, rows in enumerate((3, 2, 5)):
        numbers = torch.randint(0, 6, (rows, 6), generator=torch.Generator().manual_seed(seed)).to(dtype)
        sgd[1].zero_grad()
        loss = reference(numbers)
        loss.backward()
        sgd[1].step()
        torch.testing.assert_close(trainer.step(numbers)[0], loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(module.weight, reference.weight, rtol=1e-5, atol=1e-5)
