"""Sizes that vary from batch to batch, where forward makes tensors or attributes of operators of them."""

from __future__ import annotations

import copy
import math
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exported import without_dynamo
from in_step import check_equal
from marks import slow
from said import Said, engine_of
from said import batch as numbered
from said import train as train_said
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription

ROWS = 4
LENGTHS = (5, 6, 4)


class Answers(nn.Module):
    """The head of a model that looks for answers in a text: what stands behind its end is ignored."""

    def __init__(self, loss):
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(20, 6), nn.Linear(6, 1), loss

    def forward(self, tokens, place):
        scores = self.head(self.embedding(tokens)).squeeze(-1)
        length = scores.size(1)
        return self.loss(scores, place.clamp(0, length), ignore_index=length)


class Boxes(nn.Module):
    """A loss for each box, of which there is one at least; a decision by values, which only the newer exporter follows."""

    def __init__(self, number):
        super().__init__()
        self.head, self.number = nn.Linear(6, 1), number

    def forward(self, x, place):
        number = self.number(x.shape[1]).clamp(min=1).item()
        loss = (self.head(x).squeeze(-1).sum(1) - place).square().sum() / number
        return 2 * loss if place.sum().item() > 1 else loss


def smooth(scores, place, ignore_index):
    return F.cross_entropy(scores, place, ignore_index=ignore_index, label_smoothing=0.1)


def log_likelihood(scores, place, ignore_index):
    return F.nll_loss(F.log_softmax(scores, -1), place, ignore_index=ignore_index)


def train(model, batches, axes):
    twin = copy.deepcopy(model)
    inputs = [IODescription("x", axes), IODescription("place", ["batch"])]
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin))
    trainer = orttrainer.trainer(
        model, None, optimizer, model_desc=ModelDescription(inputs, [IODescription("loss", [])])
    )
    for batch in batches:
        loss, _ = trainer.step(*batch)
        expected = twin(*batch)
        plain.zero_grad()
        expected.backward()
        plain.step()
        torch.testing.assert_close(loss, expected.detach())
    check_equal(model, twin)


class Parts(nn.Module):
    """The head of a part of a text."""

    def __init__(self, part):
        super().__init__()
        self.head, self.part = nn.Linear(6, 1), part

    def forward(self, x, place):
        scores = self.head(x).squeeze(-1)
        return (self.part(scores.T, len(scores.T)).T.sum(1) - place).square().mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, smooth, log_likelihood])
def test_labels_at_the_length_of_each_batch_are_ignored(loss):
    torch.manual_seed(0)
    place = torch.tensor([1, 5, 9, 3])
    train(Answers(loss), [(torch.randint(0, 20, (ROWS, length)), place) for length in LENGTHS], ["batch", "length"])


@pytest.mark.parametrize(
    "number",
    [lambda n: torch.as_tensor([n], dtype=torch.float32), lambda n: torch.tensor([[n, 1]]).max()],
    ids=["as_tensor", "tensor"],
)
def test_a_size_that_was_a_tensor_in_between_is_a_number(number):
    torch.manual_seed(0)
    place = torch.arange(ROWS) % 2
    train(Boxes(number), [(torch.randn(ROWS, length, 6), place) for length in LENGTHS], ["batch", "length", 6])


@pytest.mark.parametrize("part", [
    lambda x, n: x[: math.floor(n * 0.29)] * math.ceil(n * 1.1), lambda x, n: x[: int(n * 0.29)] * round(n * 0.35),
], ids=["floor and ceil", "int and round"])  # fmt: skip
def test_a_share_of_a_size_has_the_digits_of_python(part):
    """Of 100 these are 28.999999999999996, 110.00000000000001 and 35.0: 29, 110 and 35 in float32; of 50 the last is 17.5."""
    torch.manual_seed(0)
    place = torch.arange(ROWS) % 2
    train(Parts(part), [(torch.randn(ROWS, n, 6) / n, place) for n in (100, 50, 7)], ["batch", "length", 6])


QUOTIENTS = {
    "rounded up": lambda x: -(-len(x) // 4) + x[: -(-len(x) // 3)].sum().abs(),
    "of a negative one": lambda x: -len(x) // 3 - (x.shape[0] - 2) // 5 + 0.1 * ((3 - len(x)) // 2),
    "by a negative one": lambda x: len(x) // -2 + -20 // (len(x) + 1) + 0.1 * (7 // -len(x)),
    "and the rest": lambda x: divmod(-len(x), 4)[0] + 0.1 * divmod(len(x), -4)[1] + -len(x) % 5 + 7 % -len(x),
    "by torch": lambda x: (
        torch.div(-len(x), 4, rounding_mode="floor") + 0.1 * torch.div(-len(x), 4, rounding_mode="trunc")
    ),
}
WHOLE_NUMBERS_OF_FLOATS = {
    "quotients": lambda x: len(x) / 5 // 0.1 + 0.1 * (len(x) // -0.3) + 7.5 // len(x) + 1 // (len(x) * 0.1),
    "remainders": lambda x: len(x) / 5 % 0.1 - len(x) % 0.3 + 7.3 % (len(x) / 3) + 7 % (-len(x) * 0.3) + len(x) % 1.5,
    "both": lambda x: sum(divmod(len(x) / 5, 0.1)) + x[: int(len(x) * 0.5 // 1)].sum() + int(len(x) * 0.7 // 0.1),
}


@pytest.mark.parametrize("first", [8, 7])
@pytest.mark.parametrize(
    "factor", [*QUOTIENTS.values(), *WHOLE_NUMBERS_OF_FLOATS.values()], ids=[*QUOTIENTS, *WHOLE_NUMBERS_OF_FLOATS]
)
def test_whole_quotients_of_sizes_are_pythons_for_all_signs(factor, first):
    """The batch of 8 rows makes groups of 4 without a rest; 1 / 0.1 is 10.0, and 0.1 is in 1.0 nine times."""
    assert train_said(factor, [numbered(2 * rows, rows) for rows in (first, 9, 1, 6, 16)]) == 1


def test_they_are_so_in_a_trace_to_torchscript(monkeypatch):
    without_dynamo(monkeypatch)
    for name in ("of a negative one", "by a negative one"):
        train_said(QUOTIENTS[name], [numbered(2 * rows, rows) for rows in (7, 9, 1)])


def test_a_quotient_of_what_no_size_makes_negative_is_one_operator():
    engine = engine_of(Said(lambda x: (len(x) * 3 + 1) // 2 + 100 // len(x)))
    engine.train_step(numbered(0), 0.05)
    assert "Mod" not in {node.op_type for node in engine.training_graph.graph.graph}


NUMBERS = {  # and how many graphs the sizes need
    "powers": (lambda x: 0.9 ** len(x) + len(x) ** -1 + (len(x) / 3) ** 2 + len(x) ** 0.5 + 2 ** len(x) / 300, 1),
    "powers to powers": (lambda x: (len(x) * 0.2) ** len(x) + (len(x) * 0.2) ** (len(x) / 3) + (-len(x)) ** 3 * 0.1, 1),
    "powers modulo a number": (lambda x: pow(len(x), 3, 7) + pow(3, len(x), 7) + pow(2, 3, 5) + pow(0.9, len(x)), 4),
    "roots by NumPy": (lambda x: float(np.sqrt(len(x))) + x[: int(float(np.sqrt(len(x))))].sum(), 1),
    "bits": (lambda x: (len(x) | 1) + 10 * (3 ^ len(x)) + 0.1 * (6 & len(x)) + 0.3 * (len(x) & (len(x) + 3)), 1),
    "bits below 0": (lambda x: ~len(x) + 10 * (-len(x) & 5) + 0.1 * (len(x) & -4) + 0.3 * (-len(x) ^ 3), 1),
    "moved bits": (lambda x: (len(x) << 2) + 10 * (-len(x) >> 1) + 0.1 * (1 << len(x)) + 0.3 * (1000 >> len(x)), 1),
    "an odd size": (lambda x: 2.0 if len(x) & 1 else 3.0, 2),
    "counted bits": (lambda x: len(x).bit_count() + 10 * len(x).bit_length(), 4),
    "itself": (lambda x: len(x).real + len(x).imag + 10 * len(x).numerator + math.floor(len(x)) + math.ceil(len(x)), 1),
    "tens and hundreds": (lambda x: round(len(x) * 13, -1) + 0.1 * round(-len(x) * 25, -2) + round(len(x), 1), 1),
    "rows by tens": (lambda x: x[: round(len(x) + 3, -1)].sum() + round((x > 0.4).sum().item() * 15, -1), 1),
    "means": (lambda x: statistics.mean([len(x), 2]) + 10 * statistics.fmean([len(x), 2.5]), 1),
    "exact sums": (lambda x: math.fsum([0.1] * 9 + [len(x) * 0.1, 1e9, -1e9]) + int(math.fsum([len(x) / 70] * 10)), 1),
    "steps": (
        lambda x: (
            (torch.linspace(0.5, -2, len(x), dtype=x.dtype) @ x).sum() + torch.linspace(0, 9, steps=len(x) + 1).sum()
        ),
        1,
    ),
}


LONG = "exact sums", "powers modulo a number", "counted bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in NUMBERS])
def test_what_python_computes_of_a_size_is_each_batchs(name, dtype):
    factor, graphs = NUMBERS[name]
    assert train_said(factor, [{"x": numbered(2 * n, n)["x"].to(dtype)} for n in (8, 7, 1, 6)]) == graphs
