"""What users get slightly wrong that shows at the first step, where description, module and loss meet."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from bad_input import LABEL, LOSS, OUTPUT, WEIGHTS, cases, describe, make, net, raises, x, y
from torch import nn

from orttrainer import IODescription
from orttrainer.errors import (
    ExportError,
    InvalidArgumentError,
    ModelError,
    OptimizerError,
    SchemaError,
    StateError,
    UnsupportedModelError,
)
from orttrainer.export.checks.failures import failure

# -- the first step: description, module and loss do not fit --------------------------------------


class Returns(nn.Module):
    """A linear layer, and any function of its result, the input and the label."""

    def __init__(self, outputs):
        super().__init__()
        self.linear, self.outputs = nn.Linear(4, 2), outputs

    def forward(self, x, label):
        return self.outputs(self.linear(x), x, label)


class Eigenvalues(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        return super().forward(x) * torch.linalg.eigvals(self.weight[:, :2]).abs()


class ComputesInPython(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * math.gamma(x.abs().mean().item())


FIRST_STEP = {
    "a loss for each element": (dict(loss_fn=lambda p, t: (p - t) ** 2), SchemaError, "the first output, 'loss'...must be a 0-d float tensor; it has shape [8, 2]"),
    "an integer loss": (
        dict(model=Returns(lambda p, x, t: (p.argmax(), p)), loss_fn=None), SchemaError, "must be a 0-d float tensor; it has shape [] and dtype torch.int64",
    ),
    "a loss that is a number": (dict(loss_fn=lambda p, t: 3.0), SchemaError, "output 'loss' is a float, not a tensor"),
    "a loss among others": (
        dict(loss_fn=lambda p, t: {"loss": (p - t).square().mean(), "mae": (p - t).abs().mean()}), SchemaError, "output 'loss' is a dict, not a tensor. Let the loss function return the loss alone",
    ),
    "a loss behind the prediction": (
        dict(model=Returns(lambda p, x, t: (p, p.sum())), loss_fn=None), SchemaError, "it has shape [8, 2]...Output 2 of the model is one: let it come first",
    ),
    "a loss of one argument": (dict(loss_fn=lambda p: p.sum()), InvalidArgumentError, "must take exactly 2 arguments (prediction, label)...takes (p)"),
    "a loss of three arguments": (dict(loss_fn=lambda p, t, w: p), InvalidArgumentError, "must take exactly 2 arguments (prediction, label)...takes (p, t, w)"),
    "no loss anywhere": (
        dict(model=Returns(lambda p, x, t: p), loss_fn=None, desc=describe(outputs=[LOSS])), SchemaError, "must be a 0-d float tensor; it has shape [8, 2]...pass a loss_fn",
    ),
    "a module that takes no label": (dict(loss_fn=None), SchemaError, "Sequential.forward takes 1 inputs (input), but 2 are described (x, label)"),
    "an output that does not exist": (
        dict(desc=describe(outputs=[LOSS, OUTPUT, IODescription("hidden", [])])), SchemaError, "3 outputs are described (loss, output, hidden), but model and loss give 2",
    ),
    "an output that is text": (dict(model=Returns(lambda p, x, t: (p.sum(), "fine")), loss_fn=None), SchemaError, "output 'output' is a str, not a tensor"),
    "an output named as a weight": (dict(desc=describe(outputs=[LOSS, IODescription("2.bias", [])])), InvalidArgumentError, "'2.bias' names both a described tensor and a parameter"),
    "the rate named as a weight": (dict(rate=IODescription("2.bias", [1])), ModelError, "the name '2.bias' is needed...or give the learning rate another name"),
    "an input named as optimizer state": (
        dict(name="LambOptimizer", desc=describe([IODescription("Step", ["batch", 4]), LABEL])), ModelError, "the name 'Step' is needed for the training graph",
    ),
    "an unknown frozen weight": (dict(frozen_weights=["fc.weight"]), ModelError, "frozen_weights=['fc.weight'] are not weights of the model; it has ['0.bias', '0.weight'"),
    "all weights frozen": (dict(frozen_weights=WEIGHTS), ModelError, "nothing to train: no parameter reaches the loss. Check requires_grad, frozen_weights"),
    "no weights at all": (dict(model=nn.Sequential(nn.Tanh(), nn.Flatten()), loss_fn=lambda p, t: p.sum()), ModelError, "nothing to train"),
    "all weights detached": (
        dict(loss_fn=lambda p, t: (p.detach() - t).square().mean()), ModelError, "nothing to train: no parameter reaches the loss. Between them and 'loss' no gradient passes a detach() or torch.no_grad()",
    ),
    "all weights compared": (dict(loss_fn=lambda p, t: ((p > 0).float() - t).square().mean()), ModelError, "Between them and 'loss' no gradient passes the Greater that makes '"),
    "an unknown attribute": (dict(attributes=lambda n: {"lr": 0.1}), OptimizerError, "AdamOptimizer has no attribute 'lr' (given for parameter '0.weight'); it has: 'alpha'"),
    "an attribute as text": (dict(attributes=lambda n: {"alpha": "0.9"}), OptimizerError, "'alpha' of parameter '0.weight' is '0.9'; it must be a float, not a str"),
    "an attribute out of range": (dict(attributes=lambda n: {"beta": 1.5}), OptimizerError, "'beta' of parameter '0.weight' is 1.5; it must be between 0 and 1"),
    "attributes of None": (dict(attributes=lambda n: None), OptimizerError, "map_optimizer_attributes('0.weight') returned None; it must return a dict"),
    "attributes that raise": (dict(attributes=lambda n: {}[n]), KeyError, "0.weight"),
    "an opset of the future": (dict(_opset_version=99), InvalidArgumentError, "opset 99 is too new; use 18 to 21"),
    "an opset as text": (dict(_opset_version="17"), InvalidArgumentError, "the opset must be an int from 18 to 21, got '17'"),
    "a value in Python": (dict(model=ComputesInPython(nn.Linear(4, 2))), UnsupportedModelError, "forward makes a number of a tensor's value...torch.where"),
    "an operator that ONNX has no form of": (
        dict(model=nn.Sequential(nn.Linear(4, 4), Eigenvalues())),
        UnsupportedModelError, "Sequential could not be exported to ONNX as it trains: forward calls aten.linalg_eig in '1', which...Compute it with other functions",
    ),
    "wrong declarations, strictly": (
        dict(desc=describe([IODescription("x", ["batch", 5], torch.int64), IODescription("label", ["batch"])]), strict=True), SchemaError,
        "input 'x': expected dtype torch.int64, got torch.float32...input 'x', axis 1: expected size 5, got 4...input 'label': expected 1 axes",
    ),
    "a module for other features": (dict(model=nn.Linear(5, 2)), RuntimeError, "raised by the module or its loss, in PyTorch, on a batch of torch.float32 [8, 4], torch.float32 [8, 2]"),
}  # fmt: skip


@cases(FIRST_STEP)
def test_a_trainer_that_cannot_be_compiled_says_why_each_time_and_leaves_the_module_alone(case):
    options, error, text = case
    trainer = make(**options)
    before = {name: tensor.clone() for name, tensor in trainer._engine.model.state_dict().items()}
    for _ in range(2):
        with raises(error, text):
            trainer.train_step(x, y, 0.1)
    assert (trainer.training_graph, trainer.current_step, trainer.global_step_) == (None, 0, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._engine.model.state_dict().items())


FIRST_BATCHES = {
    "NumPy": ((x.numpy(), y), "expected a torch.Tensor, got ndarray"),
    "empty": ((x[:0], y[:0]), "expected at least 1 element, got 0"),
    "other features": ((x[:, :3], y), "mat1 and mat2 shapes cannot be multiplied"),
    "no label": ((x, None), "input 'label': expected a torch.Tensor, got NoneType"),
}


@cases(FIRST_BATCHES)
@pytest.mark.filterwarnings("ignore::orttrainer.errors.DescriptionMismatchWarning")
def test_a_wrong_first_batch_does_not_settle_anything(case):
    trainer = make()
    with pytest.raises((SchemaError, RuntimeError), match=case[1]):
        trainer.train_step(*case[0], 0.1)
    assert trainer.current_step == 0
    loss, _ = trainer.train_step(x, y, 0.1)
    torch.testing.assert_close(loss, nn.functional.mse_loss(net()(x), y).detach())


def test_a_state_that_does_not_fit_is_refused_at_the_first_step_and_not_forgotten():
    trainer = make()
    trainer.load_state_dict({"Moment_1_0.bias": torch.ones(99)})
    for _ in range(2):  # the second call must not train with moments that were never loaded
        with raises(StateError, "'Moment_1_0.bias' has shape [99], expected [3]"):
            trainer.train_step(x, y, 0.1)
    with raises(StateError, "'0.bias' has shape [99], expected [3]"):  # of the module: known before there is a graph
        trainer.load_state_dict({"0.bias": torch.ones(99)})
    trainer.load_state_dict({"Moment_1_0.bias": torch.ones(3)})
    trainer.load_state_dict({"0.bias": torch.ones(3)})
    trainer.eval_step(x, y)
    assert all(torch.equal(trainer.state_dict()[name], torch.ones(3)) for name in ("Moment_1_0.bias", "0.bias"))


def test_what_the_system_refuses_the_exporters_is_not_said_of_forward():
    gone = FileNotFoundError(2, "No such file or directory")
    error = failure(SimpleNamespace(module=net()), [], {"dynamo": gone, "torchscript": gone})
    assert re.search(r"No such file or directory\nThe system refused this: see that the working folder", str(error))
    assert error.__cause__ is gone


@pytest.mark.parametrize("other", ["of other sizes", "FileNotFoundError"])
def test_why_no_exporter_took_a_module_is_one_of_the_errors_that_there_are(other):
    """A class of its own, by which exports are tried in turn, is nobody's to catch."""
    ours = type("_OfOtherSizes", (ExportError,), {})("the graph is one for x.shape[0] >= 2")
    second = ours if other == "of other sizes" else FileNotFoundError(2, other)
    error = failure(SimpleNamespace(module=net()), [], {"dynamo": ours, "torchscript": second})
    assert type(error) is ExportError
    assert "the graph is one for x.shape[0] >= 2" in str(error)
