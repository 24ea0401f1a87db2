"""The compiled graph as a file of its own, and its in-place updates."""

from __future__ import annotations

import copy
import functools
import json
import pickle

import models
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from marks import slow
from test_parity import OPTIMIZERS, each, make_trainer, train

import orttrainer
from orttrainer import set_seed
from orttrainer.errors import InvalidArgumentError, UnsupportedFeatureError
from orttrainer.graph.fence import unordered_readers
from orttrainer.run import Runner
from orttrainer.training_graph import TrainingGraph


def compiled(name: str, optimizer: str):
    """A trainer that has compiled and not yet trained."""
    setup, module, trainer = make_trainer(name, optimizer)
    trainer.eval_step(*setup.batch(0))
    return setup, module, trainer


def train_from_file(path: str, setup: models.Setup, rate: float, steps: int) -> list[float]:
    """Train with nothing but ONNX Runtime and what the file says about itself."""
    proto = onnx.load(path)
    bindings = {pair.key: pair.value for pair in proto.training_info[0].update_binding}
    signature = json.loads({p.key: p.value for p in proto.metadata_props}["orttrainer.signature"])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = [signature["outputs"][0], *bindings.values()]
    state, losses = {}, []
    for index in range(steps):
        feeds = {name: t.numpy() for name, t in zip(signature["inputs"], setup.batch(index))}
        feeds[signature["learning_rate"]] = np.array([rate], np.float32)
        if signature["training_mode"]:
            feeds[signature["training_mode"]] = np.array(True)
        loss, *new = session.run(wanted, feeds | state)
        state = dict(zip(bindings, new))
        losses.append(float(loss))
    return losses


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("name, optimizer", [
    slow(*case.values) if case.values[0] == "transformer" else case
    for case in each(["mlp", "cnn", "transformer"], ["sgd", "adam", "lamb"], usual=["mlp"])
])  # fmt: skip
def test_saved_file_passes_the_checker_and_trains_from_a_bare_session(name, optimizer, tmp_path):
    setup, _, trainer = compiled(name, optimizer)
    path = str(tmp_path / "training.onnx")
    trainer.training_graph.save(path)
    onnx.checker.check_model(path, full_check=True)
    losses = train_from_file(path, setup, OPTIMIZERS[optimizer][2], 5)
    assert losses == pytest.approx(train(setup, trainer, optimizer, range(5)), rel=1e-6)


def bare_session(path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("name, optimizer", [("mlp", "adam"), ("cnn", "sgd"), ("tied", "lamb")])
def test_graph_and_state_in_two_files_train_by_the_names_of_inputs_and_outputs_alone(name, optimizer, tmp_path):
    setup, _, trainer = compiled(name, optimizer)
    rate = OPTIMIZERS[optimizer][2]
    train(setup, trainer, optimizer, range(2))
    training, start = tmp_path / "training.onnx", tmp_path / "start.onnx"
    trainer.training_graph.save(training, initial_state=start)
    for path in (training, start):
        onnx.checker.check_model(str(path), full_check=True)
    proto = onnx.load(training)
    assert not {x.name for x in proto.graph.initializer} & {x.name for x in proto.graph.input}
    init, session = bare_session(start), bare_session(training)
    assert not init.get_inputs()
    state = dict(zip([x.name for x in init.get_outputs()], init.run(None, {})))
    outputs, inputs = [x.name for x in session.get_outputs()], {x.name for x in session.get_inputs()}
    losses = []
    for index in range(2, 6):
        given = dict(zip([d.name_ for d in setup.description().inputs_], map(torch.Tensor.numpy, setup.batch(index))))
        settings = {"Learning_Rate": np.array([rate], np.float32), "training_mode": np.array(True)}
        found = dict(zip(outputs, session.run(None, given | state | {n: settings[n] for n in settings if n in inputs})))
        losses.append(float(found["loss"]))
        state = {n: found.get(f"{n}_new", value) for n, value in state.items()}
    assert losses == pytest.approx(train(setup, trainer, optimizer, range(2, 6)), rel=1e-6)
    own = trainer.state_dict()
    for parameter in trainer.training_graph.signature.parameters:
        np.testing.assert_allclose(state[parameter], own[parameter].numpy(), rtol=1e-5, atol=1e-7)


def test_wide_weights_and_names_that_are_alike_are_in_the_second_file_as_declared(tmp_path):
    class Alike(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 64)
            self.wide = torch.nn.Linear(64, 4096)
            self.register_buffer("weight_value", torch.randn(64))

        def forward(self, x):
            y = self.wide(super().forward(x) + self.weight_value)
            return y.square().mean(), y

    torch.manual_seed(0)
    module = Alike()
    description = models.ModelDescription(
        [models.IODescription("x", ["batch", 4], torch.float32)],
        [models.IODescription("loss", []), models.IODescription("y", ["batch", 4096])],
    )
    trainer = models_trainer(module, description)
    trainer.train_step(torch.randn(6, 4), 0.1)
    assert any(entry.transposed for entry in trainer._engine.training_graph.signature.state)
    trainer.training_graph.save(tmp_path / "training.onnx", tmp_path / "start.onnx")
    init = bare_session(tmp_path / "start.onnx")
    found = dict(zip([x.name for x in init.get_outputs()], init.run(None, {})))
    assert found.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


def test_graph_and_state_cannot_be_one_file(tmp_path):
    graph = compiled("mlp", "sgd")[2].training_graph
    with pytest.raises(InvalidArgumentError, match=r"its initial_state are two files; both are to be .*one\.onnx"):
        graph.save(str(tmp_path / "one.onnx"), initial_state=tmp_path / "." / "one.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, optimizer", [
    slow(*case.values) if case.values[0] in ("transformer", "bert", "gpt2") or case.values[1] in ("sgd", "adam-after") else case
    for case in each(models.SETUPS, OPTIMIZERS, usual=["tied"])
])  # fmt: skip
def test_training_in_place_equals_double_buffering_bit_for_bit(name, optimizer, request):
    """And every reader of a state runs before it is overwritten, by the order of the graph: five steps may be lucky."""
    setup, _, trainer = compiled(name, optimizer)
    graph = trainer.training_graph.graph.graph
    values = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    entries = [entry for entry in trainer.training_graph.signature.state if entry.output and entry.in_place]
    assert {entry.role for entry in entries} >= {"parameter"}
    assert not unordered_readers(graph, {values[e.name]: values[e.output] for e in entries})
    apart = {key: tensor.clone() for key, tensor in trainer._engine._runner.state.items()}
    native = trainer._engine._native
    double = Runner(trainer._engine.training_graph, apart, torch.device("cpu"), in_place=False, native_kernels=native)
    rate = torch.tensor([OPTIMIZERS[optimizer][2]])
    names = trainer.training_graph.signature.inputs
    # A table's moments are added to before they decay only in place: (m + u / s) s rounds unlike m s + u.
    tolerance = (
        {"rtol": 2e-5, "atol": 2e-6} if request.config.getoption("--forms") == "every-size" else {"rtol": 0, "atol": 0}
    )
    same = functools.partial(torch.testing.assert_close, **tolerance)
    for step in range(5):
        batch = setup.batch(step)
        for mine, other in zip(trainer.train_step(*batch, rate), double.train_step(dict(zip(names, batch)), rate)[0]):
            same(mine, other)
    for key, tensor in trainer._engine._runner.state.items():
        same(tensor, double.state[key])


def test_a_graph_whose_loss_gradient_does_not_need_the_forward_pass_is_fenced():
    """d sum(x W + b) / dW does not depend on x W, so only the fence makes x W run before W changes."""
    module = torch.nn.Linear(64, 64)
    description = models.ModelDescription(
        [models.IODescription("x", ["batch", 64], torch.float32)],
        [models.IODescription("loss", []), models.IODescription("y", ["batch", 64])],
    )

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            y = self.inner(x)
            return y.sum(), y * 2

    trainer = models_trainer(Loss(), description)
    x = torch.randn(512, 64)
    for _ in range(20):
        expected = 2 * module(x).detach()
        _, y = trainer.train_step(x, 0.1)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


def models_trainer(module, description):
    from orttrainer import ORTTrainer

    return ORTTrainer(module, None, description, "SGDOptimizer", None, models.LEARNING_RATE, "cpu")


@pytest.mark.parametrize("name", ["tied", slow("transformer")])
def test_equal_models_give_equal_files(name):
    def file() -> bytes:
        set_seed(5)
        return compiled(name, "adam")[2].training_graph.model.SerializeToString(deterministic=True)

    assert file() == file()


def test_signature_names_every_input_and_output_by_role():
    _, _, trainer = compiled("cnn", "adam")
    graph: TrainingGraph = trainer.training_graph
    signature, proto = graph.signature, graph.model
    state = [entry.name for entry in signature.state]
    assert [v.name for v in proto.graph.input if v.name not in state] == [
        *signature.inputs, signature.learning_rate, signature.training_mode,
    ]  # fmt: skip
    written = [entry.output for entry in signature.state if entry.output]
    assert [v.name for v in proto.graph.output] == [*signature.outputs, signature.gradient_norm, *written]
    assert set(signature.parameters) == {name for name, _ in trainer._engine.model.named_parameters()}
    assert {"Moment_1_head.bias", "Moment_2_head.bias", "bn1.running_mean"} <= set(state)
    assert {entry.role for entry in signature.state} == {"parameter", "optimizer", "buffer"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_graph_is_copied_and_pickled_as_its_onnx_model(copied):
    graph = compiled("tied", "adam")[2].training_graph
    with pytest.raises(
        UnsupportedFeatureError, match=r"cannot be copied or pickled.* its \.model.* or .* \.save\(path\)"
    ):
        copied(graph)
    assert copy.deepcopy(graph.model) == pickle.loads(pickle.dumps(graph.model)) == graph.model


class Named(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.randn(4, 2)))

    def forward(self, x):
        return sum(x @ parameter for parameter in self.parameters())


NAMES = [
    "w",
    "w_new",
    "w_grad",
    "w_new_1",
    "Learning_Rate",
    "Learning_Rate_ordered",
    "training_mode",
    "global_gradient_norm",
]


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_names_of_the_graphs_own_give_way_to_those_of_parameters(accumulation_steps):
    torch.manual_seed(0)
    module = Named([*NAMES, "accumulated_batches", "Moment_1_w_new", "w_grad_accumulator_new"])
    reference = copy.deepcopy(module)
    trainer = orttrainer.trainer(
        module,
        torch.nn.MSELoss(),
        torch.optim.SGD(module.parameters(), 0.1, momentum=0.9),
        gradient_accumulation_steps=accumulation_steps,
    )
    optimizer = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        x, label = torch.randn(3, 4), torch.randn(3, 2)
        trainer.step(x, label)
        (torch.nn.functional.mse_loss(reference(x), label) / accumulation_steps).backward()
        if step % accumulation_steps == accumulation_steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name))
    onnx.checker.check_model(trainer.training_graph.model, full_check=True)
