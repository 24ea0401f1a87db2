"""The forward of recurrent layers that keeps what the backward needs, and the gradients of weights in slices."""

from __future__ import annotations

import copy
import functools

import models
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from cases import recurrent
from marks import in_turn
from onnx_ir.passes import common
from recurrent_scans import CASES, UNKNOWN_TO_PYTORCH, with_gradients
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer, Recompute
from orttrainer.differentiate import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.differentiate.rules import recurrent_forward
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.pads import JoinPadsPass
from orttrainer.graph.passes.speed.recurrent import BatchMajorPass, KeepActivationsPass
from orttrainer.testing import evaluate
from orttrainer.testing.check import _compare, _model, _torch_gradients


def operators(model) -> list[str]:
    return [node.op_type for node in model.graph.node]


# The pass, and from how many numbers in a hidden state on it keeps the activations where it is batch-major.
FORMS = {
    "hidden-major": (KeepActivationsPass, 0),
    "batch-major": (BatchMajorPass, 0),
    "made-again": (BatchMajorPass, 99),
}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """A pass over the recurrent layers of a graph; and whether it leaves none of their operators."""
    make, smallest = FORMS[request.param]
    monkeypatch.setattr(recurrent_forward, "SMALLEST", smallest)
    return make(), smallest == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_form_has_the_outputs_and_gradients_of_pytorch(case, form):
    model, feeds = _model(case, np.float64)
    outputs = evaluate(model, feeds)
    rng = np.random.default_rng(5)
    seeds = {name: rng.standard_normal(value.shape) for name, value in outputs.items()}
    rewrite, keeps = form
    kept = with_gradients(model, rewrite)
    assert (case.op_type not in operators(kept)) == (keeps or case.op_type == "RNN")
    results = evaluate(kept, feeds | {f"{name}_cotangent": seed for name, seed in seeds.items()})
    floats = [torch.tensor(value) for name, value in feeds.items() if value.dtype == np.float64]
    expected = case.torch(*floats)
    for name, want in zip(outputs, expected):
        np.testing.assert_allclose(results[name], want.detach().numpy(), rtol=0, atol=1e-12)
    gradients = _torch_gradients(case, model, feeds, seeds)
    _compare({name: results[f"{name}_grad"] for name in gradients}, gradients, 1e-12, str(case))


STATES_AS_THEY_ARE = """
<ir_version: 8, opset_import: ["" : 18]>
g (double[5,2,3] x, double[1,4,3] a, double[1,4,4] b, double[1,4,4] c, double[1,4,4] d) => (double[1,1,2,4] z) {
  y, h = RNN <hidden_size = 4> (x, a, b)
  z, last = RNN <hidden_size = 4> (h, c, d)
}
"""


def test_a_layer_may_read_the_states_of_another_as_they_are(form):
    """Each is written in another form after the other, from what it read when its gradient was taken."""
    model = onnx.parser.parse_model(STATES_AS_THEY_ARE)
    rng = np.random.default_rng(5)
    feeds = {
        x.name: rng.standard_normal([d.dim_value for d in x.type.tensor_type.shape.dim]) for x in model.graph.input
    }
    x, a, b, c, _ = (torch.tensor(value, requires_grad=True) for value in feeds.values())
    seed = rng.standard_normal((1, 1, 2, 4))
    h = torch.zeros(2, 4, dtype=torch.float64)
    for part in x:
        h = torch.tanh(part @ a[0].T + h @ b[0].T)
    z = torch.tanh(h @ c[0].T)
    z.backward(torch.tensor(seed[0, 0]))
    found = evaluate(with_gradients(model, form[0]), feeds | {"z_cotangent": seed})
    np.testing.assert_allclose(found["z"][0, 0], z.detach().numpy(), rtol=0, atol=1e-12)
    for name, value in zip("xabc", (x, a, b, c)):
        np.testing.assert_allclose(found[f"{name}_grad"], value.grad.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", UNKNOWN_TO_PYTORCH, ids=str)
def test_each_form_agrees_with_the_operator(case, form):
    model, feeds = _model(case, np.float64)
    rng = np.random.default_rng(5)
    feeds |= {f"{name}_cotangent": rng.standard_normal(v.shape) for name, v in evaluate(model, feeds).items()}
    expected, actual = (evaluate(with_gradients(model, *passes), feeds) for passes in ((), form[:1]))
    _compare(actual, expected, 1e-12, str(case))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_no_step_copies_a_state_to_keep_it(kind, direction, form):
    model, _ = _model(recurrent.case(kind, "plain", direction, **recurrent.RESET[kind]), np.float64)
    kept = with_gradients(model, form[0])
    bodies = [node.attribute[0].g for node in kept.graph.node if node.op_type == "Scan"]
    assert bodies and not any(node.op_type == "Identity" for body in bodies for node in body.node)


def test_special_layers_keep_the_operator():
    case = recurrent.special("RNN", "clip", clip=0.5)
    model, _ = _model(case, np.float64)
    model = prepare(ir.from_proto(model))
    y, x = model.graph.outputs[0], model.graph.inputs[0]
    differentiate(Builder(model.graph), {y: y}, [x])
    assert not BatchMajorPass()(model).modified and not KeepActivationsPass()(model).modified
    assert case.op_type in [node.op_type for node in model.graph]


@pytest.mark.parametrize("hidden, sizes, layout, keeps", [
    (16, {}, "batch-major", False), (32, {}, "batch-major", True), (32, {"batch": 8}, "batch-major", False),
    (16, {"batch": 32}, "batch-major", True), (128, {}, "hidden-major", True), (128, {"batch": 32}, "hidden-major", True),
    (128, {"batch": 8}, "batch-major", True),
])  # fmt: skip
def test_layers_are_batch_major_where_they_are_narrow_or_samples_few(hidden, sizes, layout, keeps):
    case = recurrent.case("LSTM", "size", shape=(2, 3, 2), hidden=hidden)
    model, _ = _model(case, np.float32)
    for value in [*model.graph.input, *model.graph.output]:
        dims = value.type.tensor_type.shape.dim
        if len(dims) > 2 and dims[-2].dim_value == 3:
            dims[-2].dim_param = "batch"
    model = with_gradients(model, BatchMajorPass(sizes), KeepActivationsPass())
    assert ("LSTM" in operators(model)) != keeps
    assert layouts(model) == {layout}


def layouts(model) -> set[str]:
    """How the steps of the Scans multiply: batch-major the weight, which comes from outside, is the right operand."""
    found = set()
    for body in (node.attribute[0].g for node in model.graph.node if node.op_type == "Scan"):
        made = {value.name for value in body.input} | {name for node in body.node for name in node.output}
        for node in body.node:
            if node.op_type in ("Gemm", "MatMul"):
                found.add("hidden-major" if node.input[1] in made else "batch-major")
    return found


WIDTH = 64  # batch-major, with what it keeps from 7 sequences on


class Tagger(nn.Module):
    """Two layers in two directions, with the last states."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.layers = kind(8, WIDTH, num_layers=2, bidirectional=True)
        self.decoder = nn.Linear(3 * WIDTH, 23)

    def forward(self, tokens):
        y, last = self.layers(self.embedding(tokens))
        last = last[-1] if isinstance(last, tuple) else last
        return self.decoder(torch.cat([y, last[-1].expand(len(y), -1, -1)], -1))


def make_trainer(module: nn.Module, **options) -> ORTTrainer:
    description = ModelDescription(
        [IODescription("tokens", ["length", "batch"], torch.int64), IODescription("labels", ["tokens"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("scores", ["length", "batch", 23], torch.float32)],
    )
    return ORTTrainer(
        module, models.flat_cross_entropy, description, "SGDOptimizer", None, models.LEARNING_RATE, "cpu", **options
    )


class OneWay(nn.Module):
    def __init__(self, kind, width=WIDTH):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(23, 8), kind(8, width)
        self.decoder = nn.Linear(width, 23)

    def forward(self, tokens):
        return self.decoder(self.layer(self.embedding(tokens))[0])


KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": functools.partial(nn.RNN, nonlinearity="relu")}


@pytest.mark.parametrize("model, kind", in_turn({"Tagger": Tagger, "OneWay": OneWay}, KINDS))
def test_wide_layers_train_as_in_pytorch_and_evaluate_too(model, kind):
    torch.manual_seed(0)
    module, twin = model(kind), model(kind)
    twin.load_state_dict(module.state_dict())
    trainer = make_trainer(module)
    optimizer = torch.optim.SGD(twin.parameters(), 0.5)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        length, batch = [(7, 8), (5, 7)][step % 2]
        tokens = torch.randint(0, 23, (length, batch), generator=generator)
        labels = torch.randint(0, 23, (length * batch,), generator=generator)
        loss = trainer.train_step(tokens, labels, torch.tensor([0.5]))[0]
        optimizer.zero_grad()
        expected = models.flat_cross_entropy(twin(tokens), labels)
        expected.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    made_by = {output: node.op_type for node in trainer.training_graph.model.graph.node for output in node.output}
    assert not {"LSTM", "GRU", "RNN"} & set(made_by.values())
    torch.testing.assert_close(trainer.eval_step(tokens, labels)[1], twin(tokens), rtol=1e-5, atol=1e-5)
    for name, want in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], want, rtol=1e-5, atol=1e-6)


def test_the_operator_stays_where_values_are_to_be_made_again():
    trainer = make_trainer(Tagger(nn.LSTM), recompute=Recompute(patterns=["*"]))
    trainer.eval_step(torch.zeros(5, 3, dtype=torch.int64), torch.zeros(15, dtype=torch.int64))
    assert "LSTM" in operators(trainer.training_graph.model)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("model", [OneWay, Tagger])
def test_the_gates_of_a_layer_stay_in_the_order_of_pytorch(model, kind):
    trainer = make_trainer(model(kind))
    trainer.eval_step(torch.zeros(5, 8, dtype=torch.int64), torch.zeros(40, dtype=torch.int64))
    nodes = trainer.training_graph.model.graph.node
    made_by = {output: node for node in nodes for output in node.output}
    names = [name for name in trainer.state_dict() if ".weight_" in name or ".bias_ih_" in name]
    assert len(names) == (3 if model is OneWay else 12)
    for name in names:
        assert not {node.op_type for node in nodes if name in node.input} & {"Slice", "Split", "Gather"}
        gradient = made_by[f"{name}_grad"]
        inner = made_by[gradient.input[0]].op_type if gradient.op_type == "Identity" else gradient.op_type
        assert inner in (("Transpose", "MatMul") if ".weight_" in name else ("ReduceSum", "Reshape")), name


def test_kernels_run_the_loops_of_narrow_layers_too(own_kernel_cache):
    """They read hidden-major, and keep the gates of every width."""
    torch.manual_seed(0)
    module = OneWay(nn.LSTM, 8)
    twin = copy.deepcopy(module)
    trainer = make_trainer(module, native_kernels=True)
    optimizer = torch.optim.SGD(twin.parameters(), 0.5)
    tokens, labels = torch.arange(20).view(5, 4), torch.arange(20)
    for _ in range(3):
        loss = trainer.train_step(tokens, labels, torch.tensor([0.5]))[0]
        optimizer.zero_grad()
        expected = models.flat_cross_entropy(twin(tokens), labels)
        expected.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    graph = trainer.training_graph.model
    assert "LSTM" not in operators(graph) and layouts(graph) == {"hidden-major"}


# ---------------------------------------------------------------- gradients of slices

SLICES = """
<ir_version: 8, opset_import: ["" : 18]>
g (float[2,2] a, float[%d,2] b, float[3,2] c) => (float[6,2] y)
  <int64[1] axes = {0}, int64[2] first = {0, 4}, int64[2] second = {%d, 3}, int64[4] third = {3, 0, 0, 0}> {
  p = Pad (a, first, , axes)
  q = Pad (b, second, , axes)
  r = Pad (c, third)
  s = Add (r, p)
  y = Add (s, q)
}
"""


@pytest.mark.parametrize("width", ["2", "N"])
@pytest.mark.parametrize("rows, start, joined", [(1, 2, True), (2, 1, False)])
def test_a_sum_of_parts_is_joined_where_each_row_has_one_part(rows, start, joined, width):
    model = ir.from_onnx_text((SLICES % (rows, start)).replace(",2]", f",{width}]"))
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal((v.shape[0], 2)).astype(np.float32) for v in model.graph.inputs}
    before = evaluate(ir.to_proto(model), feeds)["y"]
    assert JoinPadsPass()(model).modified == joined
    common.RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph] == (["Concat"] if joined else ["Pad"] * 3 + ["Add"] * 2)
    assert [value.name for value in model.graph.outputs] == ["y"]
    np.testing.assert_array_equal(evaluate(ir.to_proto(model), feeds)["y"], before)


def test_parts_of_sizes_that_may_differ_are_added():
    model = ir.from_onnx_text((SLICES % (1, 2)).replace("float[3,2]", "float[3,M]").replace(",2]", ",N]"))
    assert not JoinPadsPass()(model).modified


def test_parts_that_are_repeated_to_meet_each_other_are_added():
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[3,1] a, float[3,5] b) => (float[6,5] y) <int64[4] first = {0, 0, 3, 0}, int64[4] second = {3, 0, 0, 0}> {
          p = Pad (a, first)
          q = Pad (b, second)
          y = Add (p, q)
        }"""
    )
    assert not JoinPadsPass()(model).modified


def test_gradients_of_slices_are_parts_where_only_other_axes_vary():
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (double[N,4] x) => (double[N,2] y) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {9}> {
          a = Slice (x, zero, two, one)
          b = Slice (x, two, end, one)
          y = Mul (a, b)
        }"""
    )
    model = prepare(model)
    x, y = model.graph.inputs[0], model.graph.outputs[0]
    (dx,) = differentiate(Builder(model.graph), {y: y}, [x]).values()
    model.graph.outputs.append(dx)
    assert JoinPadsPass()(model).modified
    common.RemoveUnusedNodesPass()(model)
    assert not {"Pad", "Shape"} & {node.op_type for node in model.graph}
    given = np.random.default_rng(0).standard_normal((3, 4))
    a, b = given[:, :2], given[:, 2:]
    found = evaluate(ir.to_proto(model), {"x": given})[model.graph.outputs[1].name]
    np.testing.assert_allclose(found, np.concatenate([a * b * b, a * b * a], 1), rtol=1e-14)
