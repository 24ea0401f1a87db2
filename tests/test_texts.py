"""Texts that forward makes of numbers: nearly all for a log, and some that it goes by."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from said import RATE, Said, batch, engine_of, train

from orttrainer.errors import UnsupportedModelError

log = logging.getLogger("a program")

BY_SIGN = {
    "by str": lambda x: {"-1": 2.0}.get(str(int(x.sum().sign())), 3.0),
    "by an f-string": lambda x: 2.0 if f"{x.sum().sign().long():+d}".startswith("-") else 3.0,
    "of a truth": lambda x: {"1": 2.0}.get(f"{int(x.sum() > 0)}", 3.0),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", BY_SIGN)
def test_each_batch_goes_by_the_text_of_a_whole_number(name, first):
    assert train(BY_SIGN[name], [batch(first + number) for number in range(3)]) == 2


@pytest.mark.parametrize(
    "factor",
    [lambda x: {"4": 2.0}.get(str(x.shape[0]), 3.0), lambda x: {"[4, 3]": 2.0}.get(f"{[*x.shape]}", 3.0)],
    ids=["size", "shape"],
)
def test_each_batch_goes_by_the_text_of_its_size(factor):
    train(factor, [batch(0, rows) for rows in (5, 4, 6)])


@pytest.mark.parametrize(
    "text",
    [
        lambda x: str(x.sum().item()), lambda x: f"{x.sum():.3f}", lambda x: f"{x.sum().item():.3f}", repr,
        lambda x: str(x[0].tolist()),
    ],
    ids=["str", "tensor", "item", "repr", "list"],
)  # fmt: skip
def test_the_text_of_another_number_is_refused_where_forward_goes_by_it(text):
    module = Said(lambda x: 2.0 if "-" in text(x) else 3.0)
    with pytest.raises(UnsupportedModelError, match=r"makes a text of a tensor's value at .*test_texts\.py"):
        engine_of(module).train_step(batch(0), RATE)


def test_the_text_that_a_torchscript_trace_would_keep_is_refused():
    """torch's newer exporter has nothing for `geqrf`."""
    module = Said(lambda x: torch.geqrf(x)[1].sum() * (2.0 if "-" in f"{x.sum()}" else 3.0))
    with pytest.raises(UnsupportedModelError, match="the older exporter"):
        engine_of(module).train_step(batch(0), RATE)


def test_what_is_logged_makes_no_difference(capsys):
    def logged(x):
        count = int((x > 0.5).sum())
        print(f"{x.sum().item():.3f} {x.mean():.2f} {count} {count:3d} {x.shape[0]}", x, x[0].tolist())
        log.info("%s %s", x.sum().item(), count)
        return 2.0 if count > 20 else 3.0

    assert train(logged, [batch(0), batch(1), batch(2, 5)]) == 1
    x = batch(0)["x"]
    assert re.match(re.escape(f"{x.sum().item():.3f} {x.mean():.2f}"), capsys.readouterr().out)
