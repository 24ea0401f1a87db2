"""Small ONNX models that several tests train, and their twins in PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import torch
from small import LR

from orttrainer import IODescription, ModelDescription, ORTTrainer

LOSS = "s = Mul (r, r) loss = ReduceMean <keepdims = 0> (s)"


def model(body: str, x: str, opset: int, **initializers) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[rows, {x}] x) => (float loss) {{ {body} {LOSS} }}'
    )
    for name, value in initializers.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    return proto


def make(proto: onnx.ModelProto, *sizes: int, **options) -> ORTTrainer:
    desc = ModelDescription([IODescription("x", ["rows", *sizes], torch.float32)], [IODescription("loss", [])])
    return ORTTrainer(proto, None, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu", **options)


def assert_trains_like(proto, predict, batches, sizes=None, **weights):
    """`predict(x, **weights)` is the twin in PyTorch; the loss is the mean of the squares. `sizes`: of x, if some are unknown."""
    trainer = make(proto, *(sizes or batches[0].shape[1:]))
    assert trainer.state_dict().keys() == weights.keys()
    twins = {name: torch.tensor(weight, requires_grad=True) for name, weight in weights.items()}
    optimizer = torch.optim.SGD(twins.values(), LR.item())
    for x in batches:
        loss = predict(x, **twins).square().mean()
        torch.testing.assert_close(trainer.train_step(x, LR), loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, twin in twins.items():
        torch.testing.assert_close(trainer.state_dict()[name], twin.detach())


def assert_norm_trains(trainer, twin, W, batches, *names):
    """As mean(twin(x @ W)^2) in PyTorch. `names`: of W, and of the twin's weight, bias and running mean."""
    weight = torch.nn.Parameter(torch.tensor(W))
    optimizer = torch.optim.SGD([weight, *twin.parameters()], LR.item())
    for x in batches:
        optimizer.zero_grad()
        loss = twin(x @ weight).square().mean()
        torch.testing.assert_close(trainer.train_step(x, LR), loss.detach())
        loss.backward()
        optimizer.step()
    state = trainer.state_dict()
    for name, value in zip(names, (weight, twin.weight, twin.bias, twin.running_mean), strict=True):
        torch.testing.assert_close(state[name], value.detach())
