"""Numbers and sizes that only a batch tells: forward computes with them, and may decide by them, as in PyTorch."""

from __future__ import annotations

import copy
import logging
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from in_step import check_equal, step
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.engine import ways
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import UnsupportedModelError
from orttrainer.export.values.told import UNTOLD

RATE, ROWS, CLASSES = 0.05, 9, 3
FORMS = []  # loss of `f(module, x, label)`, and how many graphs the batches below need


def form(graphs, long=False):
    def noted(function):
        FORMS.append(pytest.param(function, graphs, id=function.__name__, marks=pytest.mark.slow if long else ()))
        return function

    return noted


class Told(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.body, self.head, self.gate = nn.Linear(4, 6), nn.Linear(6, CLASSES), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, label):
        return self.function(self, x, label)

    def hidden(self, x):
        return self.head(self.body(x).tanh())


def batch(number):
    """Labels of two classes or of three; some are 0 and so leave rows out."""
    dice = torch.Generator().manual_seed(number)
    label = torch.arange(ROWS) % (2 + number % 2)
    return torch.randn(ROWS, 4, generator=dice) + number % 2, label[torch.randperm(ROWS, generator=dice)]


@form(2, long=True)
def an_item(m, x, label):
    h = m.hidden(x)
    return (h if x.sum().item() > 10 else 2 * h).square().mean()


@form(1)
def a_length(m, x, label):
    return m.hidden(x[: int(label.max()) + 4]).square().mean()


@form(1, long=True)
def rolls(m, x, label):
    h, shift = m.hidden(x), int(label.sum())
    weights = torch.linspace(0, 1, ROWS * CLASSES).reshape(ROWS, CLASSES)
    moved = [h.roll(shift, 0), torch.roll(h, (1, -shift), (0, 1)), torch.roll(h, shifts=shift), torch.fft.fftshift(h)]
    return (sum(moved) * weights).square().mean()


@form(1, long=True)
def one_row_and_the_rest_of_them(m, x, label):
    """torch takes their numbers for equal."""
    number = int(label.sum())
    h = m.hidden(x[:number])
    rows = torch.arange(number)  # which is not negative then
    return ((h.narrow(0, number // 3, 1) + h) * rows[:, None]).square().mean()


@form(1)
def numbers_in_lists(m, x, label):
    """torch.tensor reads those of tensors."""
    h = m.hidden(x)
    scales = torch.tensor([[label.max(), 2], [label.sum() + h.mean(), 0.5]])
    rows = torch.as_tensor((label.argmax(), 0))
    return (h.square().mean() * scales).sum() + h[rows].sin().sum()


@form(2, long=True)
def a_number_of_turns(m, x, label):
    h = m.hidden(x)
    for _ in range(int(label.max())):
        h = h.tanh() * 1.5
    return h.square().mean()


@form(1, long=True)
def a_float(m, x, label):
    return m.hidden(x / float(x.abs().max())).square().mean() / math.sqrt((label > 0).sum().item())


@form(2, long=True)
def nothing_chosen(m, x, label):
    chosen = m.hidden(x)[label == 2]
    return F.cross_entropy(chosen, label[label == 2]) if chosen.shape[0] else m.hidden(x).square().mean()


@form(2, long=True)
def experts(m, x, label):
    """Each takes the rows that are its own, if there are any: of two gates or of four."""
    weight, chosen = (m.gate(x) - 100 * (torch.arange(4) > label.max())).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        rows = (chosen == index).nonzero().squeeze(-1)
        if rows.numel() == 0 and index == 2:
            continue
        out.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
    return m.hidden(out).square().mean()


@form(2, long=True)
def each_class(m, x, label):
    h = m.hidden(x)
    return sum(h[label == c].mean(0).square().sum() for c in label.unique())


@form(2, long=True)
def prototypes(m, x, label):
    h = m.hidden(x)
    centers = torch.stack([h[label == c].mean(0) for c in range(int(label.max()) + 1)])
    return F.cross_entropy(-torch.cdist(h, centers), label)


@form(1)
def one_hot_of_as_many_as_there_are(m, x, label):
    return (m.hidden(x)[:, :1] * F.one_hot(label)).square().sum()


@form(2, long=True)
def tensors_that_are_read_as_numbers(m, x, label):
    """By torch, within the call."""
    h, number = m.hidden(x), label.max() + 1  # 2 or 3
    hot = F.one_hot(label, max(number, 2)).sum(-1, keepdim=True)
    parts = [h.topk(number, dim=0)[0], h.topk(k=number, dim=0)[0], h.roll(number, 0), torch.roll(h, (number,), (0,))]
    return sum((part * (hot[: len(part)] + 1)).square().mean() for part in parts) + h.unfold(0, number, 1).mean()


@form(2)
def tensors_that_are_read_as_sizes(m, x, label):
    """A graph of each batch's molecules; PyTorch reads the size within the call, and the rows are counted afterwards."""
    h, number = m.hidden(x), label.max() + 1  # 2 or 3
    pooled = torch.zeros(number, 3).index_add(0, label, h)
    parts = [
        torch.full((number, 3), 2.0),
        h.new_zeros(size=(number, 3)),
        h[:1].expand(number, -1),
        torch.eye(number, 3),
        F.pad(h[:1], (0, 0, 0, number - 1)),
    ]
    assert all(part.shape == pooled.shape for part in parts)
    places = torch.linspace(0, 1, number) + torch.diagonal(h @ h.T, number)[0]
    rows = h.repeat(number, 1).unflatten(0, (number, -1))[1].square().sum() + h.chunk(number)[0].sum()
    return (pooled.square() + sum(parts)).mean() * (3 if len(pooled) == 2 else 1) + places.mean() + rows


@form(2)
def equal_ones(m, x, label):
    """Of labels, of numbers that are close, and of shapes, which are never."""
    h, two = m.hidden(x), (label < 2).long()
    assert not torch.equal(h, x) and not torch.is_nonzero(label.min())
    return (
        h.square().mean()
        if torch.equal(two, torch.ones_like(label)) and torch.allclose(two.float(), x[:, 0] * 0 + 1)
        else h.sum()
    )


@form(1 if torch.__version__ >= (2, 15) else 2)  # since then torch's tracer knows such sizes
def rows_of_their_own_length(m, x, label):
    """Slices, which torch's tracer makes something else of; and which is the longest of them."""
    parts = [x[row : row + length + 1] for row, length in enumerate(label[:2].tolist())]
    return m.hidden(nn.utils.rnn.pad_sequence(parts, batch_first=True)).square().sum()


@form(2, long=True)
def a_key(m, x, label):
    return m.hidden(x).square().mean() * {1: 1.0, 2: 3.0}[label.max().item()]


@form(2)
def a_name(m, x, label):
    return getattr(m, {"1": "hidden", "2": "hidden_twice"}[f"{label.max()}"])(x).square().mean()


Told.hidden_twice = lambda self, x: 2 * self.hidden(x)


@form(2, long=True)
def a_place_in_a_list(m, x, label):
    return [1.0, 1.0, 3.0][label.max()] * m.hidden(x).square().mean()


@form(2)
def an_element_at_an_element(m, x, label):
    """In a trace torch makes a number of the inner one as well."""
    return m.hidden(x)[[int(label[label.argmax()])]].square().mean()


@form(1, long=True)
def hardest(m, x, label):
    """Hard negatives, as many as there are others twice, as detectors have them."""
    each = F.cross_entropy(m.hidden(x), label, reduction="none")
    others = int((label > 0).sum())
    return (each[label > 0].sum() + each[label == 0].topk(min(2 * others, int((label == 0).sum())))[0].sum()) / others


@form(2, long=True)
def each_row(m, x, label):
    """Of which there are fewer in some batches: those cannot be asked about the last."""
    h = m.hidden(x)
    return sum(row.square().sum() * (2 if row[0].item() > 9 else 1) for row in h[label != 1])


@form(1)
def masked_select(m, x, label):
    return torch.masked_select(m.hidden(x), (label > 0)[:, None]).square().sum() + torch.argwhere(label > 0).sum()


@form(1)
def another_size_of_an_image(m, x, label):
    size = label.max() + 1, label.sum()  # as ViLT resizes its positions, to what a mask leaves
    return F.interpolate(m.hidden(x)[None, None], size=size, mode="bilinear", align_corners=True).square().mean()


@form(1, long=True)
def experts_in_a_list(m, x, label):
    masks, total = F.one_hot(label.clamp(max=1), 2).T, 0.0  # [experts, rows]; in memory experts lie side by side
    for expert in masks.sum(1).nonzero()[:, 0]:
        rows = x[torch.where(masks[expert])[0]]
        total = total + m.experts[expert](rows).square().sum()
    return total


@form(1)
def a_log(m, x, label):
    h = m.hidden(x)
    print(f"{h.mean():.3f} {h.mean().item()} {label.sum():3d}", label.sum())
    return h.square().mean()


def engine_of(function, **settings):
    torch.manual_seed(0)
    described = ModelDescription(
        [IODescription("x", ["n", 4]), IODescription("label", ["n"], torch.int64)], [IODescription("loss", [])]
    )
    return Engine(Told(function), None, described, OptimizerChoice("SGDOptimizer", clip=False), Settings(**settings))


def train(engine, twin, steps):
    for number in steps:
        x, label = batch(number)
        step(engine, twin, {"x": x, "label": label}, RATE)
    check_equal(engine.model, twin)


@pytest.mark.filterwarnings("ignore::orttrainer.errors.NoGradientWarning")
@pytest.mark.parametrize("function, graphs", FORMS)
def test_each_batch_trains_as_in_pytorch(function, graphs):
    engine = engine_of(function)
    train(engine, copy.deepcopy(engine.model), range(6))
    assert len(engine._ways.known) == graphs
    x, label = batch(7)
    torch.testing.assert_close(engine.eval_step({"x": x, "label": label})[0], engine.model(x, label).detach())


@pytest.mark.slow
def test_labels_in_a_row_of_a_length_of_their_own_have_the_loss_of_ctc():
    """As transformers has it: the targets of all samples behind each other, chosen by a mask."""

    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 5)

        def forward(self, x, y):
            mask = y > 0
            emitted = self.head(x).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(emitted, y.masked_select(mask), torch.full((2,), 6), mask.sum(-1), zero_infinity=True)

    torch.manual_seed(0)
    module = Recognizer()
    twin = copy.deepcopy(module)
    described = ModelDescription(
        [IODescription("x", [2, 6, 4]), IODescription("y", [2, 8], torch.int64)], [IODescription("loss", [])]
    )
    engine = Engine(module, None, described, OptimizerChoice("SGDOptimizer", clip=False), Settings())
    x = torch.randn(2, 6, 4)
    longer_than_the_path = [[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 0, 0, 0, 0, 0, 0]]
    nothing = [[1] + [0] * 7, [0] * 8]
    for y in ([[1, 2, 2] + [0] * 5, [4, 3, 0, 1] + [0] * 4], nothing, longer_than_the_path, [[0] * 8, [0] * 8]):
        y = torch.tensor(y)
        step(engine, twin, {"x": x, "y": y}, RATE)
    check_equal(module, twin)


REFUSED = {
    "a float that Python has to know": (
        lambda m, x, label: m.hidden(x).square().mean() * math.gamma(x.abs().mean().item()),
        r"makes a number of a tensor's value at .*test_told\.py:\d+ \(.*math\.gamma",
    ),
    "a random number": (
        lambda m, x, label: m.hidden(x).square().mean() * (2 if torch.rand(1).item() < 0.5 else 1),
        "decides by random numbers",
    ),
    "an array of NumPy's": (
        lambda m, x, label: m.hidden(x).square().mean() * float(np.linalg.det(x[:4].numpy())),
        r"gives Python values of a tensor at .*test_told\.py:\d+ \(.*linalg\.det",
    ),
    "an array that NumPy rounds": (
        lambda m, x, label: (m.hidden(x) * torch.from_numpy(x[:, :1].numpy().round(1))).square().mean(),
        r"leaves torch for NumPy at .*test_told\.py:\d+ \(.*round(?s:.*)Compute with the tensor itself",
    ),
    "a sign by NumPy": (
        lambda m, x, label: (m.hidden(x) * torch.as_tensor(np.sign(x[:, :1].numpy()))).square().mean(),
        r"leaves torch for NumPy at .*test_told\.py:\d+ \(.*np\.sign(?s:.*)Compute with the tensor itself",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_another_number_is_refused(case):
    function, text = REFUSED[case]
    engine = engine_of(function)
    with pytest.raises(UnsupportedModelError, match=text):
        engine.train_step(dict(zip(("x", "label"), batch(0))), RATE)


def test_text_of_a_number_is_no_number():
    """Should a program compare it with another text, it is not that of any number."""
    with pytest.raises(ValueError, match="invalid literal"):
        int(UNTOLD)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "orttrainer")
    return caplog


def test_the_way_that_was_not_gone_for_longest_makes_place_for_another(monkeypatch, said):
    """And two that alternate keep their sessions, on one state."""

    def turns(m, x, label):
        h = m.hidden(x)
        for _ in range(int(x[0, 0])):
            h = h.tanh() * 1.5
        return h.square().mean()

    monkeypatch.setattr(ways, "MOST", 2)
    engine = engine_of(turns)
    twin = copy.deepcopy(engine.model)
    runners = {}
    for turn, number in enumerate((1, 2, 1, 2, 3, 2, 1)):
        x, label = batch(turn)
        x[0, 0] = number
        step(engine, twin, {"x": x, "label": label}, RATE)
        runners.setdefault(number, []).append(engine._runner)
        assert len(engine._ways.known) == min(2, 1 + turn)
    first, again, anew = runners[1]
    assert first is again is not anew and runners[2][0] is runners[2][1] is runners[2][2]
    assert len([record for record in said.records if "there were 2 graphs" in record.message]) == 1


def test_numbers_are_told_without_the_assertions_of_python():
    """`python -O`: torch looks how Python compiles one, wherever it has to know a number, and does not find it."""
    code = "import said; said.train(lambda x: sum(range(1, int(x.square().sum()))), [said.batch(0)])"
    subprocess.run([sys.executable, "-O", "-c", code], cwd=pathlib.Path(__file__).parent, check=True)


class Pairs(nn.Module):
    """Attention to all but oneself, as in networks for molecules."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, mask):
        b, n, _ = x.shape
        others, y = ~torch.eye(n, dtype=torch.bool)[None], self.layer(x)
        places = torch.arange(n)[None, None].expand(b, n, n).masked_select(others).reshape(b, n, n - 1)
        distances = (y[:, :, None] - y[:, None]).masked_select(others[..., None]).reshape(b, n, n - 1, 3)
        both = (mask[:, :, None] * mask[:, None]).masked_select(others).reshape(b, n, n - 1)
        near = torch.exp(-distances.square().sum(-1, keepdim=True))
        return (distances * near * both[..., None]).sum(2) + places.sum() * 0.001


def test_sizes_that_are_products_beyond_the_bounds_of_torch():
    """It loses them by rounding, and compares some with a number of 65 bits, which no ONNX tensor holds."""
    torch.manual_seed(0)
    module = Pairs()
    twin = copy.deepcopy(module)
    trainer = orttrainer.trainer(module, F.mse_loss, torch.optim.SGD(module.parameters(), RATE))
    theirs = torch.optim.SGD(twin.parameters(), RATE)
    for rows in (2, 3, 1):
        x, mask, target = torch.randn(rows, 5, 3), torch.rand(rows, 5) > 0.2, torch.randn(rows, 5, 3)
        loss, expected = trainer.step(x, mask, target)[0], F.mse_loss(twin(x, mask), target)
        torch.testing.assert_close(loss, expected.detach())
        theirs.zero_grad()
        expected.backward()
        theirs.step()
    check_equal(module, twin)
