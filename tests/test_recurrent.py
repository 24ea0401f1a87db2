"""LSTM, GRU and RNN: one output at a time, what is refused, and language models trained like in PyTorch."""

from __future__ import annotations

import itertools

import models
import numpy as np
import onnx
import pytest
import torch
from cases import recurrent
from fidelity import assert_trains_as_in_pytorch
from marks import usual
from onnx import TensorProto, helper
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer, build_gradient
from orttrainer.errors import GradientError
from orttrainer.testing import evaluate
from orttrainer.testing.check import _compare, _model, _torch_gradients

KINDS = sorted(recurrent.TORCH)
VOCABULARY, RATE = 23, 0.5


# ---------------------------------------------------------------- one node


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("kind", "output"), [*itertools.product(KINDS, [0, 1]), ("LSTM", 2)])  # which has a cell, too
def test_each_output_alone_has_the_gradient_that_pytorch_gives_it(kind, output, direction):
    case = recurrent.case(kind, "alone", direction, lengths=recurrent.LENGTHS if direction != "reverse" else None,
                          **recurrent.RESET[kind])  # fmt: skip
    model, feeds = _model(case, np.float64)
    values = evaluate(model, feeds)
    cotangents = {name: np.zeros_like(value) for name, value in values.items()}
    name = f"y{output}"
    cotangents[name] = np.random.default_rng(5).standard_normal(values[name].shape)
    gradient = build_gradient(model, of=name, wrt=list(feeds))
    results = evaluate(gradient, feeds | {f"{name}_cotangent": cotangents[name]})
    actual = {x: results[f"{x}_grad"] for x in feeds}
    _compare(actual, _torch_gradients(case, model, feeds, cotangents), 1e-12, str(case))


@pytest.mark.parametrize("kind", KINDS)
def test_the_hidden_states_are_asked_for_where_the_model_has_only_the_last_one(kind):
    case = recurrent.case(kind, "last", "bidirectional", **recurrent.RESET[kind])
    model, feeds = _model(case, np.float64)
    wanted = build_gradient(model, of="y1", wrt=list(feeds))
    feeds["y1_cotangent"] = np.random.default_rng(5).standard_normal((2, 3, 4))
    expected = evaluate(wanted, feeds)
    model.graph.node[0].output[:] = ["", "y1"]
    last = [value for value in model.graph.output if value.name == "y1"]
    del model.graph.output[:]
    model.graph.output.extend(last)
    actual = evaluate(build_gradient(model, of="y1", wrt=[x for x in feeds if x.startswith("x")]), feeds)
    _compare(actual, {name: expected[name] for name in actual}, 1e-12, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_of_an_onnx_model_trains_in_the_parts_of_a_step(kind):
    """Those of bfloat16, as of several ranks: they hand on the gradients by name, which are those of the layer's own weights."""
    case = recurrent.case(kind, "parts", "bidirectional", states=False, outputs=1, **recurrent.RESET[kind])
    model, feeds = _model(case, np.float64)
    expected = _torch_gradients(case, model, feeds, {"y0": np.ones((5, 2, 3, 4))})
    x, *weights = ((name, value.astype(np.float32)) for name, value in feeds.items())
    loss = helper.make_node("ReduceSum", ["y0"], ["loss"], keepdims=0)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in ((x[0], [5, 3, 2]), ("loss", []))
    ]
    given = [onnx.numpy_helper.from_array(value, name) for name, value in weights]
    graph = helper.make_graph([*model.graph.node, loss], "parts", infos[:1], infos[1:], given)
    proto = helper.make_model(graph, opset_imports=model.opset_import, ir_version=8)
    description = ModelDescription([IODescription(x[0], [5, 3, 2])], [IODescription("loss", [])])
    options = {"use_mixed_precision": True, "mixed_precision_dtype": "bfloat16"}
    trainer = ORTTrainer(proto, None, description, "SGDOptimizer", None, models.LEARNING_RATE, "cpu", **options)
    trainer.train_step(torch.tensor(x[1]), torch.tensor([1.0]))
    for name, value in weights:
        found = torch.tensor(value) - trainer.state_dict()[name]
        torch.testing.assert_close(found, torch.tensor(expected[name]).float(), rtol=2e-2, atol=2e-2)  # bfloat16


@pytest.mark.parametrize("clip", [{}, {"clip": 9.0}], ids=["plain", "clipped"])  # which nothing here reaches
def test_a_layer_of_which_only_the_last_state_is_read_is_trained(clip):
    """No gradient reads what the layer makes: the update alone waits for it."""
    w, r = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 12).reshape(2, 2, 3)
    nodes = [
        helper.make_node("RNN", ["x", "w", "r"], ["", "last"], hidden_size=3, **clip),
        helper.make_node("ReduceSum", ["last"], ["loss"], keepdims=0),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x.shape), ("loss", []))]
    weights = [onnx.numpy_helper.from_array(weight.numpy(), name) for name, weight in (("w", w), ("r", r))]
    graph = helper.make_graph(nodes, "last", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    description = ModelDescription([IODescription("x", [2, 2, 3], torch.float32)], [IODescription("loss", [])])
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    loss = trainer.train_step(x, torch.tensor([RATE]))
    w_twin, r_twin = w.clone().requires_grad_(), r.clone().requires_grad_()
    expected = (((x[0] @ w_twin[0].T).tanh() @ r_twin[0].T + x[1] @ w_twin[0].T).tanh()).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, weight, twin in (("w", w, w_twin), ("r", r, r_twin)):
        torch.testing.assert_close(trainer.state_dict()[name], weight - RATE * twin.grad)


def test_the_body_of_the_backward_scan_does_not_grow_with_the_sequence():
    sizes = []
    for time in (3, 300):
        case = recurrent.case("LSTM", "long", shape=(time, 3, 2))
        model, feeds = _model(case, np.float64)
        gradient = build_gradient(model, of="y0", wrt=list(feeds))
        scans = [node for node in gradient.graph.node if node.op_type == "Scan"]
        sizes.append((len(gradient.graph.node), [len(scan.attribute[0].g.node) for scan in scans]))
    assert sizes[0] == sizes[1]
    assert max(sizes[0][1]) <= 8


# ---------------------------------------------------------------- what is refused

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
REFUSED = {
    "an activation that does not exist": ("GRU", {"activations": ["HardSigmoid", "Swish"]}, "activation 'swish'"),
    "a parameter whose default runtimes do not agree on": (
        "RNN", {"activations": ["ThresholdedRelu"]}, "'thresholdedrelu' .*1 parameters.* 0 are given",
    ),
    "a second parameter that is left out": (
        "LSTM", {"activations": ["Sigmoid", "Affine", "Tanh"], "activation_alpha": [0.5]}, "2 parameters.* 1 are given",
    ),
}  # fmt: skip


def one_node(kind: str, attributes: dict) -> onnx.ModelProto:
    gates = 4 * GATES[kind]
    shapes = {"x": [5, 3, 2], "w": [1, gates, 2], "r": [1, gates, 4]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    node = helper.make_node(kind, ["x", "w", "r"], ["y"], name="layer", hidden_size=4, **attributes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)
    graph = helper.make_graph([node], "one", inputs, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_is_refused_by_name(name):
    kind, attributes, message = REFUSED[name]
    with pytest.raises(GradientError, match=message) as raised:
        build_gradient(one_node(kind, attributes), wrt=["w"])
    assert f"of '{kind}' node 'layer'" in str(raised.value)


# ---------------------------------------------------------------- language models


class LanguageModel(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCABULARY, 8), kind(8, 12, **options)
        self.decoder = nn.Linear(12 * (1 + self.layer.bidirectional), VOCABULARY)

    def forward(self, tokens):
        return self.decoder(self.layer(self.embedding(tokens))[0])


class Classifier(LanguageModel):
    """Of the last hidden and cell state."""

    def forward(self, tokens):
        _, (h, c) = self.layer(self.embedding(tokens))
        return self.decoder(torch.cat([h[-1], c[0]], -1))


class MeanClassifier(LanguageModel):
    """Of the mean over time, and of what a layer reads from the end."""

    def forward(self, tokens):
        y, _ = self.layer(self.embedding(tokens).flip(0))
        return self.decoder(y.flip(0).cumsum(0).mean(0))


class OperatorClassifier(MeanClassifier):
    """By torch's operator itself, for whose result a trace writes down the one length that it has seen."""

    def forward(self, tokens):
        x, initial = self.embedding(tokens), torch.zeros(1, tokens.shape[1], 12)
        weights = [*self.layer.parameters()]
        y, _ = torch.ops.aten.gru.input(x.transpose(0, 1), initial, weights, True, 1, 0.0, False, False, True)
        return self.decoder(y.cumsum(1).mean(1))


MODELS = {
    "gru-operator": (OperatorClassifier, nn.GRU, {}),
    "lstm-mean": (MeanClassifier, nn.LSTM, {}),
    "gru-mean": (MeanClassifier, nn.GRU, {}),
    "lstm": (LanguageModel, nn.LSTM, {}),
    "lstm-2": (LanguageModel, nn.LSTM, {"num_layers": 2}),
    "lstm-bidirectional": (LanguageModel, nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "lstm-no-bias": (LanguageModel, nn.LSTM, {"bias": False}),
    "lstm-states": (Classifier, nn.LSTM, {"bidirectional": True}),
    "rnn": (LanguageModel, nn.RNN, {"bidirectional": True}),
    "gru": (LanguageModel, nn.GRU, {"batch_first": True}),
    "gru-bidirectional": (LanguageModel, nn.GRU, {"num_layers": 2, "bidirectional": True}),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls, kind, options = MODELS[name]
    return cls(kind, **options)


# Layers, directions and order are those of the others here, and of `test_passes_recurrent.py`.
@pytest.mark.parametrize("name", usual(MODELS, "gru-operator", "lstm-bidirectional", "lstm-states", "rnn"))
def test_five_steps_are_those_of_pytorch_at_every_length_and_batch(name):
    module, twin = make(name), make(name)
    last = isinstance(module, (Classifier, MeanClassifier))
    dims = ["batch"] if last else ["length", "batch"]
    description = ModelDescription(
        [IODescription("tokens", ["length", "batch"], torch.int64),
         IODescription("labels", ["batch"] if last else ["tokens"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("scores", [*dims, VOCABULARY], torch.float32)],
    )  # fmt: skip
    trainer = ORTTrainer(
        module, models.flat_cross_entropy, description, "SGDOptimizer", None, models.LEARNING_RATE, "cpu"
    )
    optimizer = torch.optim.SGD(twin.parameters(), RATE)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        length, batch = [(7, 4), (5, 3)][step % 2]
        tokens = torch.randint(0, VOCABULARY, (length, batch), generator=generator)
        labels = torch.randint(0, VOCABULARY, (batch if last else length * batch,), generator=generator)
        loss = trainer.train_step(tokens, labels, torch.tensor([RATE]))[0]
        optimizer.zero_grad()
        expected = models.flat_cross_entropy(twin(tokens), labels)
        expected.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert len(trainer._engine._ways.known) == 1
    for name, want in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], want, rtol=1e-5, atol=1e-6)


class Stopped(nn.Module):
    """A wide layer whose input is what `stop` makes of a linear layer's output, which trains by other ways as well."""

    def __init__(self, kind: str, stop):
        super().__init__()
        self.linear, self.stop = nn.Linear(4, 4), stop
        self.layer = getattr(nn, kind)(4, 72, bidirectional=kind == "GRU")

    def forward(self, x):
        h = self.linear(x)
        return self.layer(self.stop(h.transpose(0, 1)))[0].mean((0, 2)) + h.sum((1, 2))


def doubled(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    x.register_hook(lambda gradient: 2 * gradient)
    return x


@pytest.mark.parametrize(("kind", "stop"), [("LSTM", torch.detach), ("GRU", torch.detach), ("RNN", doubled)])
def test_a_layer_trains_whose_input_has_no_gradient_or_a_hook(kind, stop):
    """The form that keeps its gates is written when the mark of that is gone."""
    batch = lambda step: [torch.randn(10 + step, 3, 4, generator=torch.Generator().manual_seed(step))]  # noqa: E731
    assert_trains_as_in_pytorch(lambda: Stopped(kind, stop), batch, evaluates=True)
