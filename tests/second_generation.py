"""What the tests of the second generation share: the small classifier, its description, and trainers of it."""

from __future__ import annotations

import torch
from small import batch, net
from torch import nn

from orttrainer.training import ORTTrainer, ORTTrainerOptions, optim

LOSS = nn.functional.cross_entropy
CONFIGS = {
    "SGD": lambda: optim.SGDConfig(lr=0.1),
    "Adam": lambda: optim.AdamConfig(lr=0.01),
    "Lamb": lambda: optim.LambConfig(lr=0.01),
    "AdamW": lambda: optim.AdamWConfig(lr=0.01),
    "momentum": lambda: optim.SGDConfig(lr=0.05, momentum=0.9),
}


def description(rows="batch") -> dict:
    return {
        "inputs": [("x", [rows, 4]), ("label", [rows])],
        "outputs": [("loss", [], True), ("output", [rows, 3])],
    }


def options(**branches) -> ORTTrainerOptions:
    """Options on the CPU, and these branches."""
    return ORTTrainerOptions({"device": {"id": "cpu"}, **branches})


def make(module=None, config=None, loss_fn=LOSS, desc=None, **branches) -> ORTTrainer:
    """A trainer of the small classifier; keywords are branches of the options."""
    config = optim.SGDConfig(lr=0.1) if config is None else config
    desc = description() if desc is None else desc
    return ORTTrainer(net() if module is None else module, desc, config, loss_fn, options(**branches))


def train(trainer, steps: int, start: int = 0) -> list[float]:
    """The losses of some steps on the batches that `small` makes."""
    return [trainer.train_step(*batch(step))[0].item() for step in range(start, start + steps)]


def assert_equal_trees(actual, expected, place="state") -> None:
    """Nested dicts of arrays and numbers, equal to the bit."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected) or set(actual) == set(expected), place
        for key, value in expected.items():
            assert_equal_trees(actual[key], value, f"{place}[{key!r}]")
    else:
        assert (
            torch.equal(torch.as_tensor(actual), torch.as_tensor(expected))
            if hasattr(expected, "shape")
            else (actual == expected)
        ), place
