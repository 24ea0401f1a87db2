"""What the tests of the first generation asked of its trainer: an MNIST network, a small BERT in ONNX, reordered inputs.

MNIST itself is not here: the digits are blurred prototypes, as many and as large.
"""

from __future__ import annotations

import importlib.util
import pathlib

import onnx
import pytest
import torch
from marks import slow
from reference_optimizers import SGD, Lamb
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.checkpoint import load_checkpoint, save_checkpoint

RATE = IODescription("Learning_Rate", [1], torch.float32)
LR = torch.tensor([0.01])
BATCH, STEPS = 64, 20


class NeuralNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.fc1, self.relu, self.fc2 = nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10)
        self.register_buffer("bias_buffer", torch.linspace(-0.1, 0.1, 10))

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x))) + self.bias_buffer


class WithInternalLoss(NeuralNet):
    def forward(self, x, labels):
        return my_loss(super().forward(x), labels)


def my_loss(x, target):
    return nn.functional.nll_loss(nn.functional.log_softmax(x, dim=1), target)


def digits(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [64, 784] and their labels [64]."""
    prototypes = 3 * torch.rand(10, 784, generator=torch.Generator().manual_seed(0)) - 1.5
    generator = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(0, 10, (BATCH,), generator=generator)
    return prototypes[labels] + 0.3 * torch.randn(BATCH, 784, generator=generator), labels


def mnist_description() -> ModelDescription:
    inputs = [IODescription("input1", ["batch", 784], torch.float32)]
    inputs += [IODescription("label", ["batch"], torch.int64, num_classes=10)]
    outputs = [IODescription("loss", [], torch.float32), IODescription("probability", ["batch", 10], torch.float32)]
    return ModelDescription(inputs, outputs)


def make(module=None, loss_fn=my_loss, desc=None, device="cpu", **options) -> ORTTrainer:
    module = NeuralNet() if module is None else module
    desc = mnist_description() if desc is None else desc
    return ORTTrainer(module, loss_fn, desc, "SGDOptimizer", None, RATE, device, **options)


def train(trainer: ORTTrainer, steps) -> list[float]:
    return [trainer.train_step(*digits(step), LR)[0].item() for step in steps]


def accuracy(trainer: ORTTrainer) -> float:
    images, labels = digits(1000)
    probability = trainer.eval_step(images, fetches=["probability"])
    return (probability.argmax(1) == labels).float().mean().item()


def in_pytorch(steps, lr: float = 0.01) -> tuple[list[float], nn.Module]:
    model, losses = NeuralNet(), []
    optimizer = SGD(dict(model.named_parameters()), lr)
    for step in steps:
        images, labels = digits(step)
        model.zero_grad()
        loss = my_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


# -- the MNIST network -----------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [10, 14])
def test_mnist_trains_like_pytorch_and_learns_at_the_oldest_and_newest_published_opset(opset):
    trainer = make(_opset_version=opset)
    images, labels = digits(0)
    expected, model = in_pytorch(range(STEPS))
    first = trainer.eval_step(images, labels)[0].item()  # evaluation may come before the first step
    losses = train(trainer, range(STEPS))
    assert losses == pytest.approx(expected, rel=1e-4) and first == pytest.approx(losses[0], rel=1e-5)
    probability = trainer.eval_step(images, fetches=["probability"])
    torch.testing.assert_close(probability, model(images).detach(), rtol=1e-4, atol=1e-5)
    assert losses[-1] < 0.5 * losses[0] and accuracy(trainer) > 0.9


def test_mnist_resumed_from_its_state_and_the_state_of_the_generator_goes_on_as_before():
    straight, first = make(), make()
    expected = train(straight, range(STEPS))
    losses = train(first, range(STEPS // 2))
    state, generator = first.state_dict(), torch.get_rng_state()
    torch.manual_seed(77)
    second = make()
    torch.set_rng_state(generator)
    second.load_state_dict(state, strict=True)
    assert losses + train(second, range(STEPS // 2, STEPS)) == expected
    assert second.eval_step(*digits(0))[0].item() == straight.eval_step(*digits(0))[0].item()


def test_the_state_of_mnist_is_empty_and_then_its_parameters_and_its_buffer():
    trainer = make()
    with pytest.warns(UserWarning, match="no state before its first step"):
        assert trainer.state_dict() == {}
    train(trainer, range(1))
    names = {"fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight", "bias_buffer"}
    assert trainer.state_dict(include_optimizer_state=False).keys() == names


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_a_device_may_be_a_name_or_an_object(device):
    trainer = make(device=device)
    loss, probability = trainer.train_step(*digits(0), LR)
    assert loss.device == probability.device == trainer.device == torch.device("cpu")


def initializers(trainer: ORTTrainer) -> set[str]:
    return {tensor.name for tensor in trainer.onnx_model_.graph.initializer}


def test_initializers_have_the_names_of_the_parameters():
    trainer, names = make(), {name for name, _ in NeuralNet().named_parameters()}
    train(trainer, range(1))
    assert initializers(trainer) >= names
    assert not {name for name in initializers(trainer) if name.startswith(("model", "wrapped"))}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_model_with_its_loss_inside_trains_at_the_rates_of_its_schedule(as_tensor):
    rates = [0.02, 0.01, 0.0, 0.005]
    schedule = (lambda step: torch.tensor([rates[step]])) if as_tensor else rates.__getitem__
    desc = mnist_description()
    desc = ModelDescription(desc.inputs_, desc.outputs_[:1])
    module = WithInternalLoss()
    trainer = make(module, None, desc, get_lr_this_step=schedule)
    assert isinstance(trainer.train_step(*digits(0)), torch.Tensor)  # one output is no list
    model = NeuralNet()
    optimizer = SGD(dict(model.named_parameters()), 1.0)
    for step in range(1, len(rates)):
        _torch_step(model, optimizer, digits(step - 1), rates[step - 1])
        expected = my_loss(model(digits(step)[0]), digits(step)[1]).item()
        assert trainer.train_step(*digits(step)).item() == pytest.approx(expected, rel=1e-5)
    assert initializers(trainer) >= {name for name, _ in module.named_parameters()}
    assert trainer.global_step_ == trainer.current_step == len(rates)


def _torch_step(model, optimizer, batch, rate: float) -> None:
    model.zero_grad()
    my_loss(model(batch[0]), batch[1]).backward()
    optimizer.optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def test_a_frozen_weight_and_the_buffer_keep_their_values_and_the_others_move():
    before = NeuralNet().state_dict()
    trainer = make(frozen_weights=["fc1.weight"])
    train(trainer, range(2))
    for name, value in trainer.state_dict().items():
        assert torch.equal(value, before[name]) == (name in ("fc1.weight", "bias_buffer")), name


def test_a_state_with_a_frozen_weight_evaluates_alike_in_another_trainer():
    first, second = make(frozen_weights=["fc1.weight"]), make(frozen_weights=["fc1.weight"])
    train(first, range(3))
    second.load_state_dict(first.state_dict())
    assert second.eval_step(*digits(9))[0].item() == first.eval_step(*digits(9))[0].item()


# -- inputs by keyword, not in the order of forward ---------------------------------------------------


class Reordered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(2, 4)

    def forward(self, y=None, x=None):
        return self.linear(x) if y is None else self.linear(x) + y


def test_a_described_input_reaches_the_argument_of_its_name_wherever_that_is():
    desc = ModelDescription(
        [IODescription("x", [4, 2], torch.float32), IODescription("label", [4], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", [4, 4], torch.float32)],
    )
    model = Reordered()
    trainer = make(Reordered(), nn.functional.cross_entropy, desc)
    x, label = torch.randn(4, 2, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 3, 1, 1])
    optimizer = SGD(dict(model.named_parameters()), 0.1)
    for _ in range(3):
        loss, output = trainer.train_step(x=x, label=label, Learning_Rate=torch.tensor([0.1]))
        torch.testing.assert_close(output, model(x=x).detach())
        model.zero_grad()
        expected = nn.functional.cross_entropy(model(x=x), label)
        expected.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.state_dict().keys() == {"linear.weight", "linear.bias"}


# -- a small BERT in ONNX, LAMB ------------------------------------------------------------------------


def bert():
    path = pathlib.Path(__file__).parent / "scripts" / "bert.py"
    spec = importlib.util.spec_from_file_location("first_generation_bert", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BERT = bert()
RATES = [0.0, 0.01, 0.02, 0.02, 0.015, 0.01, 0.005, 0.002]


def bert_description() -> ModelDescription:
    names = ["input_ids", "token_type_ids", "attention_mask", "masked_lm_labels"]
    inputs = [IODescription(name, ["batch", BERT.SEQUENCE], torch.int64) for name in names]
    inputs += [IODescription("next_sentence_labels", ["batch"], torch.int64)]
    return ModelDescription(inputs, [IODescription("loss", [], torch.float32)])


def attributes(name: str) -> dict:
    return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0 if BERT.no_decay(name) else 0.01, "epsilon": 1e-6}


def bert_trainer(model, **options) -> ORTTrainer:
    return ORTTrainer(model, None, bert_description(), "LambOptimizer", attributes, RATE, "cpu", **options)


def torch_bert() -> nn.Module:
    torch.manual_seed(1)
    return BERT.BertForPreTraining(dropout=0.0)


@pytest.fixture(scope="module")
def bert_toy(tmp_path_factory) -> onnx.ModelProto:
    """The model and its loss as an ONNX file whose only output is the loss."""
    path = str(tmp_path_factory.mktemp("bert") / "bert_toy.onnx")
    trainer = bert_trainer(torch_bert())
    trainer.eval_step(*BERT.sentences(0))
    trainer.save_as_onnx(path)
    return onnx.load(path)


def bert_in_pytorch(rates, accumulation: int = 1) -> list[float]:
    model, losses = torch_bert(), []
    decay = lambda name: 0.0 if BERT.no_decay(name) else 0.01  # noqa: E731
    optimizer = Lamb(dict(model.named_parameters()), 1.0, decay)
    for step, rate in enumerate(rates):
        loss = model(*BERT.sentences(step))
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            for group in optimizer.optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            model.zero_grad()
    return losses


@pytest.mark.parametrize("accumulation", [slow(1), slow(2), 4])
def test_bert_in_onnx_trains_with_lamb_like_pytorch(accumulation, bert_toy):
    trainer = bert_trainer(bert_toy, gradient_accumulation_steps=accumulation)
    losses = [trainer.train_step(*BERT.sentences(step), torch.tensor([rate])).item() for step, rate in enumerate(RATES)]
    assert losses == pytest.approx(bert_in_pytorch(RATES, accumulation), rel=1e-4)
    assert trainer.global_step_ == len(RATES) // accumulation


def test_bert_in_onnx_with_a_changed_weight_is_saved_and_loaded_exactly(bert_toy, tmp_path):
    trainer, again = bert_trainer(bert_toy), bert_trainer(bert_toy)
    trainer.train_step(*BERT.sentences(0), torch.tensor([0.01]))
    changed = trainer.state_dict()
    changed["pooler.weight"] += 10
    trainer.load_state_dict(changed)
    save_checkpoint(trainer, str(tmp_path))
    load_checkpoint(again, str(tmp_path))
    state = again.state_dict()
    assert state.keys() == changed.keys()
    for name, value in changed.items():
        assert torch.equal(state[name], value), name


def test_bert_in_onnx_takes_batches_of_any_size_without_compiling_anew(bert_toy):
    trainer = bert_trainer(bert_toy)
    graph = trainer.training_graph
    for size in (4, 1, 3, 7, 2):
        batch = BERT.sentences(0, size)
        expected = torch_bert()(*batch).item()
        assert trainer.eval_step(*batch).item() == pytest.approx(expected, rel=1e-5)
    assert trainer.training_graph is graph
