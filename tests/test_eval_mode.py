"""Modules that do more in eval mode than to switch dropout off: `eval_step` and exported files do what they do there."""

from __future__ import annotations

import copy

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from exported import Model
from fidelity import RATE, Loss, described, evaluated, rebuilt, trained, vectors
from small import batch, make
from torch import nn
from torch.nn.utils import parametrizations

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings


class Shifted(nn.Linear):
    """Adds `by` while it trains."""

    by = 1.0

    def forward(self, x):
        return super().forward(x) + (self.by if self.training else 2 * self.by)


class DropPath(nn.Module):
    """Stochastic depth, as timm writes it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        if not self.training:
            return x + self.linear(x)
        return x + self.linear(x) * x.new_empty((x.shape[0], 1)).bernoulli_(0.5).div_(0.5)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x) if self.training else x)


class Merged(nn.Module):
    """An adapter that is part of the weight in eval mode, and stronger there."""

    def __init__(self):
        super().__init__()
        self.linear, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        if self.training:
            return self.linear(x) + self.up(self.down(x))
        return F.linear(x, self.linear.weight + 2 * self.up.weight @ self.down.weight, self.linear.bias)


class Target(nn.Module):
    """A second network that follows the first while it trains; at first they are equal."""

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(6, 6)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.online.parameters()):
                    slow.lerp_(fast, 0.1)
        return self.online(x) + self.target(x)


class Gated(nn.Module):
    """Centred while it trains, behind a gate that is closed at first, as of ReZero (Bachlechner et al. 2020)."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(6, 6), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y = self.linear(x)
        return x + self.gate * (y - y.mean(0) if self.training else y)


class WithoutGradients(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2.0 if torch.is_grad_enabled() else 3.0)


class Decides(nn.Linear):
    """Decides by values, in eval mode only."""

    def forward(self, x):
        y = super().forward(x)
        return y if self.training else -y if y.sum() > 0 else 2 * y


def normalized_by_the_batch():
    def call(m, x):
        return F.batch_norm(m.linear(x), m.mean, m.var, training=True)

    return Model(call, linear=nn.Linear(6, 6), mean=nn.Buffer(torch.zeros(6)), var=nn.Buffer(torch.ones(6)))


LAYERS = {
    "by self.training": lambda: Shifted(6, 6),
    "stochastic depth, dropout, and a norm": lambda: nn.Sequential(DropPath(), nn.Dropout(0.5), nn.BatchNorm1d(6)),
    "noise": lambda: Noisy(6, 6),
    "an adapter": Merged,
    "a target network": Target,
    "a closed gate": Gated,
    # Its vectors are up to date before the first step, and one step behind after each.
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "statistics of the batch in both modes": normalized_by_the_batch,
    "by whether there are gradients": lambda: WithoutGradients(6, 6),
    "decisions by values": lambda: Decides(6, 6),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_an_evaluation_does_what_the_module_does_in_eval_mode(layer, tmp_path, caplog):
    torch.manual_seed(0)
    module = Loss(LAYERS[layer]())
    trainer = trained(module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for step in (5, 6):
        expected = evaluated(module, *vectors(step))
        torch.testing.assert_close(tuple(trainer.eval_step(*vectors(step))), expected, rtol=1e-5, atol=1e-6)
    assert module.training
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    trainer.export_inference(tmp_path / "model.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"x0": vectors(6)[0].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), evaluated(module, *vectors(6))[1], rtol=1e-4, atol=1e-5)
    assert "do more in eval mode" not in caplog.text


@pytest.mark.parametrize("layer", ["an adapter", "spectral norm"])
def test_training_goes_on_as_if_nothing_had_been_evaluated(layer):
    """Also in the midst of accumulated batches; each evaluation has the weights of its moment."""
    modules = [rebuilt(LAYERS[layer]) for _ in range(2)]
    trainers = [
        make(module, loss_fn=None, desc=described(vectors(0)), gradient_accumulation_steps=2) for module in modules
    ]
    for step in range(6):
        for trainer in trainers:
            trainer.train_step(*vectors(step), RATE)
        expected = evaluated(modules[1], *vectors(9))
        torch.testing.assert_close(tuple(trainers[1].eval_step(*vectors(9))), expected, rtol=1e-5, atol=1e-6)
    for name, value in modules[0].state_dict().items():
        assert torch.equal(modules[1].state_dict()[name], value), name


def test_only_dropout_and_running_statistics_need_no_graph_in_eval_mode():
    layer = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.AlphaDropout(0.5), nn.RReLU(), nn.Dropout(0.1))
    trainer = trained(Loss(layer))
    expected = evaluated(trainer._engine.model, *vectors(5))
    torch.testing.assert_close(tuple(trainer.eval_step(*vectors(5))), expected, rtol=1e-5, atol=1e-6)
    assert trainer._engine._eval_mode is None


def test_it_follows_attributes_other_memory_and_masks():
    module = rebuilt(lambda: Shifted(6, 6))
    trainer = trained(module)
    trainer.eval_step(*vectors(5))

    def assert_followed():
        expected = evaluated(module, *vectors(5))
        torch.testing.assert_close(tuple(trainer.eval_step(*vectors(5))), expected, rtol=1e-5, atol=1e-6)

    module.layer.by = 3.0
    assert_followed()
    average = [torch.full_like(parameter, 0.1) for parameter in module.parameters()]
    own = [parameter.data for parameter in module.parameters()]
    for parameter, value in zip(module.parameters(), average):
        parameter.data = value
    assert_followed()
    for parameter, value in zip(module.parameters(), own):
        parameter.data = value
    assert_followed()
    module.layer.register_forward_hook(lambda layer, inputs, y: y * 2)
    assert_followed()


def test_layers_in_eval_mode_and_evaluations_before_the_first_step():
    module = rebuilt(lambda: Shifted(6, 6)).eval()
    trainer = make(module, loss_fn=None, desc=described(vectors(0)))
    torch.testing.assert_close(tuple(trainer.eval_step(*vectors(1))), evaluated(module, *vectors(1)))
    trainer.train_step(*vectors(0), RATE)
    torch.testing.assert_close(tuple(trainer.eval_step(*vectors(1))), evaluated(module, *vectors(1)))
    assert not module.training


class Classes(nn.Module):
    """Scores of images, as logarithms of shares in eval mode; `depth` noise while it trains."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))

    def forward(self, x):
        scores = self.net(x)
        return scores + torch.rand_like(scores) if self.training else scores


def test_other_sizes_and_a_part_of_the_outputs():
    """A trainer that is told no sizes exports anew for them; an output without the label needs none."""
    torch.manual_seed(0)
    module = Classes()
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    label = torch.tensor([0, 1, 2])
    for side in (8, 8, 12):
        images = torch.randn(3, 1, side, side)
        trainer.step(images, label)
        loss, scores = trainer.eval_step(images, label)
        expected = evaluated(module, images)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, F.cross_entropy(expected, label), rtol=1e-5, atol=1e-6)


def test_an_output_that_needs_no_label_is_evaluated_without():
    description = ModelDescription(
        [IODescription("x", ["batch", 6]), IODescription("label", ["batch", 6])],
        [IODescription("loss", []), IODescription("y", ["batch", 6])],
    )
    module = Shifted(6, 6)
    trainer = make(module, loss_fn=nn.functional.mse_loss, desc=description)
    (x,) = vectors(0)
    trainer.train_step(x, torch.zeros(8, 6), RATE)
    for _ in range(2):
        found = trainer.eval_step(x, fetches=["y"])
        found = found if isinstance(found, torch.Tensor) else found[0]
        torch.testing.assert_close(found, evaluated(module, x))


def test_mixed_precision_evaluates_in_the_precision_of_the_module():
    module = rebuilt(lambda: Shifted(6, 6))
    settings = Settings(precision="float16")
    engine = Engine(module, None, described(vectors(0)), OptimizerChoice("SGDOptimizer"), settings)
    engine.train_step({"x0": vectors(0)[0]}, RATE)
    found = tuple(engine.eval_step({"x0": vectors(1)[0]}))
    torch.testing.assert_close(found, evaluated(module, *vectors(1)), rtol=1e-5, atol=1e-6)


class Unexportable(nn.Linear):
    """Shuffles in eval mode by what ONNX has no operator for."""

    def forward(self, x):
        y = super().forward(x)
        return y if self.training else y + torch.nextafter(y, y + 1)


def test_what_cannot_be_exported_in_eval_mode_is_said_once_and_dropout_switched_off(caplog):
    module = rebuilt(lambda: nn.Sequential(Unexportable(6, 6), nn.Dropout(0.5)))
    trainer = trained(module)
    for _ in range(2):
        _, found = trainer.eval_step(*vectors(5))
        torch.testing.assert_close(found, F.linear(*vectors(5), module.layer[0].weight, module.layer[0].bias).detach())
    assert caplog.text.count("may do more in eval mode than to switch dropout off") == 1


def test_what_a_loss_on_an_onnx_model_does_otherwise_in_eval_mode_is_said(tmp_path, caplog):
    class Louder(nn.Module):
        def forward(self, y, label):
            return F.cross_entropy(y, label) * (3.0 if self.training else 1.0)

    source = make()
    source.eval_step(*batch())
    source.export_inference(tmp_path / "model.onnx")
    trainer = make(onnx.load(tmp_path / "model.onnx"), loss_fn=Louder())
    torch.testing.assert_close(trainer.eval_step(*batch())[0], 3 * source.eval_step(*batch())[0])
    assert caplog.text.count("may do more in eval mode than to switch dropout off") == 1


@pytest.mark.parametrize("outputs", [None, ["y"]])
def test_an_engine_evaluates_what_is_asked_of_it(outputs):
    module = rebuilt(Merged)
    engine = Engine(module, None, described(vectors(0)), OptimizerChoice("SGDOptimizer"), Settings())
    engine.train_step({"x0": vectors(0)[0]}, RATE)
    found = engine.eval_step({"x0": vectors(1)[0]}, outputs)
    expected = evaluated(module, *vectors(1))
    torch.testing.assert_close(tuple(found), expected if outputs is None else expected[1:], rtol=1e-5, atol=1e-6)
