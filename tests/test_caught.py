"""What the first batch does not show: what forward looks up by a size, and errors that it catches, which others do not raise."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from said import RATE, Said, batch, engine_of, train
from torch import nn

import orttrainer
from orttrainer.errors import UnsupportedModelError


@functools.lru_cache
def remembered(rows):
    return 2.0 if rows == 4 else 3.0


BY_SIZE = {
    "a dictionary": lambda x: {4: 2.0}.get(x.shape[0], 3.0),
    "a dictionary by shapes": lambda x: {(4, 3): 2.0}.get(tuple(x.shape), 3.0),
    "a set": lambda x: 2.0 if len(x) in {4, 8} else 3.0,
    "a list": lambda x: [3.0, 3.0, 3.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0][x.shape[0]],
    "a dictionary by texts": lambda x: {"n004": 2.0}.get("n%03d" % x.shape[0], 3.0),  # noqa: UP031, which is the case
    "a cache": lambda x: remembered(x.shape[0]),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_what_is_looked_up_by_a_size_is_each_batchs(name):
    """Batches of 6 and 7 rows, which are the same as the first, tell nothing of one of 4."""
    train(BY_SIZE[name], [batch(0, rows) for rows in (5, 4, 6)])


LIBRARY = """
import functools


@functools.lru_cache
def remembered(rows):
    return rows * 2


def twice(x):
    try:
        rows = remembered(x.shape[0])
    except TypeError:  # einops catches it, as the sizes of a trace have no hash
        rows = x.shape[0] * 2
    return x.new_ones(rows).sum()
"""


@pytest.mark.parametrize("recorded, graphs", [(True, 1), (False, 2)], ids=["installed", "of-the-program"])
def test_what_a_library_catches_is_its_own_wherever_it_is_installed(recorded, graphs, tmp_path, monkeypatch):
    """As by `pip install --target`: a folder that is no site-packages has it, with the record that pip makes."""
    name = f"twice_{recorded}"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    record = tmp_path / "some_library-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(f"{name if recorded else 'another'}.py,sha256=,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert train(importlib.import_module(name).twice, [batch(0, rows) for rows in (5, 4)]) == graphs


def tried(call, error=RuntimeError, otherwise=3.0):
    def factor(x):
        try:
            return call(x)
        except error:
            return otherwise

    return factor


ERRORS_OF_SIZES = {
    "view": tried(lambda x: x.view(-1, 12).sum()),
    "broadcast": tried(lambda x: (x + torch.ones(4, 1)).sum()),
    "product": tried(lambda x: torch.mm(torch.ones(1, 4), x).sum()),
    "dictionary": tried(lambda x: {4: 2.0}[x.shape[0]], Exception),
}


@pytest.mark.parametrize("name", ERRORS_OF_SIZES)
def test_an_error_that_the_first_size_raises_is_caught_for_that_size(name):
    train(ERRORS_OF_SIZES[name], [batch(0, rows) for rows in (5, 4, 5)])


class Halved(nn.Module):
    """Means of pairs of tokens, where these go in pairs: a trace of symbols asks for that of its own batch of 5, and ends in itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.calls = nn.Linear(4, 4), nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1  # TorchScript's exporter does not show this
        rows, tokens, _ = x.shape
        y = self.before(self.linear(x))
        try:
            y = y.view(rows, -1, 2, 4).mean(2, keepdim=True).expand(-1, -1, 2, -1).reshape(rows, tokens, 4)
        except RuntimeError:
            y = y * 0.9
        return self.behind(y, x).tanh().mean(1)

    def before(self, y):
        return y

    def behind(self, y, x):
        return y


class HalvedInTurns(Halved):
    """The trace goes on behind the decision, and takes its batch for one of other sizes."""

    def before(self, y):
        for _ in range(int(y.max().clamp(0, 3))):
            y = y * 0.95
        return y

    def behind(self, y, x):
        of_each = F.one_hot(x.argmax(-1), 4).to(y.dtype)
        return y + 0.1 * torch.einsum("btv,bsv,bsc->btc", of_each, of_each, y)


@pytest.mark.parametrize("kind", [Halved, HalvedInTurns])
def test_an_error_that_a_trace_of_symbols_does_not_raise_is_caught_too(kind):
    ours, theirs = kind(), kind()
    trainer = orttrainer.trainer(ours, F.mse_loss, torch.optim.SGD(ours.parameters(), RATE))
    optimizer = torch.optim.SGD(theirs.parameters(), RATE)
    for step, tokens in enumerate((6, 5, 5, 4)):
        x = torch.randn(3, tokens, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        expected = F.mse_loss(theirs(x), torch.ones(3, 4))
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x, torch.ones(3, 4))[0], expected.detach())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


ERRORS_OF_VALUES = {
    "dictionary": tried(lambda x: {1: 2.0}[int(x.sum().sign())], Exception),
    "list": tried(lambda x: [2.0][int(x.sum() > 0)], Exception),
    "next": tried(lambda x: next(number for number in x[0].tolist() if number < 0), Exception),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ERRORS_OF_VALUES)
def test_whoever_catches_all_errors_does_not_catch_those_of_a_trace(name, first):
    train(ERRORS_OF_VALUES[name], [batch(first + number) for number in range(3)])


def test_an_error_of_values_that_a_torchscript_trace_would_keep_is_refused():
    rows = tried(lambda x: F.embedding((x[:, 0] > 0).long() * 5, torch.ones(3, 2)).sum(), Exception)
    with pytest.raises(
        UnsupportedModelError, match=r"catches an error of torch's at .*test_caught\.py.*the values of a batch"
    ):
        engine_of(Said(rows)).train_step(batch(0), RATE)
