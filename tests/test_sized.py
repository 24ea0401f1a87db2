"""Numbers that forward takes out of tensors which it made of sizes, constants and buffers follow from sizes, as Python's do."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from in_step import check_equal
from marks import slow
from said import RATE
from said import batch as numbered
from said import train as train_said
from torch import nn

import orttrainer
from orttrainer.export.checks.failures import failure
from orttrainer.export.values.sized import Sized, computed


class Coder(nn.Module):
    """Encodes pairs of samples, filled up to whole ones as EnCodec's are, and decodes them.

    Args:
        pairs: gives how many there are in so many samples, of this module.
    """

    def __init__(self, pairs):
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, 3, 4, 2), nn.ConvTranspose1d(3, 1, 2, 2)
        self.pairs = pairs
        self.register_buffer("two", torch.tensor(2), persistent=False)

    def forward(self, x):
        n = x.shape[-1]
        return self.decoder(self.encoder(F.pad(x, (self.two, 2 * self.pairs(self, n) - n))))


def train(pairs):
    """Compare steps with samples of several lengths with PyTorch's; how many ways there are at the end."""
    torch.manual_seed(0)
    ours = Coder(pairs)
    twin = copy.deepcopy(ours)
    trainer = orttrainer.trainer(ours, F.l1_loss, torch.optim.SGD(ours.parameters(), RATE))
    plain = torch.optim.SGD(twin.parameters(), RATE)
    for rows, length in ((2, 32), (3, 32), (2, 48), (2, 9), (1, 3)):
        x, y = torch.randn(rows, 1, length), torch.randn(rows, 1, length + length % 2)
        loss = F.l1_loss(twin(x), y)
        plain.zero_grad()
        loss.backward()
        plain.step()
        torch.testing.assert_close(trainer.step(x, y)[0], loss.detach())
    check_equal(ours, twin)
    return len(trainer._engine._ways.known)


PAIRS = {
    "as EnCodec": lambda self, n: torch.ceil((n - self.two + 1) / self.two + 1).to(torch.int64) - (1 - n % 2),
    "of a tensor": lambda self, n: torch.ceil(torch.tensor(n) / 2).long(),
    "in float64": lambda self, n: (torch.tensor(n).double() / 2.0).ceil().to(torch.int64),
    "of one more": lambda self, n: torch.floor((n - torch.tensor(1)) / 2 + 1).long(),
    "by Python's int": lambda self, n: int(torch.ceil(torch.tensor(n) / 2)),
    "of a half": lambda self, n: (self.two - 1 + n) // 2,
    "of a half, by its name": lambda self, n: torch.div(self.two - 1 + n, 2, rounding_mode="floor"),
    "towards 0": lambda self, n: -torch.div(-1 - torch.tensor(n), 2, rounding_mode="trunc"),
    "towards 0, of floats": lambda self, n: -((-1 - torch.tensor(n)) / 2).long(),
    "the rest": lambda self, n: torch.true_divide(torch.tensor(n) + torch.tensor(n) % 2, 2).long(),
    "bounds": lambda self, n: ((torch.tensor(n) + 1) // 2).clamp(min=1).clip(0, 99),
    "the least": lambda self, n: (
        torch.maximum(torch.minimum(torch.tensor(n), (self.two + n) // 2), (self.two + n - 1) // 2) - (1 - n % 2)
    ),
    "written": lambda self, n: torch.tensor(n).add_(1) // 2,
}


USUAL = "as EnCodec", "by Python's int", "of a half", "towards 0, of floats", "the rest", "written"


@pytest.mark.parametrize("name", [name if name in USUAL else slow(name) for name in PAIRS])
def test_a_number_of_a_tensor_made_of_a_size_is_one_of_that_size(name):
    assert train(PAIRS[name]) == 1


def test_so_are_the_bounds_of_parts():
    parts = lambda x, half: (x[half:] * x[: len(x) - half].flip(0)).sum()  # noqa: E731
    batches = [numbered(2 * n, n) for n in (8, 7, 1, 6)]
    assert train_said(lambda x: parts(x, torch.tensor(len(x)) // 2), batches) == 1


def of(function, *operands):
    """The result of a call in PyTorch, which stands for what follows of the operands."""
    result = function(*operands)
    result.sized = computed(function, operands, {}, result, lambda x: (getattr(x, "sized", x), frozenset()))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_rounded_is_known_where_the_exact_quotient_gives_the_same(dtype):
    """In float32, n / 3 is rounded across a whole number from 2^23 on."""
    known = 0
    for number in (1, 9, 2**20 + 1, 2**20 + 2, 2**21 - 8, 2**23 + 2, 2**25 + 1, 2**52 + 1):
        for divisor in (1, 2, 3, 7, 320):
            n = torch.tensor(number)
            n.sized = Sized(lambda x: x, [number], torch.int64, n._version, frozenset())
            quotient = of(torch.add, of(torch.div, of(torch.Tensor.to, n, dtype), divisor), -2)
            for rounded in (torch.ceil, torch.floor, torch.trunc):
                result = of(torch.Tensor.long, of(rounded, quotient))
                assert result.sized.whole in (None, result.item())
                known += result.sized.whole is not None
    assert known == 3 * 5 * (5 if dtype == torch.float32 else 7)


def test_a_constant_beside_a_number_of_values_is_not_taken_for_that():
    several = lambda x: 2.0 if int(torch.tensor(7)) - int((x > 0.5).sum()) > 2 else 3.0  # noqa: E731
    train_said(several, [numbered(number) for number in range(6)])


def test_what_is_told_of_a_size_that_nothing_is_known_of_is_not_to_do_without_python():
    error = RuntimeError(
        "Attempting to broadcast a dimension of length s20 at -1! but expected [s21, 2*((s65 + u0)//2)]"
    )
    told = failure(SimpleNamespace(module=nn.Linear(1, 1)), [], {"dynamo": error, "torchscript": TypeError("other")})
    assert re.search(r"u0 is a size that forward takes out of a tensor.*let Python compute it", str(told))
    assert "data-dependent" not in str(told)
