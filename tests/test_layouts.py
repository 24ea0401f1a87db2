"""What the state holds transposed trains as what it holds as it is declared, and is seen only in strides."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.engine import Engine
from orttrainer.errors import StateError
from orttrainer.graph.passes import loss
from orttrainer.graph.passes.speed import layout, products
from orttrainer.pipeline import SPEED_PASSES
from orttrainer.settings import OptimizerChoice, Settings

OPTIMIZERS = {
    "SGDOptimizer": lambda p: torch.optim.SGD(p, 0.1),
    "AdamOptimizer": lambda p: torch.optim.Adam(p, 0.1),
    "LambOptimizer": None,  # torch has none: compared with the plain layout only
}


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """The rewrites for large vocabularies, at the size of a test."""
    monkeypatch.setattr(layout.WideLinearLayoutPass, "LARGE", 1)
    monkeypatch.setattr(loss.ExpandSoftmaxCrossEntropyPass, "MANY", 16)
    monkeypatch.setattr(products.ScaleSmallOperandPass, "LARGE", 16)


class Decoder(nn.Module):
    """Token ids [length, batch] -> scores [length, batch, vocabulary]."""

    def __init__(self, tied: bool = False, bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.decoder = nn.Embedding(50, 5), nn.Linear(5, 50, bias)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(torch.tanh(self.embedding(tokens)))


def cross_entropy(scores, labels):
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 50, (12,), generator=generator)
    labels[step % 12] = -100  # ignored
    return torch.randint(0, 50, (4, 3), generator=generator), labels


def description() -> ModelDescription:
    return ModelDescription(
        [IODescription("tokens", ["length", "batch"], torch.int64), IODescription("label", ["n"], torch.int64)],
        [
            IODescription("loss", [], torch.float32),
            IODescription("scores", ["length", "batch", 50], torch.float32),
        ],
    )


def engine(module, optimizer="AdamOptimizer", plain=False, **settings) -> Engine:
    """`plain`: without any of the passes that serve speed."""
    disabled = tuple(chosen.__name__ for chosen in SPEED_PASSES) if plain else ()
    choice = OptimizerChoice(optimizer, clip=False)
    return Engine(module, cross_entropy, description(), choice, Settings(disabled_passes=disabled, **settings))


def train(one: Engine, steps=range(6)) -> list[float]:
    return [float(one.train_step(dict(zip(("tokens", "label"), batch(step))), 0.1)[0][0]) for step in steps]


def transposed(one: Engine) -> dict[str, str | None]:
    return {e.name: e.last_row for e in one.training_graph.signature.state if e.transposed}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_as_the_plain_layout_and_as_torch(optimizer, accumulate):
    module, other, reference = Decoder(), Decoder(), Decoder()
    one = engine(module, optimizer, accumulation_steps=accumulate)
    two = engine(other, optimizer, plain=True, accumulation_steps=accumulate)
    losses = train(one)
    assert losses == pytest.approx(train(two), rel=1e-5)
    assert transposed(one)["decoder.weight"] == (None if optimizer == "LambOptimizer" else "decoder.bias")
    assert not transposed(two)
    for name, expected in two.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], expected, rtol=1e-4, atol=1e-5)
    assert one.state_dict().keys() == two.state_dict().keys()
    if OPTIMIZERS[optimizer] is None:
        return
    update = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(6):
        tokens, labels = batch(step)
        value = cross_entropy(reference(tokens), labels)
        assert losses[step] == pytest.approx(value.item(), rel=2e-5)
        (value / accumulate).backward()
        if (step + 1) % accumulate == 0:
            update.step()
            update.zero_grad()
    torch.testing.assert_close(module.decoder.weight, reference.decoder.weight, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(module.decoder.bias, reference.decoder.bias, rtol=1e-4, atol=2e-5)


def test_the_parameter_stays_live_as_a_view():
    module = Decoder()
    weight, bias = module.decoder.weight, module.decoder.bias
    one = engine(module)
    train(one, [0])
    assert module.decoder.weight is weight and module.decoder.bias is bias
    assert weight.stride() == (1, 50) and weight.shape == (50, 5)
    before = weight.detach().clone()
    train(one, [1])
    assert not torch.equal(weight, before)
    with torch.no_grad():
        weight.zero_()
        bias.zero_()
    assert train(one, [2]) == [pytest.approx(np.log(50), rel=1e-6)]  # all scores were 0


def test_new_data_of_the_parameter_is_taken_over():
    module = Decoder()
    one = engine(module)
    train(one, [0])
    module.decoder.weight.data, module.decoder.bias.data = torch.zeros(50, 5), torch.zeros(50)
    assert train(one, [1]) == [pytest.approx(np.log(50), rel=1e-6)]
    assert module.decoder.weight.stride() == (1, 50) and module.decoder.weight.any()


def test_a_state_dict_is_contiguous_and_loads_into_either_layout():
    one, two = engine(Decoder()), engine(Decoder(), plain=True)
    train(one)
    state = one.state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert state["decoder.weight"].shape == state["Moment_1_decoder.weight"].shape == (50, 5)
    assert state["Moment_2_decoder.bias"].shape == (50,)
    two.load_state_dict(state, strict=True)
    assert train(one, range(6, 9)) == pytest.approx(train(two, range(6, 9)), rel=1e-5)
    one.load_state_dict(two.state_dict(), strict=True)
    assert train(one, range(9, 12)) == pytest.approx(train(two, range(9, 12)), rel=1e-5)


def test_a_tensor_in_the_stored_shape_is_refused():
    one = engine(Decoder())
    train(one, [0])
    before = one.state_dict()
    with pytest.raises(StateError, match=r"'decoder.weight' has shape \[6, 50\], expected \[50, 5\]"):
        one.load_state_dict(before | {"decoder.weight": torch.zeros(6, 50)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())


def test_sums_of_gradients_are_saved_in_the_declared_shape():
    one, two = (engine(Decoder(), accumulation_steps=3) for _ in range(2))
    train(one, range(5))
    state = one.state_dict()
    assert state["decoder.weight_grad_accumulator"].shape == (50, 5) and state["decoder.bias_grad_accumulator"].any()
    train(two, [0])
    two.load_state_dict(state, strict=True)
    assert train(two, range(5, 9)) == train(one, range(5, 9))
    assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_the_saved_graph_has_the_declared_layout_and_the_same_next_step(tmp_path):
    trainer = ORTTrainer(
        Decoder(), cross_entropy, description(), "AdamOptimizer", None,
        IODescription("Learning_Rate", [1], torch.float32), "cpu", enable_grad_norm_clip=False,
    )  # fmt: skip
    rate = torch.tensor([0.1])
    for step in range(3):
        trainer.train_step(*batch(step), rate)
    trainer.training_graph.save(tmp_path / "training.onnx")
    saved = onnx.load(tmp_path / "training.onnx")
    shapes = {tensor.name: list(tensor.dims) for tensor in saved.graph.initializer}
    assert shapes["decoder.weight"] == shapes["Moment_1_decoder.weight"] == [50, 5]
    assert {entry.name for entry in trainer.training_graph.signature.state} <= shapes.keys()
    session = onnxruntime.InferenceSession(tmp_path / "training.onnx", providers=["CPUExecutionProvider"])
    tokens, labels = batch(3)
    feeds = {"tokens": tokens.numpy(), "label": labels.numpy(), "Learning_Rate": rate.numpy()}
    loss, weight = session.run(["loss", "decoder.weight_new"], feeds)
    assert loss == pytest.approx(trainer.train_step(*batch(3), rate)[0].item(), rel=1e-6)
    np.testing.assert_allclose(weight, trainer.state_dict()["decoder.weight"], rtol=1e-5, atol=1e-6)


def test_a_second_trainer_on_the_same_module_goes_on_from_the_first():
    module, reference = Decoder(), Decoder()
    train(engine(module, "SGDOptimizer"), range(3))
    train(engine(reference, "SGDOptimizer", plain=True), range(6))
    train(engine(module, "SGDOptimizer"), range(3, 6))
    torch.testing.assert_close(module.decoder.weight, reference.decoder.weight, rtol=1e-4, atol=1e-6)


def test_a_copied_module_is_apart():
    module = Decoder()
    one = engine(module)
    train(one, [0])
    other = copy.deepcopy(module)
    before = other.decoder.weight.detach().clone()
    train(one, [1])
    assert torch.equal(other.decoder.weight, before)


@pytest.mark.parametrize("what", ["tied", "frozen weight", "without bias", "frozen bias"])
def test_what_cannot_be_held_so_stays_apart(what):
    module = Decoder(tied=what == "tied", bias=what != "without bias")
    if what.startswith("frozen"):
        getattr(module.decoder, what.split()[1]).requires_grad_(False)
    reference = copy.deepcopy(module)
    one, two = engine(module), engine(reference, plain=True)
    assert train(one) == pytest.approx(train(two), rel=1e-5)
    expected = {} if what in ("tied", "frozen weight") else {"decoder.weight": None}
    assert {n: row for n, row in transposed(one).items() if n.startswith("decoder")} == expected


def test_a_bias_with_another_decay_or_rate_stays_apart():
    def attributes(name):
        return {"lambda": 0.0 if name.endswith("bias") else 0.1}

    choices = [
        OptimizerChoice("AdamOptimizer", attributes, clip=False),
        OptimizerChoice(
            "AdamOptimizer", clip=False, group=lambda name: int(name.endswith("bias")), rates=lambda r: [r, r / 10]
        ),
    ]
    for choice in choices:
        one = Engine(Decoder(), cross_entropy, description(), choice, Settings())
        disabled = tuple(chosen.__name__ for chosen in SPEED_PASSES)
        two = Engine(Decoder(), cross_entropy, description(), choice, Settings(disabled_passes=disabled))
        assert train(one) == pytest.approx(train(two), rel=1e-5)
        assert transposed(one)["decoder.weight"] is None
        torch.testing.assert_close(
            one.state_dict()["decoder.bias"], two.state_dict()["decoder.bias"], rtol=1e-4, atol=1e-5
        )


def test_scores_far_apart_have_the_exact_loss_and_gradient():
    """Where the softmax of the label underflows to 0 its logarithm is taken from the scores."""
    module, reference = Decoder(), Decoder()
    for one in (module, reference):
        with torch.no_grad():
            one.decoder.weight.mul_(1000)
    reference = reference.double()
    ours = engine(module, "SGDOptimizer")
    for step in range(3):
        value = cross_entropy(reference(batch(step)[0]), batch(step)[1])
        assert value > 90  # exp(-90) is no float32
        assert train(ours, [step]) == [pytest.approx(value.item(), rel=1e-5)]
        for p, g in zip(reference.parameters(), torch.autograd.grad(value, list(reference.parameters()))):
            p.data.sub_(0.1 * g)
    torch.testing.assert_close(module.embedding.weight.double(), reference.embedding.weight, rtol=1e-4, atol=1e-3)
