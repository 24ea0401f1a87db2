"""What `save_as_onnx` wrote trains on as the module that it came from: the file itself says what is trained and what forward writes."""

from __future__ import annotations

import copy
import json

import numpy as np
import onnx
import pytest
import second_generation
import torch
from onnx_models import model
from small import LR, batch, description, make, train_with_torch
from torch import nn

from orttrainer import IODescription, ModelDescription, build_gradient
from orttrainer.errors import ModelError
from orttrainer.testing import evaluate

RATE = 0.1
ROLES = "orttrainer.forward"


class Moving(nn.Module):
    """Forward writes a float buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("ema", torch.zeros(3))

    def forward(self, x):
        h = self.layer(x)
        self.ema.mul_(0.5).add_(0.5 * h.detach().mean(0))
        return h - self.ema


class Fixed(nn.Module):
    """Forward reads float buffers and writes none; a parameter has no axes."""

    def __init__(self):
        super().__init__()
        self.layer, self.temperature = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("factor", torch.tensor(0.7))

    def forward(self, x):
        return self.layer(x) * self.temperature * self.factor + self.shift


class Detached(nn.Module):
    """Of a weight that is read with and without a gradient, and a target that has none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            target = self.layer(x).tanh()
        return self.layer(x) * target + x @ self.layer.weight.detach().T


class Reversed(torch.autograd.Function):
    """Whose gradient goes the other way."""

    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, dy):
        return -dy


class Against(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return Reversed.apply(self.layer(x))


def normalized(**options):
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, **options), nn.Linear(5, 3))


MODULES = {
    "a buffer that forward writes": Moving,
    "buffers that stay, and a parameter without axes": Fixed,
    "what has no gradient": Detached,
    "batch normalization": normalized,
    "batch normalization of the mean of all batches": lambda: normalized(momentum=None),
    "batch normalization without statistics": lambda: normalized(track_running_stats=False),
}


def saved(trainer, path) -> onnx.ModelProto:
    trainer.save_as_onnx(str(path))
    return onnx.load(str(path))


def assert_goes_on(trainer, twin, steps=range(2, 6)) -> None:
    """As the twin does in PyTorch, to its whole state."""
    for step in steps:
        x, y = batch(step)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(copy.deepcopy(twin)(x), y)
        torch.testing.assert_close(trainer.train_step(x, y, LR)[0], expected)
        train_with_torch(twin, "SGD", RATE, [(x, y)])
    state, expected = trainer.state_dict(), twin.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor)


@pytest.mark.parametrize("name", MODULES)
def test_a_saved_model_trains_on_like_its_module(name, tmp_path, caplog):
    torch.manual_seed(3)
    module = MODULES[name]()
    trainer = make(module)
    for step in range(2):
        trainer.train_step(*batch(step), LR)
    again = make(saved(trainer, tmp_path / "first.onnx"), loss_fn=None)
    assert_goes_on(again, copy.deepcopy(module))
    for step in range(2, 6):
        trainer.train_step(*batch(step), LR)
    third = make(saved(again, tmp_path / "second.onnx"), loss_fn=None)  # a file of a file
    assert_goes_on(third, copy.deepcopy(module), range(6, 8))
    assert not caplog.text


def test_build_gradient_of_a_saved_model_stops_where_autograd_does(tmp_path):
    torch.manual_seed(3)
    module = Detached()
    trainer = make(module)
    trainer.eval_step(*batch())
    gradient = build_gradient(saved(trainer, tmp_path / "first.onnx"))
    x, label = batch(1)
    found = evaluate(gradient, {"x": x.numpy(), "label": label.numpy()})
    nn.functional.cross_entropy(module(x), label).backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(found[f"{name}_grad"], parameter.grad, rtol=1e-5, atol=1e-6)


def test_gradients_that_somebody_wrote_are_not_in_a_file_and_who_trains_it_is_told(tmp_path, caplog):
    torch.manual_seed(3)
    trainer = make(Against())
    trainer.eval_step(*batch())
    file = saved(trainer, tmp_path / "first.onnx")
    assert not caplog.text
    make(file, loss_fn=None)
    assert "in the module that the model was saved of somebody wrote them" in caplog.text


def test_a_tool_that_took_the_places_where_gradients_stop_away_is_told_of(tmp_path, caplog):
    torch.manual_seed(3)
    trainer = make(Detached())
    trainer.eval_step(*batch())
    file = saved(trainer, tmp_path / "first.onnx")
    for node in [node for node in file.graph.node if node.op_type == "Identity"]:
        for reader in file.graph.node:
            for index, name in enumerate(reader.input):
                if name == node.output[0]:
                    reader.input[index] = node.input[0]
        file.graph.node.remove(node)
    make(file, loss_fn=None)
    assert "which the model has no more: a tool has changed it, and gradients pass there now" in caplog.text


@pytest.mark.parametrize("kind", ["by the trainer", "by the module"])
def test_who_trains_a_file_says_which_of_its_parameters_are_frozen(kind, tmp_path):
    module = normalized()
    module[2].bias.requires_grad_(kind == "by the trainer")
    trainer = make(module, frozen_weights=["2.bias"])
    trainer.eval_step(*batch())
    file = saved(trainer, tmp_path / "first.onnx")
    module[2].bias.requires_grad_(False)
    assert_goes_on(make(file, loss_fn=None, frozen_weights=["2.bias"]), copy.deepcopy(module))
    module[2].bias.requires_grad_()
    assert_goes_on(make(file, loss_fn=None), copy.deepcopy(module))


def test_the_second_generation_writes_and_takes_the_file_alike(tmp_path):
    torch.manual_seed(3)
    module = Moving()
    trainer = second_generation.make(module)
    trainer.train_step(*batch(0))
    again = second_generation.make(saved(trainer, tmp_path / "first.onnx"), loss_fn=None)
    twin = copy.deepcopy(module)
    for step in range(2, 5):
        again.train_step(*batch(step))
        train_with_torch(twin, "SGD", RATE, [batch(step)])
    state = again.state_dict(pytorch_format=True)
    assert state.keys() == twin.state_dict().keys()
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(state[name], tensor)


def test_a_loss_in_torch_behind_a_saved_model_leaves_its_state_what_it_is(tmp_path):
    torch.manual_seed(3)
    module = Moving()
    trainer = make(nn.Sequential(module), loss_fn=lambda output, label: output.square().mean() + 0.0 * label.sum())
    trainer.eval_step(*batch())
    file = saved(trainer, tmp_path / "first.onnx")
    for kept in ("loss", "label"):  # the model alone
        values = file.graph.output if kept == "loss" else file.graph.input
        values.remove(next(value for value in values if value.name == kept))
    wanted, nodes = {"output", "0.ema_update"}, []
    for node in reversed(file.graph.node):
        if wanted & {*node.output}:
            nodes.insert(0, node)
            wanted |= {*node.input}
    del file.graph.node[:]
    file.graph.node.extend(nodes)
    assert_goes_on(make(file), nn.Sequential(copy.deepcopy(module)))


def test_a_file_that_lost_what_updates_a_buffer_says_so(tmp_path, caplog):
    torch.manual_seed(3)
    trainer = make(Moving())
    trainer.eval_step(*batch())
    file = saved(trainer, tmp_path / "first.onnx")
    del file.graph.output[2:]
    again = make(file, loss_fn=None)
    assert "'ema' was updated by the output 'ema_update', which the model has no more" in caplog.text
    before = again.state_dict()
    again.train_step(*batch(), LR)
    assert torch.equal(again.state_dict()["ema"], before["ema"])  # no weight for that


def test_initializers_that_a_file_says_nothing_of_are_as_in_one_from_elsewhere(tmp_path):
    proto = model("r = MatMul (x, W)", "3", 18, W=torch.eye(3).tolist())
    onnx.helper.set_model_props(
        proto,
        {ROLES: json.dumps({"parameters": [], "buffers": ["other"], "updates": {}, "stopped": [], "written": []})},
    )
    desc = ModelDescription([IODescription("x", ["rows", 3], torch.float32)], [IODescription("loss", [])])
    trainer = make(proto, loss_fn=None, desc=desc)
    x = torch.ones(2, 3)
    trainer.train_step(x, LR)
    # d mean((x W)^2) / dW = 2 x^T x W / 6
    torch.testing.assert_close(trainer.state_dict()["W"], torch.eye(3) - RATE * 2 * x.T @ x / 6)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"parameters": []}', '{"parameters": 1, "buffers": [], "updates": {}, "stopped": [], "written": []}'],
)
def test_what_a_file_says_has_to_be_readable(text, tmp_path):
    trainer = make(Moving())
    trainer.eval_step(*batch())
    file = saved(trainer, tmp_path / "first.onnx")
    onnx.helper.set_model_props(file, {ROLES: text})
    with pytest.raises(
        ModelError, match=r"metadata 'orttrainer\.forward' of the ONNX model is not as save_as_onnx writes it"
    ):
        make(file, loss_fn=None, desc=description())
