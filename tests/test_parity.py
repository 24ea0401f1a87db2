"""Step for step like PyTorch: losses and parameters of 30 steps, for every model and optimizer."""

from __future__ import annotations

import models
import onnx
import pytest
import reference_optimizers as reference
import torch
from marks import slow, usual

from orttrainer import ORTTrainer

STEPS = 30
# Adam divides by sqrt(v) + epsilon. Some gradients are zero but for rounding (the bias of an
# attention key, a bias before BatchNorm), and with the default of 1e-8 the update of these few
# numbers would be noise over noise, in PyTorch too. They do not change the loss.
EPSILON = 1e-4


def decay(name: str) -> float:
    return 0.0 if name.endswith("bias") else 0.01


OPTIMIZERS = {
    "sgd": ("SGDOptimizer", None, 0.05, lambda p, lr: reference.SGD(p, lr)),
    "adam": (
        "AdamOptimizer", lambda name: {"lambda": decay(name), "epsilon": EPSILON}, 2e-3,
        lambda p, lr: reference.AdamBefore(p, lr, decay, EPSILON),
    ),
    "adam-after": (
        "AdamOptimizer", lambda name: {"lambda": decay(name), "epsilon": EPSILON, "weight_decay_mode": 1}, 2e-3,
        lambda p, lr: reference.AdamAfter(p, lr, decay, EPSILON),
    ),
    "lamb": (
        "LambOptimizer", lambda name: {"lambda": decay(name), "epsilon": EPSILON}, 1e-2,
        lambda p, lr: reference.Lamb(p, lr, decay, EPSILON),
    ),
}  # fmt: skip


def each(names, optimizers, usual) -> list:
    """Every model, with Adam, and every optimizer, with the `usual` models; `make test-slow` has all the others."""
    return [
        pytest.param(name, optimizer, marks=() if name in usual or optimizer == "adam" else pytest.mark.slow)
        for name in names
        for optimizer in optimizers
    ]


def train_in_pytorch(name: str, optimizer: str, steps: int = STEPS):
    """Losses and the trained module."""
    setup, module = models.make(name)
    step = OPTIMIZERS[optimizer][3](dict(module.named_parameters()), OPTIMIZERS[optimizer][2])
    losses = []
    for index in range(steps):
        module.zero_grad()
        loss = setup.loss(module, setup.batch(index))
        loss.backward()
        step.step()
        losses.append(loss.item())
    return losses, module


def make_trainer(name: str, optimizer: str, **options):
    setup, module = models.make(name)
    kind, attributes, _, _ = OPTIMIZERS[optimizer]
    trainer = ORTTrainer(
        module, setup.loss_fn, setup.description(), kind, attributes, models.LEARNING_RATE, "cpu", **options
    )
    return setup, module, trainer


def train(setup, trainer, optimizer: str, steps=range(STEPS)) -> list[float]:
    rate = torch.tensor([OPTIMIZERS[optimizer][2]])
    return [trainer.train_step(*setup.batch(index), rate)[0].item() for index in steps]


def assert_equal_state(actual: dict, expected: dict) -> None:
    """1e-5 of the largest entry of each tensor."""
    for name, want in expected.items():
        if not want.is_floating_point():
            assert torch.equal(actual[name], want), name
            continue
        error, scale = (actual[name] - want).abs().max().item(), want.abs().max().item()
        assert error <= 1e-5 * max(scale, 1e-2), f"{name} is off by {error} at scale {scale}"


@pytest.mark.parametrize("name, optimizer", [
    slow(*case.values) if case.values[0] == "gpt2" else case
    for case in each(models.SETUPS, OPTIMIZERS, usual=("mlp", "tied"))
])  # fmt: skip
def test_losses_and_parameters_are_those_of_pytorch(name, optimizer):
    expected, expected_module = train_in_pytorch(name, optimizer)
    setup, module, trainer = make_trainer(name, optimizer)
    losses = train(setup, trainer, optimizer)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_equal_state(module.state_dict(), expected_module.state_dict())


@pytest.fixture
def two_threads():
    """Users have them; `conftest.py` gives each worker of the tests one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", usual(models.SETUPS, "mlp", "cnn"))
def test_two_threads_train_like_pytorch_too(name, two_threads):
    expected, expected_module = train_in_pytorch(name, "adam", steps=3)
    setup, module, trainer = make_trainer(name, "adam")
    assert train(setup, trainer, "adam", range(3)) == pytest.approx(expected, rel=1e-5)
    assert_equal_state(module.state_dict(), expected_module.state_dict())


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_an_onnx_model_with_its_loss_inside_trains_like_the_module_it_came_from(optimizer, tmp_path):
    setup, _module, source = make_trainer("mlp", optimizer)
    source.eval_step(*setup.batch(0))
    source.save_as_onnx(str(tmp_path / "forward.onnx"))
    model = onnx.load(str(tmp_path / "forward.onnx"))
    kind, attributes, _, _ = OPTIMIZERS[optimizer]
    trainer = ORTTrainer(model, None, setup.description(), kind, attributes, models.LEARNING_RATE, "cpu")
    expected, expected_module = train_in_pytorch("mlp", optimizer)
    assert train(setup, trainer, optimizer) == pytest.approx(expected, rel=1e-5)
    assert_equal_state(trainer.state_dict(), expected_module.state_dict())


def test_batch_norm_of_an_onnx_model_from_elsewhere_trains_and_moves_its_statistics_as_onnx_says(tmp_path):
    setup, _, source = make_trainer("cnn", "sgd")
    source.eval_step(*setup.batch(0))
    source.save_as_onnx(str(tmp_path / "forward.onnx"))
    model = onnx.load(str(tmp_path / "forward.onnx"))
    del model.metadata_props[:]  # where a file of our own says which outputs are the next statistics
    trainer = ORTTrainer(model, None, setup.description(), "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    expected, expected_module = train_in_pytorch("cnn", "sgd", steps=5)
    assert train(setup, trainer, "sgd", range(5)) == pytest.approx(expected, rel=1e-5)
    actual, wanted = trainer.state_dict(), expected_module.state_dict()
    variances = {name for name in wanted if name.endswith("running_var")}
    assert_equal_state(actual, {n: t for n, t in wanted.items() if n not in variances and t.is_floating_point()})
    count = 6 * 14 * 14  # values per channel of the first BatchNorm
    kept = 0.9**5  # of the initial variance 1; ONNX takes the biased variance of each batch, torch the unbiased
    assert torch.allclose(actual["bn1.running_var"] - kept, (wanted["bn1.running_var"] - kept) * (count - 1) / count)
