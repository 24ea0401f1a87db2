"""`export_inference`: the file that others run, and that it computes what `eval_step` does."""

from __future__ import annotations

import models
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from marks import slow
from onnx_models import model
from small import RATE, batch, forward_model, make, net
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.errors import ExportMismatchError, SchemaError, StateError


def run(path, *inputs) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), inputs)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


def test_the_file_has_neither_loss_nor_label_nor_dropout_and_computes_what_the_module_does_in_eval_mode(tmp_path):
    trainer = make(net(dropout=0.5), "AdamOptimizer")
    for step in range(3):
        trainer.train_step(*batch(step), 0.1)
    path = tmp_path / "model.onnx"
    trainer.export_inference(path)
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == ["x"]
    assert [value.name for value in graph.output] == ["output"]
    assert not {"Dropout", "SoftmaxCrossEntropyLoss"} & {node.op_type for node in graph.node}
    onnx.checker.check_model(onnx.load(path), full_check=True)
    x, _ = batch(7, rows=9)
    module = trainer._engine.model.eval()
    torch.testing.assert_close(run(path, x)[0], module(x).detach())


class Decides(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        assert y.isfinite().all()
        return y * (2.0 if x.sum() > 0 else 3.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_file_of_a_model_that_decides_has_the_way_of_its_batch_and_a_warning_says_so(sign, tmp_path, caplog):
    torch.manual_seed(0)
    module, x, label = Decides(3, 2), torch.rand(4, 3), torch.zeros(4, 2)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.step(x, label)
    trainer.export_inference(tmp_path / "model.onnx", batch=[sign * x, label])
    torch.testing.assert_close(run(tmp_path / "model.onnx", sign * x)[0], module(sign * x).detach())
    assert "decides by values 1 times, first at" in caplog.text and f"{__file__}:" in caplog.text


class Twice(nn.Module):
    """One batch normalization, called twice, between convolutions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.between = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.head(torch.tanh(self.norm(self.between(x))).mean((2, 3)))


def test_batch_normalization_uses_its_running_statistics_also_where_it_is_called_twice(tmp_path):
    desc = ModelDescription(
        [IODescription("x", ["batch", 3, 5, 5]), IODescription("label", ["batch"])],
        [IODescription("loss", []), IODescription("output", ["batch", 3])],
    )
    trainer = make(Twice(), desc=desc)
    torch.manual_seed(1)
    for _ in range(3):
        trainer.train_step(torch.randn(6, 3, 5, 5) * 2 + 1, torch.randint(0, 3, (6,)), 0.1)
    trainer.export_inference(tmp_path / "model.onnx")
    x = torch.randn(4, 3, 5, 5)
    module = trainer._engine.model.eval()
    torch.testing.assert_close(run(tmp_path / "model.onnx", x)[0], module(x).detach(), rtol=1e-4, atol=1e-5)
    normalizations = [n for n in onnx.load(tmp_path / "model.onnx").graph.node if n.op_type == "BatchNormalization"]
    assert all(len(node.output) == 1 for node in normalizations)


class Projected(nn.Module):
    """An LSTM that is a Scan in the graph: what its body hands on and what it puts into a row is one value."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, proj_size=2, batch_first=True), nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(-1).expand(-1, -1, 4))[0].mean(1))


class Turned(nn.Linear):
    """A product that ONNX Runtime's optimizations make with the matrix itself: who opens the file leaves none of them out."""

    def forward(self, x):
        return super().forward(x * (x[:3].T @ x[3]))


def test_a_transposed_matrix_times_a_vector_is_one_in_the_file(tmp_path):
    torch.manual_seed(0)
    module, x = Turned(3, 3), torch.randn(4, 3)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.step(x, torch.zeros(4, 3))
    trainer.export_inference(tmp_path / "model.onnx")
    torch.testing.assert_close(run(tmp_path / "model.onnx", x)[0], module(x).detach())


class Ranked(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 5)

    def forward(self, x):
        scores = self.scores(x)
        return scores.gather(1, scores.topk(2).indices)


def test_places_that_are_never_negative_are_not_asked_in_the_file(tmp_path):
    module, x = Ranked(), torch.randn(3, 4)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.eval_step(x, torch.zeros(3, 2))
    trainer.export_inference(tmp_path / "model.onnx")
    assert not {"Less", "Where"} & {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    torch.testing.assert_close(run(tmp_path / "model.onnx", x)[0], module(x).detach())


def test_a_loop_hands_on_what_it_did(tmp_path):
    trainer = make(Projected())
    trainer.train_step(*batch(), 0.1)
    trainer.export_inference(tmp_path / "model.onnx")
    module = trainer._engine.model.eval()
    torch.testing.assert_close(run(tmp_path / "model.onnx", batch(7)[0])[0], module(batch(7)[0]).detach())


@pytest.mark.parametrize("name", [slow("transformer"), "tied", "bert"])
def test_published_models_are_written_as_they_evaluate(name, tmp_path):
    setup, module = models.make(name)
    trainer = make(module, "AdamOptimizer", loss_fn=setup.loss_fn, desc=setup.description())
    trainer.train_step(*setup.batch(0), 0.01)
    trainer.export_inference(tmp_path / "model.onnx")
    outputs = [d.name_ for d in trainer.model_desc_.outputs_[1:]] or [trainer.model_desc_.outputs_[0].name_]
    given = {d.name_: t for d, t in zip(trainer.model_desc_.inputs_, setup.batch(1))}
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(outputs, {value.name: given[value.name].numpy() for value in session.get_inputs()})
    evaluated = dict(zip([d.name_ for d in trainer.model_desc_.outputs_], trainer.eval_step(*setup.batch(1))))
    for name, array in zip(outputs, found):
        torch.testing.assert_close(torch.from_numpy(array), evaluated[name], rtol=1e-4, atol=1e-5)


def test_outputs_can_be_chosen_the_loss_too(tmp_path):
    trainer = make()
    expected = trainer.eval_step(*batch())
    trainer.export_inference(tmp_path / "model.onnx", outputs=["output", "loss"])
    torch.testing.assert_close(run(tmp_path / "model.onnx", *batch()), [expected[1], expected[0]])


def test_an_onnx_model_is_exported_on_a_batch_that_is_given(tmp_path):
    trainer = make(forward_model(tmp_path, net(dropout=0.4)), loss_fn=None)
    with pytest.raises(StateError, match=r"give it a batch=\.\.\., or run a step"):
        trainer.export_inference(tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    trainer.export_inference(tmp_path / "model.onnx", batch=batch())
    torch.testing.assert_close(run(tmp_path / "model.onnx", batch()[0])[0], trainer.eval_step(*batch())[1])


def halved(layer, given, made):
    return made / 2


@pytest.mark.parametrize("change", [lambda m: setattr(m[1], "eps", 0.5), lambda m: m[2].register_forward_hook(halved)])
def test_what_changed_since_the_last_step_is_in_the_file(change, tmp_path):
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    trainer = make(module)
    trainer.train_step(*batch(), RATE)
    change(module)
    trainer.export_inference(tmp_path / "model.onnx")
    x, _ = batch(7)
    torch.testing.assert_close(run(tmp_path / "model.onnx", x)[0], module(x).detach())


def test_before_the_first_step_there_is_nothing_to_export(tmp_path):
    with pytest.raises(StateError, match="run one eval_step"):
        make().export_inference(tmp_path / "model.onnx")


class Bounded(nn.Linear):
    """Takes no large numbers."""

    def forward(self, x):
        assert x.abs().max() < 50, "too large"
        return super().forward(x)


@pytest.mark.parametrize("call", ["train_step", "eval_step", "export_inference"])
def test_the_batch_before_one_that_forward_refuses_is_compared_on(call, tmp_path):
    module = Bounded(4, 3)
    trainer, (x, label) = make(module), batch()
    trainer.train_step(x, label, RATE)
    large = {
        "train_step": lambda: trainer.train_step(1000 * x, label, RATE),
        "eval_step": lambda: trainer.eval_step(1000 * x, label),
        "export_inference": lambda: trainer.export_inference(tmp_path / "large.onnx", batch=[1000 * x, label]),
    }
    with pytest.raises(AssertionError, match="too large"):
        large[call]()
    trainer.export_inference(tmp_path / "model.onnx")
    torch.testing.assert_close(run(tmp_path / "model.onnx", x)[0], module(x).detach())


def test_an_unknown_output_is_an_error(tmp_path):
    trainer = make()
    trainer.eval_step(*batch())
    with pytest.raises(SchemaError, match=r"fetches=\['logits'\] are not described outputs"):
        trainer.export_inference(tmp_path / "model.onnx", outputs=["logits"])


def test_a_graph_that_differs_from_eval_step_is_not_written(tmp_path, monkeypatch):
    trainer = make()
    trainer.eval_step(*batch())
    right = trainer._engine.eval_step
    monkeypatch.setattr(trainer._engine, "eval_step", lambda *args: [t + 1 for t in right(*args)])
    with pytest.raises(ExportMismatchError, match="output 'output' of the inference graph differs"):
        trainer.export_inference(tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


SEVERAL = {
    "one value twice": ("h = MatMul (x, W) output = Tanh (h) again = Identity (output)", ["output", "again"]),
    "an input": ("output = MatMul (x, W) again = Identity (x)", ["again", "output"]),
    "running statistics": (
        "h = MatMul (x, W) output, mean, var = BatchNormalization <training_mode = 1> (h, scale, bias, m, v)",
        ["var", "output", "mean"],
    ),
}


@pytest.mark.parametrize("body, outputs", SEVERAL.values(), ids=SEVERAL)
def test_several_outputs_of_an_onnx_model_keep_their_names(body, outputs, tmp_path):
    proto = model(
        f"{body} r = Neg (output)", "3", 18, W=np.eye(3), scale=[1, 2, 3], bias=[3, 2, 1], m=[0] * 3, v=[1] * 3
    )
    proto.graph.output.extend(
        onnx.helper.make_value_info(name, onnx.TypeProto(tensor_type={"elem_type": 1})) for name in outputs
    )
    x = IODescription("x", ["rows", 3])
    desc = ModelDescription([x], [IODescription(name, []) for name in ["loss", *outputs]])
    trainer = make(proto, loss_fn=None, desc=desc)
    trainer.train_step(torch.randn(5, 3), 0.1)
    trainer.export_inference(tmp_path / "model.onnx")
    assert [value.name for value in onnx.load(tmp_path / "model.onnx").graph.output] == outputs
    x = torch.randn(4, 3)
    torch.testing.assert_close(run(tmp_path / "model.onnx", x), trainer.eval_step(x)[1:])


class OfBrainFloats(nn.Module):
    """Takes bfloat16 and gives it, with weights in float32; there is no such array of NumPy's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.float()).bfloat16()


def brain_floats(output, label):
    return nn.functional.mse_loss(output.float(), label.float())


def test_inputs_and_outputs_in_bfloat16_are_checked_as_others_are(tmp_path):
    module, twin = OfBrainFloats(), OfBrainFloats()
    x, label = torch.randn(5, 4).bfloat16(), torch.randn(5, 3).bfloat16()
    inputs = [IODescription("x", ["rows", 4]), IODescription("label", ["rows", 3])]
    desc = ModelDescription(inputs, [IODescription("loss", []), IODescription("output", ["rows", 3])])
    for trained in (module, None):
        trainer = make(trained or onnx.load(tmp_path / "model.onnx"), loss_fn=brain_floats, desc=desc)
        loss = brain_floats(twin(x), label)
        torch.testing.assert_close(trainer.train_step(x, label, RATE)[0], loss.detach())
        for parameter, gradient in zip(twin.parameters(), torch.autograd.grad(loss, list(twin.parameters()))):
            parameter.data.sub_(RATE * gradient)
        trainer.export_inference(tmp_path / "model.onnx")
    state = trainer.state_dict()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach())
