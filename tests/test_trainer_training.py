"""What a step of `ORTTrainer` trains and what it leaves alone."""

from __future__ import annotations

import copy

import models
import pytest
import reference_optimizers as reference
import torch
from marks import in_turn, slow, usual
from small import LR, OPTIMIZERS, RATE, assert_same, batch, description, make, net, snapshot, torch_step
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import (
    ExecutionError,
    ModelError,
    NoGradientWarning,
)

# -- what is trained and what is left alone ----------------------------------------------------


class WithBuffers(nn.Module):
    """Float and integer buffers that forward reads, one that it does not, and a parameter without gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("order", torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))
        self.register_buffer("unread", torch.arange(3))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * self.scale
        return self.second(hidden[:, self.order]) * self.fixed


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("optimizer", usual(OPTIMIZERS, "AdamOptimizer"))
def test_frozen_weights_and_buffers_stay_and_the_others_train_like_pytorch(optimizer):
    module, reference_module = WithBuffers(), WithBuffers()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = make(module, optimizer, frozen_weights=["first.weight"])
    trained = {n: p for n, p in reference_module.named_parameters() if n not in ("first.weight", "fixed")}
    kinds = {
        "SGDOptimizer": lambda: reference.SGD(trained, 0.1),
        "AdamOptimizer": lambda: reference.AdamBefore(trained, 0.1, lambda name: 0.0),
        "LambOptimizer": lambda: reference.Lamb(trained, 0.1, lambda name: 0.0),
    }
    step_of = kinds[optimizer]()
    for step in range(4):
        x, y = batch(step)
        reference_module.zero_grad()
        loss = nn.functional.cross_entropy(reference_module(x), y)
        loss.backward()
        reference_module.first.weight.grad = None
        step_of.step()
        torch.testing.assert_close(trainer.train_step(x, y, LR)[0], loss.detach())
    after = module.state_dict()
    for name in before:
        if name in trained:
            assert not torch.equal(after[name], before[name]), name
            torch.testing.assert_close(after[name], reference_module.state_dict()[name], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(after[name], before[name]), name
    assert trainer.state_dict(include_optimizer_state=False).keys() == before.keys()
    assert set(trainer.training_graph.signature.parameters) == set(trained)


def test_an_unknown_frozen_weight_is_an_error_that_lists_the_weights():
    text = r"frozen_weights=\['0.wieght'\] are not weights of the model; it has \['0.bias', '0.weight'"
    with pytest.raises(ModelError, match=text):
        make(frozen_weights=["0.wieght"]).train_step(*batch(), LR)


@pytest.mark.legacy_runtime
def test_a_weight_used_twice_gets_the_sum_of_its_gradients():
    setup, module = models.make("tied")
    reference_module = copy.deepcopy(module)
    trainer = make(module, loss_fn=setup.loss_fn, desc=setup.description())
    for step in range(3):
        tokens, labels = setup.batch(step)
        loss = torch_step(reference_module, tokens, labels, loss_fn=setup.loss_fn)
        torch.testing.assert_close(trainer.train_step(tokens, labels, LR)[0], loss)
    assert module.decoder.weight is module.embedding.weight
    torch.testing.assert_close(module.embedding.weight, reference_module.embedding.weight)
    assert {"embedding.weight", "decoder.weight"} <= trainer.state_dict().keys()


class WithUnusedParameters(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.second_head, self.never = nn.Linear(4, 3), nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, x, label):
        return nn.functional.cross_entropy(self.used(x), label), self.second_head(x)


def test_parameters_without_a_path_to_the_loss_are_named_in_one_warning_and_keep_their_values():
    module = WithUnusedParameters()
    before = copy.deepcopy(module)
    desc = description()
    desc = ModelDescription(desc.inputs_, [desc.outputs_[0], IODescription("second", ["batch", 2], torch.float32)])
    trainer = make(module, "AdamOptimizer", loss_fn=None, desc=desc)
    with pytest.warns(NoGradientWarning) as caught:
        for step in range(3):
            trainer.train_step(*batch(step), LR)
    ours = [str(warning.message) for warning in caught if warning.category is NoGradientWarning]
    assert len(ours) == 1
    for name in ("'second_head.weight'", "'second_head.bias'", "'never'"):
        assert name in ours[0]
    assert torch.equal(module.second_head.weight, before.second_head.weight) and torch.equal(module.never, before.never)
    assert not torch.equal(module.used.weight, before.used.weight)


@pytest.mark.parametrize("optimizer", usual(OPTIMIZERS, "LambOptimizer"))
def test_a_parameter_without_elements_changes_nothing(optimizer):
    class WithEmpty(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x):
            return super().forward(x) + self.empty.sum()

    plain = net()
    other = WithEmpty(*net())
    trainers = make(plain, optimizer), make(other, optimizer)
    for step in range(3):
        losses = [trainer.train_step(*batch(step), LR)[0] for trainer in trainers]
        torch.testing.assert_close(*losses)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    assert trainers[1].state_dict()["empty"].shape == (0, 4)


def test_a_model_with_nothing_to_train_is_an_error():
    with pytest.raises(ModelError, match=r"nothing to train"):
        make(frozen_weights=[name for name, _ in net().named_parameters()]).train_step(*batch(), LR)


def test_a_loss_without_a_gradient_is_an_error_and_no_warning_besides(caplog):
    def detached(y, label):
        return nn.functional.cross_entropy(y, label).detach()

    with pytest.raises(ModelError, match=r"nothing to train"):
        make(loss_fn=detached).train_step(*batch(), LR)
    assert not caplog.records


# -- gradient norm and clipping ----------------------------------------------------------------


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("optimizer", usual(OPTIMIZERS, "LambOptimizer"))
def test_last_grad_norm_is_what_clip_grad_norm_returns(optimizer):
    trainer = make(optimizer=optimizer)
    assert trainer.last_grad_norm.shape == () and trainer.last_grad_norm == 0
    for step in range(3):
        module = copy.deepcopy(trainer._engine.model)
        x, y = batch(step)
        nn.functional.cross_entropy(module(50 * x), y).backward()  # 50: far above max_norm_clip
        expected = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        trainer.train_step(50 * x, y, LR)
        torch.testing.assert_close(trainer.last_grad_norm, expected)


@pytest.mark.legacy_runtime
@pytest.mark.parametrize(
    "enabled, max_norm", in_turn({"clipped": True, "enable_grad_norm_clip=False": False}, [0.1, 1.0])
)
def test_adam_clips_to_max_norm_clip_like_pytorch_unless_told_not_to(enabled, max_norm):
    # epsilon 0.1: Adam forgets the length of the gradient where epsilon is small.
    module, attributes = net(), {"epsilon": 0.1, "max_norm_clip": max_norm}
    trainer = make(optimizer="AdamOptimizer", attributes=lambda name: attributes, enable_grad_norm_clip=enabled)
    adam = torch.optim.AdamW(module.parameters(), lr=RATE, eps=0.1, weight_decay=0.0)
    for step in range(5):
        x, y = 20 * batch(step)[0], batch(step)[1]
        adam.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        if enabled:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        adam.step()
        # PyTorch adds 1e-6 to the norm it divides by.
        torch.testing.assert_close(trainer.train_step(x, y, LR)[0], loss.detach(), rtol=3e-5, atol=0)
    torch.testing.assert_close(
        dict(trainer._engine.model.state_dict()), dict(module.state_dict()), rtol=1e-4, atol=1e-5
    )


def test_sgd_never_clips():
    module, trainer = net(), make()
    x, y = batch()
    for _ in range(2):
        torch.testing.assert_close(trainer.train_step(50 * x, y, LR)[0], torch_step(module, 50 * x, y))
    assert trainer.last_grad_norm > 1


# -- values ------------------------------------------------------------------------------------


def test_a_network_with_relu_trains_like_pytorch_in_float64():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    double, trainer = copy.deepcopy(module).double(), make(module)
    for step in range(30):
        x, y = batch(step, rows=16)
        expected = torch_step(double, x.double(), y)
        assert trainer.train_step(x, y, LR)[0].item() == pytest.approx(expected.item(), rel=1e-5)
    for parameter, expected in zip(module.parameters(), double.parameters()):
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [slow("mlp"), "cnn"])
def test_a_batch_that_fails_leaves_the_state_as_it_was_and_prints_nothing(name, capfd):
    setup, module = models.make(name)
    trainer = make(module, "AdamOptimizer", loss_fn=setup.loss_fn, desc=setup.description())
    x, y = setup.batch(0)
    trainer.train_step(x, y, LR)
    before, counted = snapshot(trainer), trainer.current_step
    with pytest.raises(ExecutionError, match=r"the state is as it was before. An index .* is out of range"):
        trainer.train_step(x, y + 100, LR)
    assert_same(snapshot(trainer), before)
    assert trainer.current_step == counted
    assert capfd.readouterr() == ("", "")
    trainer.train_step(x, y, LR)


@pytest.mark.legacy_runtime
def test_the_package_exports_the_legacy_names():
    namespace: dict = {}
    exec("from orttrainer import *", namespace)
    assert {"ORTTrainer", "IODescription", "ModelDescription", "set_seed", "build_gradient"} <= namespace.keys()
    assert namespace["ORTTrainer"] is ORTTrainer
    assert set(orttrainer.__all__) <= namespace.keys()


class EqualGradients(nn.Module):
    """An LSTM has two biases for one sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
        self.more = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.head(self.lstm(x[:, None] * torch.ones(3, 1))[0].mean(1)) + self.more


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"nonfinite_loss": "error"}, 1e-5),
        ({"use_mixed_precision": True, "mixed_precision_dtype": "bfloat16"}, 2e-2),
        ({"gradient_accumulation_steps": 2}, 1e-5),
    ],
    ids=["update after a look at the loss", "bfloat16", "accumulated"],
)
def test_parameters_of_equal_gradients_are_trained_one_by_one(options, tolerance):
    """Where the update is a session of its own, each has a buffer for its gradient."""
    module, reference = EqualGradients(), EqualGradients()
    trainer = make(module, **options)
    blocks = options.get("gradient_accumulation_steps", 1)
    for step in range(3):
        for _ in range(blocks):
            trainer.train_step(*batch(step), LR)
        torch_step(reference, *batch(step))
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], expected, rtol=tolerance, atol=tolerance)


class Viewed(nn.Module):
    """Images [n, 3, 8, 8]: what the convolutions give is read by `view`, which an output in channels last does not allow."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.out = nn.Linear(32 * 16, 3)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.out(nn.functional.max_pool2d(x, 2).view(-1, 32 * 16))


def test_convolutions_run_in_pytorch_after_training_as_before():
    """PyTorch's convolution gives channels last wherever the weight's strides look so: the state may not hold it like that."""
    module, label = Viewed(), torch.arange(4) % 3
    inputs = [IODescription("x", [4, 3, 8, 8], torch.float32), IODescription("label", [4], torch.int64)]
    outputs = [IODescription("loss", [], torch.float32), IODescription("scores", [4, 3], torch.float32)]
    trainer = make(module, desc=ModelDescription(inputs, outputs))
    x = torch.randn(4, 3, 8, 8)
    trainer.train_step(x, label, LR)
    loss = nn.functional.cross_entropy(module(x), label)
    assert trainer.train_step(x, label, LR)[0].item() == pytest.approx(loss.item(), rel=1e-5)
    assert all(parameter.is_contiguous() for parameter in module.parameters())
