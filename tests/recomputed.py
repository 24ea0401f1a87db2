"""What the tests of recomputation share: small models in ONNX, with dropout, and how they train."""

from __future__ import annotations

import functools

import models
import onnx
import torch
from torch import nn

from orttrainer import ORTTrainer, Recompute
from orttrainer.graph.passes.recompute import RecomputePass

SIZES = {
    "mlp": {"batch": 8},
    "cnn": {"batch": 6},
    "transformer": {"bptt": 8, "batch": 4, "bptt_x_batch": 32},
    "bert": {"batch": 3, "length": 10},
    "gpt2": {"batch": 3, "length": 10},
}
# Bytes: what the activations of the batch take, and the least that is possible, are in the error's text.
BUDGETS = {"mlp": 4_600, "cnn": 120_000, "transformer": 80_000, "bert": 90_000, "gpt2": 130_000}
LAYERS = {"transformer": "transformer_encoder.layers.{}", "bert": "bert.encoder.layer.{}", "gpt2": "transformer.h.{}"}


def with_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.1
    return module


@functools.cache
def forward_model(name: str) -> bytes:
    """A setup as an ONNX model, with dropouts of rate 0.1."""
    setup, module = models.make(name)
    trainer = ORTTrainer(
        with_dropout(module), setup.loss_fn, setup.description(), "SGDOptimizer", None, models.LEARNING_RATE, "cpu",
        check_export=False,
    )  # fmt: skip
    trainer.eval_step(*setup.batch(0))
    return trainer.onnx_model_.SerializeToString()


def make(name: str, recompute: Recompute | None, change=None, **options) -> ORTTrainer:
    model = onnx.load_from_string(forward_model(name))
    if change is not None:
        change(model)
    description = models.SETUPS[name].description()
    return ORTTrainer(
        model, None, description, "AdamOptimizer", None, models.LEARNING_RATE, "cpu", recompute=recompute, **options
    )


def trained(name: str, recompute: Recompute | None, steps: int = 3, **options):
    """Losses and state after a few steps."""
    trainer, setup = make(name, recompute, **options), models.SETUPS[name]
    losses = []
    for step in range(steps):
        results = trainer.train_step(*setup.batch(step), 0.01, *loss_scale(options))
        losses.append(results[0].item())
    return losses, trainer.state_dict()


def loss_scale(options) -> tuple:
    return (torch.tensor([1024.0]),) if options.get("use_mixed_precision") else ()


@functools.cache
def without(name: str):
    return trained(name, None)


def assert_equal(actual, expected) -> None:
    """Bit for bit."""
    assert actual[0] == expected[0]
    assert actual[1].keys() == expected[1].keys()
    different = [key for key, tensor in expected[1].items() if not torch.equal(actual[1][key], tensor)]
    assert not different


def recorded_plans(monkeypatch) -> list[tuple[str, list[str], list[str]]]:
    """A list that fills with what the pass is told to make again, per segment: (name, names of the values, names of the nodes)."""
    seen = []
    call = RecomputePass.call

    def recorded(self, model):
        seen.extend((p.segment.name, [y.name for y in p.replaced], [n.name for n in p.nodes]) for p in self.plans)
        return call(self, model)

    monkeypatch.setattr(RecomputePass, "call", recorded)
    return seen


def assert_close(actual, expected) -> None:
    """But for rounding, and what Adam makes of it where a gradient is near 0."""
    torch.testing.assert_close(torch.tensor(actual[0]), torch.tensor(expected[0]), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-5)
