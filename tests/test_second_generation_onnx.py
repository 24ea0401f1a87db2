"""ONNX models in place of torch modules, the files that a trainer writes, and arguments that are refused."""

from __future__ import annotations

import warnings

import onnx
import pytest
import second_generation as second
import small
import torch
from marks import usual
from second_generation import CONFIGS, batch, make, net, train
from torch import nn

from orttrainer.errors import (
    DescriptionMismatchWarning,
    InvalidArgumentError,
    NonFiniteLossError,
    RuntimeNotFoundError,
    SchemaError,
    SettingError,
)
from orttrainer.training import ORTTrainer, optim

# -- an ONNX model --------------------------------------------------------------------------


def test_a_saved_model_trains_on_in_a_trainer_without_torch_module(tmp_path):
    source = make()
    train(source, 3)
    path = str(tmp_path / "forward.onnx")
    source.save_as_onnx(path)
    model = onnx.load(path)
    trainer = make(model, loss_fn=None)
    assert trainer.state_dict()["model"]["full_precision"].keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert train(trainer, 3, 3) == pytest.approx(train(source, 3, 3), rel=1e-6)


def test_the_module_is_where_legacy_had_it_and_none_of_an_onnx_model():
    module = net()
    source = make(module)
    source.eval_step(*batch())
    assert source._torch_model is module
    assert make(source._onnx_model, loss_fn=None)._torch_model is None


def test_an_onnx_model_may_have_its_loss_anywhere_and_needs_its_names(tmp_path):
    source = make()
    source.eval_step(*batch())
    path = str(tmp_path / "forward.onnx")
    source.save_as_onnx(path)
    desc = {**second.description(), "outputs": [("output", ["batch", 3]), ("loss", [], True)]}
    output, loss = make(onnx.load(path), loss_fn=None, desc=desc).train_step(*batch())
    expected_loss, expected = source.train_step(*batch())
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, expected_loss)
    desc = {**second.description(), "outputs": [("cost", [], True), ("output", ["batch", 3])]}
    with pytest.raises(AssertionError, match="no output 'cost'"):
        make(onnx.load(path), loss_fn=None, desc=desc)


def forward_of(source) -> onnx.ModelProto:
    source.eval_step(*batch())
    return source._onnx_model


@pytest.mark.parametrize("declared", [4, 6])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_batch_of_another_size_than_described_is_told_and_then_refused(generation, declared):
    model = forward_of(make())
    if generation == 1:
        trainer, rate = small.make(model, loss_fn=None, desc=small.description(declared)), [small.LR]
    else:
        trainer, rate = make(model, loss_fn=None, desc=second.description(declared)), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train_step(*batch(0, rows=6), *rate)
    told = [str(w.message) for w in caught if isinstance(w.message, DescriptionMismatchWarning)]
    assert len(told) == (declared != 6) and all("'x', axis 0: expected size 4, got 6" in text for text in told)
    before = trainer.state_dict()
    with pytest.raises(SchemaError, match=r"input 'x', axis 0: expected size 6, got 3. Declare the axis with a name"):
        trainer.train_step(*batch(1, rows=3), *rate)
    second.assert_equal_trees(trainer.state_dict(), before)
    trainer.train_step(*batch(2, rows=6), *rate)


def test_a_size_of_the_model_s_file_is_said_to_be_the_file_s():
    model = forward_of(make(desc=second.description(6)))
    with pytest.warns(DescriptionMismatchWarning, match="declared 'batch', the model has 6"):
        trainer = make(model, loss_fn=None)
    train(trainer, 1)
    with pytest.raises(SchemaError, match=r"expected size 6, got 3. The model's file has this size: export the model"):
        trainer.train_step(*batch(1, rows=3))


def test_an_onnx_model_without_a_loss_takes_one_in_torch(tmp_path):
    source = make()
    source.eval_step(*batch())
    path = str(tmp_path / "inference.onnx")
    source.export_inference(path)
    assert [value.name for value in onnx.load(path).graph.output] == ["output"]
    trainer = make(onnx.load(path))
    assert train(trainer, 4) == pytest.approx(train(source, 4), rel=1e-5)


def test_a_loss_that_is_not_finite_is_an_error_on_request():
    trainer = make(orttrainer={"nonfinite_loss": "error"})
    train(trainer, 1)
    x, y = batch()
    before = trainer.state_dict()
    with pytest.raises(NonFiniteLossError):
        trainer.train_step(x * float("nan"), y)
    second.assert_equal_trees(trainer.state_dict(), before)
    assert trainer.last_grad_norm > 0


def test_saving_before_the_first_step_or_to_no_folder_only_warns(tmp_path):
    trainer = make()
    with pytest.warns(UserWarning, match="no graph before its first step"):
        trainer.save_as_onnx(str(tmp_path / "a.onnx"))
    trainer.train_step(*batch())
    for path in (str(tmp_path / "none" / "a.onnx"), str(tmp_path) + "/"):
        with pytest.warns(UserWarning, match="not a file in an existing folder"):
            trainer.save_as_onnx(path)
    with pytest.raises(AssertionError, match="'path' must be a valid path string"):
        trainer.save_as_onnx(tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


def test_graphs_are_written_at_the_stages_that_have_a_path(tmp_path):
    names = ("model_after_graph_transforms_path", "model_with_gradient_graph_path", "model_with_training_graph_path",
             "model_with_training_graph_after_optimization_path")  # fmt: skip
    paths = {name: str(tmp_path / f"{index}.onnx") for index, name in enumerate(names)}
    train(make(config=optim.AdamConfig(), debug={"graph_save_paths": paths}), 1)
    forward, gradient, training = (onnx.load(paths[name]) for name in names[:3])
    for model in (forward, gradient, training):
        onnx.checker.check_model(model, full_check=True)
    assert not any("grad" in value.name for value in forward.graph.output)
    assert {value.name for value in gradient.graph.output} >= {"loss", "0.weight_grad", "3.bias_grad"}
    assert "Moment_1_0.weight" in {value.name for value in training.graph.input}
    assert not any("Moment" in value.name for value in gradient.graph.input)
    assert (tmp_path / "3.onnx").is_file()


def test_no_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(make(), 1)
    assert list(tmp_path.iterdir()) == []


# -- arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": None}, "'model' is required"),
        ({"model_desc": []}, "'model_desc' must be a 'dict'"),
        ({"optim_config": None}, "'optim_config' is required"),
        ({"loss_fn": 3}, "'loss_fn' must be either 'None' or a callable with two parameters"),
        ({"loss_fn": lambda x: x}, "callable with two parameters"),
        ({"loss_fn": nn.CrossEntropyLoss}, "callable with two parameters"),
        ({"options": {"device": {"id": "cpu"}}}, "'options' must be either 'None' or 'ORTTrainerOptions'"),
        (
            {"model": onnx.ModelProto(graph=onnx.GraphProto(output=[onnx.ValueInfoProto(name="loss")]))},
            "'loss_fn' must not be specified when 'model' is an ONNX model with its loss inside, its output 'loss'",
        ),
    ],
)
def test_a_wrong_argument_is_an_assertion_error(change, text):
    arguments = {
        "model": net(), "model_desc": second.description(), "optim_config": optim.SGDConfig(),
        "loss_fn": second.LOSS, "options": second.options(),
    }  # fmt: skip
    with pytest.raises(AssertionError, match=text) as caught:
        ORTTrainer(**{**arguments, **change})
    assert isinstance(caught.value, SettingError)


def test_a_model_of_another_kind_is_a_value_error():
    with pytest.raises(ValueError, match="'model' must be either") as caught:
        make("model.onnx")
    assert isinstance(caught.value, InvalidArgumentError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_device_without_a_gpu_names_the_option_to_change():
    with pytest.raises(
        RuntimeNotFoundError, match=r"device of this trainer is the option \{'device': \{'id': 'cuda'\}\}"
    ):
        ORTTrainer(net(), second.description(), optim.SGDConfig(), second.LOSS)


def test_provider_and_session_options_reach_the_sessions():
    import onnxruntime

    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = 1
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    trainer = make(session_options=session_options, provider_options={"CPUExecutionProvider": {"use_arena": "0"}})
    train(trainer, 1)
    used = trainer._engine._runner.sessions[0].get_session_options()
    assert used.intra_op_num_threads == 1
    assert used.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert trainer._engine.settings.providers == [("CPUExecutionProvider", {"use_arena": "0"})]
    with pytest.raises(RuntimeNotFoundError, match="NoExecutionProvider"):
        make(provider_options={"NoExecutionProvider": {}})


@pytest.mark.parametrize("name", usual(CONFIGS, "Lamb"))
def test_no_step_warns(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        train(make(config=CONFIGS[name]()), 2)
