"""The small classifier that the trainer's tests share."""

from __future__ import annotations

import models
import onnx
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer

RATE = 0.1
LR = torch.tensor([RATE])
OPTIMIZERS = ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"]


def net(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def description(rows="batch") -> ModelDescription:
    return ModelDescription(
        [IODescription("x", [rows, 4], torch.float32), IODescription("label", [rows], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", [rows, 3], torch.float32)],
    )


def batch(step: int = 0, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def make(
    module=None, optimizer="SGDOptimizer", attributes=None, loss_fn=nn.functional.cross_entropy, desc=None, **options
):
    module = net() if module is None else module
    desc = description() if desc is None else desc
    return ORTTrainer(module, loss_fn, desc, optimizer, attributes, models.LEARNING_RATE, "cpu", **options)


def torch_step(module, x, y, rate=RATE, loss_fn=nn.functional.cross_entropy) -> torch.Tensor:
    """One step of SGD in plain PyTorch; the loss before the update."""
    loss = loss_fn(module(x), y)
    for parameter, gradient in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters()))):
        parameter.data.sub_(rate * gradient)
    return loss.detach()


def train_with_torch(module, optimizer, rate, batches, **settings) -> None:
    """A step of `torch.optim.<optimizer>` on the cross entropy of each batch."""
    own = getattr(torch.optim, optimizer)(module.parameters(), rate, **settings)
    for x, label in batches:
        own.zero_grad()
        nn.functional.cross_entropy(module(x), label).backward()
        own.step()


def forward_model(tmp_path, module=None) -> onnx.ModelProto:
    """An ONNX model whose first output is the loss."""
    source = make(module)
    source.eval_step(*batch())
    source.save_as_onnx(str(tmp_path / "forward.onnx"))
    return onnx.load(str(tmp_path / "forward.onnx"))


def snapshot(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._engine._state.tensors.items()}


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose storage was freed, as some distributed wrappers do it."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor
