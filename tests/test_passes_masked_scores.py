"""Attention that leaves out the scores that its mask hides computes the same, forward and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes import common
from torch import nn

import orttrainer
from orttrainer.differentiate import differentiate
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed import masked_scores
from orttrainer.graph.passes.speed.masked_scores import SkipMaskedScoresPass
from orttrainer.testing import evaluate

HEADS, SIZE = 2, 4
PLACES = np.arange(20)
CAUSAL = PLACES[:, None] >= PLACES
WINDOW = np.abs(PLACES - PLACES[:, None]) < 3
FEWER_KEYS = np.arange(16) <= PLACES[:, None]
LOW = np.float32(-np.inf)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(masked_scores, "LEAST_ROWS", 4)


def attention(mask: Callable, keys: int = 20, queries: int | str = 20, around: Callable = lambda op, y: y) -> ir.Model:
    """softmax(mask(q k^T)) v of a batch of any size, with the gradients of all three as outputs; k and v are the same for all of it."""
    float_ = ir.TensorType(ir.DataType.FLOAT)
    q = ir.Value(name="q", type=float_, shape=ir.Shape(["B", HEADS, queries, SIZE]))
    k, v = (ir.Value(name=name, type=float_, shape=ir.Shape([HEADS, keys, SIZE])) for name in "kv")
    graph = ir.Graph([q, k, v], [], nodes=[], opset_imports={"": 18}, name="g")
    op = Builder(graph, "g")
    y = op.MatMul(around(op, op.Softmax(mask(op, op.MatMul(q, op.Transpose(k, perm=[0, 2, 1]))), axis=-1)), v)
    y.name = "y"
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=8)


def with_gradients(model: ir.Model) -> ir.Model:
    graph = model.graph
    op, (y,) = Builder(graph, "step"), graph.outputs
    dy = ir.Value(name="dy", type=y.type, shape=y.shape)
    wanted = list(graph.inputs)
    graph.inputs.append(dy)
    for value, found in differentiate(op, {y: dy}, wanted).items():
        found.name = f"d{value.name}"
        graph.outputs.append(found)
    common.RemoveUnusedNodesPass()(model)
    return model


def feeds(keys: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v, dy = (
        rng.standard_normal(shape) for shape in ((3, HEADS, 20, SIZE), *2 * [(HEADS, keys, SIZE)], (3, HEADS, 20, SIZE))
    )
    return {name: x.astype(np.float32) for name, x in (("q", q), ("k", k), ("v", v), ("dy", dy))}


def computed(op, y):
    """As a trace leaves the mask of a long sequence: compared in the graph."""
    return op.Where(op.LessOrEqual(op.const(PLACES), op.const(PLACES[:, None])), y, LOW)


MASKS = {
    "causal": (lambda op, y: op.Where(op.const(CAUSAL[None]), y, LOW), 20),
    "what is hidden": (lambda op, y: op.Where(op.Not(op.const(CAUSAL)), LOW, y), 20),
    "computed": (computed, 20),
    "a window": (lambda op, y: op.Where(op.const(WINDOW), y, LOW), 20),
    "added": (lambda op, y: op.Add(op.const(np.where(CAUSAL, PLACES / 9.0, LOW).astype(np.float32)), y), 20),
    "scaled, and two masks": (
        lambda op, y: op.Where(op.const(WINDOW), op.Div(computed(op, op.Mul(np.float32(0.5), y)), np.float32(2.0)), LOW), 20,
    ),
    "fewer keys": (lambda op, y: op.Where(op.const(FEWER_KEYS), y, LOW), 16),
}  # fmt: skip


def scores_of(model: ir.Model) -> int:
    return sum(int(np.prod(n.outputs[0].shape.numpy()[-2:])) for n in model.graph if n.op_type == "Softmax")


@pytest.mark.parametrize("mask, keys", MASKS.values(), ids=MASKS)
def test_what_is_hidden_is_not_computed(mask, keys):
    expected = evaluate(ir.to_proto(with_gradients(attention(mask, keys))), feeds(keys))
    model = attention(mask, keys)
    assert SkipMaskedScoresPass()(model).modified
    (y,) = model.graph.outputs
    assert y.name == "y" and y.shape[-2] == 20
    assert len([node for node in model.graph if node.op_type == "Softmax"]) == 5
    found = evaluate(ir.to_proto(with_gradients(model)), feeds(keys))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


LEFT = {
    "few are hidden": ({"mask": lambda op, y: op.Where(op.const(PLACES[:, None] - 15 < PLACES), y, LOW)}),
    "a row sees nothing": ({"mask": lambda op, y: op.Where(op.const(PLACES[:, None] > PLACES), y, LOW)}),
    "hidden is not -inf": ({"mask": lambda op, y: op.Where(op.const(CAUSAL), y, np.float32(-1e4))}),
    "another for each head": ({"mask": lambda op, y: op.Where(op.const(np.stack([CAUSAL, WINDOW])), y, LOW)}),
    "any number of queries": ({"mask": lambda op, y: op.Where(op.const(CAUSAL), y, LOW), "queries": "T"}),
    "weights that are read elsewhere": (
        {"mask": lambda op, y: op.Where(op.const(CAUSAL), y, LOW), "around": lambda op, y: op.Mul(y, y)}
    ),
}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_other_attention_is_left_as_it_is(case):
    assert not SkipMaskedScoresPass()(attention(**case)).modified


class Attention(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.both, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x):
        q, k, v = self.both(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        return (
            nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


def test_a_module_trains_as_in_pytorch():
    torch.manual_seed(0)
    module, reference = Attention(0.0), Attention(0.0)
    reference.load_state_dict(module.state_dict())
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (module, reference))
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, ours)
    for rows in (3, 2, 4):
        x, y = torch.randn(rows, 20, 8), torch.randn(rows, 20, 8)
        loss = nn.functional.mse_loss(reference(x), y)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        torch.testing.assert_close(trainer.step(x, y)[0], loss.detach(), rtol=1e-5, atol=1e-6)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert [node.op_type for node in trainer.training_graph.model.graph.node].count("Softmax") == 5


def test_dropout_drops_in_each_block_as_much():
    torch.manual_seed(0)
    module = Attention(0.5)
    with torch.no_grad():
        module.both.weight.zero_()  # so that all keys weigh the same, and all values are ones
        module.both.bias.copy_(torch.cat([torch.zeros(16), torch.ones(8)]))
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=0.0))
    x = torch.randn(500, 20, 8)
    found = torch.stack([trainer.step(x, torch.zeros_like(x))[1] for _ in range(2)])
    assert not torch.equal(found[0], found[1])
    # Of n keys each weighs 1/n, and 2/n or 0 with dropout: a mean of 1, a variance of 1/n.
    keys = torch.arange(1, 21.0)[:, None]
    torch.testing.assert_close(found.mean((0, 1)), torch.ones(20, 8), rtol=0, atol=0.2)
    torch.testing.assert_close(found.var((0, 1)) * keys, torch.ones(20, 8), rtol=0, atol=0.2)
    torch.testing.assert_close(trainer.eval_step(x, torch.zeros_like(x))[1], torch.ones_like(x))
