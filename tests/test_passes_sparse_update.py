"""A large table is updated from the rows that were looked up: the same numbers as from its whole gradient."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from marks import in_turn
from small import assert_same, train_with_torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer, phase
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import ExecutionError
from orttrainer.graph.passes.speed.sparse_update import SparseUpdatePass, written_through
from orttrainer.run import Runner

ROWS, WIDTH, RATE, STEPS = 4096, 24, 0.05, 4
PASS = SparseUpdatePass.__name__


class Bag(nn.Module):
    """Words [batch, length] -> scores [batch, 3]; a small table too, and perhaps a second lookup or a tied decoder."""

    def __init__(self, second: bool = False, tied: bool = False, padding: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        self.places, self.linear = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 3)
        if tied:
            self.words.weight.data.mul_(0.05)  # the sums over all words stay in the range in which tanh is not flat
        self.second, self.tied = second, tied

    def forward(self, words):
        x = self.words(words) * self.places(torch.arange(words.shape[1]))
        if self.second:
            x = x + self.words(words.flip(1) // 2)
        if self.tied:
            x = torch.tanh(x @ self.words.weight.T) @ self.words.weight
        return self.linear(torch.tanh(x).sum(1))


def batch(step: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of which many come several times, also in one row."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, ROWS, (rows, 6), generator=generator)
    words[:, 1], words[1:3, 2:] = words[:, 0], 7
    return words, torch.randint(0, 3, (rows,), generator=generator)


def engine(module: nn.Module, optimizer: str, attributes=None, clip: bool = False, **settings) -> Engine:
    description = ModelDescription(
        [IODescription("words", ["batch", 6], torch.int64), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", ["batch", 3], torch.float32)],
    )
    choice = OptimizerChoice(f"{optimizer}Optimizer", lambda _: attributes or {}, clip)
    return Engine(module, nn.functional.cross_entropy, description, choice, Settings(**settings))


def train(engine: Engine, steps=range(STEPS), rows: int = 5) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.train_step(dict(zip(("words", "label"), batch(step, rows))), RATE)
    return dict(engine.state_dict())


def operators(engine: Engine, rows: int = 30, native: bool = False) -> dict[str, int]:
    """How often each operator is in the session of a whole step."""
    runner, signature = engine._runner, engine._runner.graph.signature
    updates = [entry.output for entry in signature.state if entry.output is not None]
    cut = runner._cut(None, [*signature.outputs, signature.gradient_norm, *updates])
    SparseUpdatePass(rows, native)(cut)
    names = [node.op_type for node in cut.graph]
    return {name: names.count(name) for name in ("ConstantOfShape", "ScatterElements", "ScatterND")}


OPTIMIZERS = {
    "SGD": ("SGD", {}, 0),
    "SGD, momentum": ("SGD", {"momentum": 0.9}, 0),
    "SGD, Nesterov's momentum": ("SGD", {"momentum": 0.9, "nesterov": 1}, 0),
    "SGD, weight decay": ("SGD", {"weight_decay": 0.01}, 0),
    "SGD, dampening": ("SGD", {"momentum": 0.9, "dampening": 0.1}, 0),
    "Adam": ("Adam", {}, 0),
    "Adam, clipped": ("Adam", {"max_norm_clip": 0.01}, 1),
    "Adam, coupled decay": ("Adam", {"weight_decay": 0.01}, 0),
    "Adam, no first moment": ("Adam", {"alpha": 0.0, "do_bias_correction": 0}, 0),
    "Adam, the greatest second moment": ("Adam", {"amsgrad": 1, "beta": 0.5}, 0),
    "AdamW": ("AdamW", {}, 0),
    "LAMB": ("Lamb", {"lambda": 0.01}, 1),
}


# Each of them is made of what some of these have; `make test-slow` has the others.
USUAL = ("SGD, momentum", "Adam, clipped", "LAMB")
EACH = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in OPTIMIZERS]


@pytest.mark.parametrize("name", EACH)
def test_the_update_from_rows_is_that_from_the_whole_gradient(name):
    optimizer, attributes, clip = OPTIMIZERS[name]
    rows, whole = (
        engine(Bag(), optimizer, attributes, bool(clip), disabled_passes=disabled) for disabled in ((), (PASS,))
    )
    # Kernels in C add the rows to a moment before its decay, divided by it, which rounds in another way: by 9e-7 at most in
    # these weights, of LAMB; without that order, by nothing.
    assert_close(train(rows), train(whole), atol=2e-6 if rows._native else 1e-8)
    torch.testing.assert_close(rows._runner.gradient_norm, whole._runner.gradient_norm, rtol=1e-6, atol=0)


def assert_close(found, expected, atol=1e-8):
    """Equal but for the order in which the squares of the norm are added up."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("optimizer, padding", in_turn(["SGD", "Adam"], [None, 7]))
def test_training_from_rows_equals_torch(optimizer, padding):
    module, reference = Bag(padding=padding), Bag(padding=padding)
    trainer = engine(module, optimizer, {"epsilon": 1e-3} if optimizer == "Adam" else None)
    train(trainer)
    train_with_torch(
        reference, optimizer, RATE, map(batch, range(STEPS)), **({"eps": 1e-3} if optimizer == "Adam" else {})
    )
    for (name, found), expected in zip(module.named_parameters(), reference.parameters()):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert operators(trainer)["ScatterND"] > 0


@pytest.mark.parametrize("name, native", in_turn(["SGD, momentum", "Adam", "LAMB"], [False, True]))
def test_a_session_makes_nothing_that_nobody_reads(name, native, monkeypatch):
    """ONNX Runtime would run it: a product with a whole table that the update from rows had no more use for."""
    optimizer, attributes, clips = OPTIMIZERS[name]
    models, open_session = [], phase.open_session
    monkeypatch.setattr(phase, "open_session", lambda model, *rest: models.append(model) or open_session(model, *rest))
    train(engine(Bag(), optimizer, attributes, bool(clips), native_kernels=native), [0])
    (graph,) = [model.graph for model in models if len(model.graph.outputs) > 2]
    made = [node for node in graph if not any(y.uses() or y.is_graph_output() for y in node.outputs)]
    assert not made
    assert any(y.is_graph_output() for node in graph for y in node.outputs)


def test_no_gradient_as_large_as_the_table_is_made():
    """Scattered into: first rows by word, rows of the batch, the small table's gradient, the scores' and both moments."""
    trainer = engine(Bag(), "Adam")
    train(trainer, range(1))
    assert operators(trainer) == {"ConstantOfShape": 3, "ScatterElements": 4, "ScatterND": 2}


@pytest.mark.parametrize("change", [{"second": True}, {"tied": True}], ids=["looked up twice", "tied"])
def test_a_gradient_that_is_a_sum_is_made(change):
    trainer = engine(Bag(**change), "Adam")
    train(trainer, range(1))
    assert operators(trainer)["ScatterND"] == 0


@pytest.mark.parametrize("native, share", [(False, 2), (True, 8)])
def test_a_table_that_is_not_much_larger_than_the_batch_gets_its_gradient(native, share):
    trainer = engine(Bag(), "Adam")
    train(trainer, range(1))
    assert operators(trainer, ROWS // share, native)["ScatterND"] == 2
    assert operators(trainer, ROWS // share + 1, native)["ScatterND"] == 0


def test_with_other_sizes_of_batch_the_same_session_trains():
    rows, whole = (engine(Bag(), "Adam", disabled_passes=disabled) for disabled in ((), (PASS,)))
    for count in (5, 1, 9):
        assert_close(train(rows, range(2), count), train(whole, range(2), count))


def test_moments_are_written_where_they_are_and_a_restored_state_trains_the_same():
    first, second = engine(Bag(), "Adam"), engine(Bag(), "Adam")
    before = {name: tensor.data_ptr() for name, tensor in first_state(first).items()}
    middle = {name: tensor.clone() for name, tensor in train(first, range(2)).items()}
    train(second, range(1))
    second.load_state_dict(middle)
    assert_same(train(second, range(2, 4)), train(first, range(2, 4)))
    assert {name: tensor.data_ptr() for name, tensor in first._runner.state.items()} == before


def first_state(trainer: Engine) -> dict[str, torch.Tensor]:
    train(trainer, range(0, 0))
    trainer.eval_step(dict(zip(("words", "label"), batch(0))))
    return dict(trainer._runner.state)


def test_the_update_from_rows_without_memory_in_common_is_the_same():
    """Nothing relies on old and new state being one memory."""
    trainer = engine(Bag(), "Adam")
    train(trainer, range(1))
    apart = {name: tensor.clone() for name, tensor in trainer._runner.state.items()}
    double = Runner(
        trainer.training_graph, apart, torch.device("cpu"), in_place=False, native_kernels=trainer._native
    )  # fmt: skip
    for step in range(1, STEPS):
        feeds = dict(zip(("words", "label"), batch(step)))
        double.train_step(feeds, torch.tensor([RATE]))
        trainer.train_step(feeds, RATE)
    if trainer._native:  # in place they add the rows to a moment before its decay
        return assert_close(apart, trainer._runner.state, atol=1e-6)
    for name, tensor in trainer._runner.state.items():
        assert torch.equal(apart[name], tensor), name


def test_a_word_that_is_not_in_the_table_leaves_the_state_as_it_was():
    trainer = engine(Bag(), "Adam")
    train(trainer, range(1))
    before = {name: tensor.clone() for name, tensor in trainer._runner.state.items()}
    words, label = batch(1)
    words[0, 0] = ROWS
    with pytest.raises(ExecutionError, match="out of range"):
        trainer.train_step({"words": words, "label": label}, RATE)
    for name, tensor in trainer._runner.state.items():
        assert torch.equal(before[name], tensor), name


def test_rows_are_taken_from_the_back_where_an_index_is_negative():
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[{ROWS},{WIDTH}] a, int64[4] i, float[4,{WIDTH}] u) => (float[{ROWS},{WIDTH}] y, float n)
    <int64[2] shape = {{{ROWS}, {WIDTH}}}, int64[1] axis = {{1}}, float c = {{0.5}}> {{
      zeros = ConstantOfShape(shape)
      column = Unsqueeze(i, axis)
      sizes = Shape(u)
      index = Expand(column, sizes)
      g = ScatterElements <axis = 0, reduction = "add"> (zeros, index, u)
      n = ReduceSumSquare <keepdims = 0> (g)
      square = Mul(g, g)
      share = Mul(square, c)
      y = Sub(a, share)
    }}"""
    before = onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text)))
    result = SparseUpdatePass(4)(ir.from_proto(before))
    after = ir.to_proto(result.model)
    onnx.checker.check_model(after, full_check=True)
    assert result.modified and "ScatterND" in [node.op_type for node in after.graph.node]
    rng = np.random.default_rng(0)
    feeds = {"a": rng.standard_normal((ROWS, WIDTH)).astype(np.float32), "i": np.array([-1, 3, ROWS - 1, 3 - ROWS])}
    feeds["u"] = rng.standard_normal((4, WIDTH)).astype(np.float32)
    gradient = np.zeros((ROWS, WIDTH))
    np.add.at(gradient, feeds["i"], feeds["u"].astype(np.float64))
    y, n = onnxruntime.InferenceSession(after.SerializeToString()).run(["y", "n"], feeds)
    np.testing.assert_allclose(y, feeds["a"] - 0.5 * gradient**2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(n, (gradient**2).sum(), rtol=1e-6)


# These rows are updated whole, and in tiles.
@pytest.mark.parametrize("optimizer, rows", in_turn(["SGDOptimizer", "AdamOptimizer"], [4_000, 140_000]))
def test_a_step_that_fails_leaves_tables_and_moments_as_they_were(optimizer, rows):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Embedding(rows, 17), nn.Embedding(rows, 18), nn.Linear(35, 6)

        def forward(self, i, j):
            return self.out(torch.tanh(torch.cat([self.a(i), self.b(j)], 1)))

    torch.manual_seed(0)
    inputs = [IODescription(name, ["n"], torch.int64) for name in ("i", "j", "label")]
    trainer = ORTTrainer(
        Tables(), nn.functional.cross_entropy, ModelDescription(inputs, [IODescription("loss", [], torch.float32)]),
        optimizer, None, IODescription("Learning_Rate", [1], torch.float32), "cpu",
    )  # fmt: skip
    rate, batch = torch.tensor([0.1]), [torch.arange(8), torch.arange(8) * 3, torch.arange(8) % 6]
    for _ in range(2):
        trainer.train_step(*batch, rate)
    before = trainer.state_dict()
    for place, wrong in ((0, rows), (1, rows), (2, 6)):
        bad = [tensor.clone() for tensor in batch]
        bad[place][5] = wrong
        with pytest.raises(ExecutionError, match="out of"):
            trainer.train_step(*bad, rate)
        assert not [name for name, tensor in trainer.state_dict().items() if not torch.equal(tensor, before[name])]
    trainer.train_step(*batch, rate)


def test_what_is_written_through_waits_for_the_gradient():
    """The product with the decay has nothing to wait for else: it might run before a forward pass that fails."""
    text = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[9,2] m, int64[3] i, int64[3,1] c, float[3,2] x) => (float[9,2] m_new)
    <float[1,1] decay = {0.9}> {
      a = Mul(m, decay)
      before = Gather(a, i)
      u = Exp(x)
      r = Add(before, u)
      m_new = ScatterND(a, c, r)
    }"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text))))
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert [(name, value.name) for name, value in written_through(model.graph, {"m": "m_new"})] == [("m", "a")]
    seen, stack = set(), [values["a"].producer()]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(x.producer() for x in node.inputs if x is not None)
    assert values["u"].producer() in seen
