"""Attention of ONNX with keys and values of before."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from small import LR

from orttrainer import IODescription, ModelDescription, ORTTrainer

RNG = np.random.default_rng(0)
SHAPES = {"W": (8, 8), "K": (2, 2, 4, 4), "V": (2, 2, 4, 4), "R": (2, 2, 3, 7)}
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def attention(outputs: str, loss: str, opset: int, mode: int = 0, present: str = "") -> onnx.ModelProto:
    """Of what is made of x with what was before it; `present`: outputs of the model beside the loss."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {opset}]> g (float[2, 3, 8] x) => (float loss{present}) {{
          h = MatMul (x, W)
          {outputs} = Attention <q_num_heads = 2, kv_num_heads = 2, qk_matmul_output_mode = {mode}> (h, h, h, , K, V)
          {loss} s = Mul (r, r) loss = ReduceMean <keepdims = 0> (s)
        }}"""
    )
    read = {name for node in proto.graph.node for name in node.input}
    for name in WEIGHTS.keys() & read:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHTS[name], name))
    return proto


def make(proto: onnx.ModelProto) -> ORTTrainer:
    shapes = {y.name: [size.dim_value for size in y.type.tensor_type.shape.dim] for y in proto.graph.output}
    desc = ModelDescription(
        [IODescription("x", [2, 3, 8], torch.float32)], [IODescription(name, shape) for name, shape in shapes.items()]
    )
    return ORTTrainer(proto, None, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")


def twin(W: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> dict[str, torch.Tensor]:
    h = (X @ W).reshape(2, 3, 2, 4).transpose(1, 2)
    keys, values = torch.cat([K, h], 2), torch.cat([V, h], 2)
    products = h @ keys.transpose(2, 3) / 2
    y = (products.softmax(-1) @ values).transpose(1, 2).reshape(2, 3, 8)
    return {"y": y, "pk": keys, "pv": values, "products": products, "weights": products.softmax(-1)}


def assert_trains(trainer: ORTTrainer, loss_of) -> None:
    """`loss_of(what attention gives, R)` is the twin in PyTorch."""
    twins = {name: torch.tensor(weight, requires_grad=True) for name, weight in WEIGHTS.items()}
    loss = loss_of(twin(twins["W"], twins["K"], twins["V"]), twins["R"])
    torch.testing.assert_close(trainer.train_step(X, LR), loss.detach())
    loss.backward()
    for name, weight in trainer.state_dict().items():
        slope = twins[name].grad
        torch.testing.assert_close(weight, twins[name].detach() - (0 if slope is None else LR * slope))


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("read", ["y", "pk", "pv"])
def test_attention_with_a_past_may_have_a_present_that_nothing_reads(read, opset):
    """ONNX Runtime refuses the operator without one."""
    trainer = make(attention("y, pk, pv", f"r = Identity ({read})", opset))
    assert_trains(trainer, lambda given, R: given[read].square().mean())


def test_a_present_that_is_an_output_need_not_be_fetched():
    present = ", float[2, 2, 7, 4] pk, float[2, 2, 7, 4] pv"
    trainer = make(attention("y, pk, pv", "r = Identity (y)", 23, present=present))
    given = twin(*(torch.tensor(WEIGHTS[name]) for name in ("W", "K", "V")))
    torch.testing.assert_close(trainer.eval_step(X, fetches=["loss"]), given["y"].square().mean())
    torch.testing.assert_close(trainer.eval_step(X, fetches=["pk"]), given["pk"])


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("mode, scores", [(0, "products"), (1, "products"), (2, "products"), (3, "weights")])
def test_scores_of_attention_are_those_of_the_past_too(mode, scores, opset):
    """ONNX's inference counts the keys of the present alone."""
    trainer = make(attention("y, pk, pv, q", "r = Mul (q, R)", opset, mode))
    assert_trains(trainer, lambda given, R: (given[scores] * R).square().mean())
