"""What is timed: ordinary torch modules, with a loss and batches. Every engine runs the same module."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "samples" / "getting_started"))


@dataclass(frozen=True)
class Workload:
    """One model to train.

    Attributes:
        title: what the table calls it.
        module: makes the module.
        loss_fn: `loss_fn(prediction, label)`.
        batch: `batch(step)` makes input and label.
        inputs, outputs: (name, shape, dtype) of each, for the description.
        optimizer: "SGD" or "Adam".
        lr: learning rate.
    """

    title: str
    module: Callable[[], nn.Module]
    loss_fn: Callable
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    inputs: list
    outputs: list
    optimizer: str
    lr: float


VOCABULARY, BPTT, BATCH = 28_782, 35, 20


def _transformer() -> nn.Module:
    from model import TransformerModel

    return TransformerModel(VOCABULARY, 200, 2, 200, 2, 0.2)


def _tokens(step: int):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BPTT + 1, BATCH), generator=generator)
    return tokens[:-1].contiguous(), tokens[1:].reshape(-1)


def _flat_cross_entropy(output, target):
    return nn.functional.cross_entropy(output.view(-1, output.shape[-1]), target)


def _images(step: int):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(64, 784, generator=generator), torch.randint(0, 10, (64,), generator=generator)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def _w1(optimizer: str, lr: float) -> Workload:
    return Workload(
        f"W1 getting-started transformer, vocabulary 28,782, {optimizer}", _transformer, _flat_cross_entropy, _tokens,
        [("src", ["bptt", "batch"], torch.int64), ("label", ["bptt_x_batch"], torch.int64)],
        [("loss", [], torch.float32), ("output", ["bptt", "batch", VOCABULARY], torch.float32)], optimizer, lr,
    )  # fmt: skip


WORKLOADS = {
    "w1-sgd": _w1("SGD", 0.1),
    "w1-adam": _w1("Adam", 1e-3),
    "w3-sgd": Workload(
        "W3 MLP 784-512-512-10, batch 64, SGD", _mlp, nn.functional.cross_entropy, _images,
        [("x", ["batch", 784], torch.float32), ("label", ["batch"], torch.int64)],
        [("loss", [], torch.float32), ("output", ["batch", 10], torch.float32)], "SGD", 0.1,
    ),
}  # fmt: skip
