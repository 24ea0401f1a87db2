"""Labels of several tensors, which a criterion takes in a tuple, a list or a dict."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from small import LR, make, net
from test_attach_loss import inference_file
from test_sketch import assert_parameters_close, sgd, torch_step
from torch import nn
from torch.nn import functional as F

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.errors import SchemaError

Target = collections.namedtuple("Target", ["first", "second"])


def batch(step: int, rows: int = 6) -> tuple[torch.Tensor, ...]:
    """Inputs, two labels per row and a number between them, as for mixed pictures."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 3, (2, rows), generator=generator)
    return torch.randn(rows, 4, generator=generator), labels[0], labels[1], torch.rand((), generator=generator)


def mixed(prediction, first, second, share):
    return share * F.cross_entropy(prediction, first) + (1 - share) * F.cross_entropy(prediction, second)


FORMS = {
    "tuple": (lambda a, b, s: (a, b, s), lambda p, y: mixed(p, *y)),
    "list": (lambda a, b, s: [a, b, s], lambda p, y: mixed(p, *y)),
    "dict": (lambda a, b, s: {"b": b, "s": s, "a": a}, lambda p, y: mixed(p, y["a"], y["b"], y["s"])),
    "named tuple": (lambda a, b, s: (Target(a, b), s), lambda p, y: mixed(p, y[0].first, y[0].second, y[1])),
    "in each other": (
        lambda a, b, s: {"labels": [a, {"other": b}], "share": (s,)},
        lambda p, y: mixed(p, y["labels"][0], y["labels"][1]["other"], *y["share"]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_label_of_several_tensors_trains_as_in_pytorch(form, tmp_path):
    label_of, criterion = FORMS[form]
    model = net()
    reference = copy.deepcopy(model)
    trainer, optimizer = orttrainer.trainer(model, criterion, sgd(model)), sgd(reference)
    for step in range(5):
        x, *labels = batch(step, rows=6 + step % 2)
        loss, _ = trainer.step(x, label_of(*labels))
        torch.testing.assert_close(loss, torch_step(reference, optimizer, x, label_of(*labels), criterion))
    x, *labels = batch(9)
    expected = reference(x)
    loss, prediction = trainer.eval_step({"input": x}, label_of(*labels))
    torch.testing.assert_close(loss, criterion(expected, label_of(*labels)).detach())
    torch.testing.assert_close(prediction, expected.detach())
    assert_parameters_close(model, reference)
    trainer.export(tmp_path / "model.onnx")


def test_a_label_in_another_form_than_the_first_is_refused():
    label_of, criterion = FORMS["in each other"]
    model = net()
    trainer = orttrainer.trainer(model, criterion, sgd(model))
    x, *labels = batch(0)
    trainer.step(x, label_of(*labels))
    before = copy.deepcopy(model.state_dict())
    for wrong, said in (
        (labels[0], "a Tensor, and is described as {'labels': "),
        ({"labels": labels[:2]}, r"a dict of \['labels'\], and is described as {'labels': "),
        ({"labels": labels, "share": labels[2:]}, r"a list of 3, and is described as \['label_labels_0', "),
        ({"labels": labels[:2], "share": labels[2:]}, "a Tensor, and is described as {'other': "),
    ):
        with pytest.raises(SchemaError, match=said):
            trainer.step(x, wrong)
    with pytest.raises(SchemaError, match="a batch has a float where a tensor belongs"):
        trainer.step(x, {"labels": labels[:2], "share": 0.5})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


INPUTS = [
    IODescription("first", ["batch"], torch.int64),
    IODescription("x", ["batch", 4], torch.float32),
    IODescription("second", ["batch"], torch.int64),
    IODescription("share", [], torch.float32),
]
OUTPUTS = [IODescription("loss", []), IODescription("output", ["batch", 3])]
LABEL = {"a": "first", "rest": ["second", "share"]}


def criterion_of_label(prediction, label):
    return mixed(prediction, label["a"], *label["rest"])


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_described_labels_train_as_in_pytorch(kind, tmp_path):
    described = ModelDescription(INPUTS, OUTPUTS, label=LABEL)
    module = net() if kind == "torch" else inference_file(tmp_path)
    trainer = make(module, loss_fn=criterion_of_label, desc=described)
    reference = net()
    optimizer = sgd(reference, lr=LR.item())
    for step in range(4):
        x, first, second, share = batch(step, rows=6 + step % 2)
        label = {"a": first, "rest": [second, share]}
        expected = torch_step(reference, optimizer, x, label, criterion_of_label)
        torch.testing.assert_close(trainer.train_step(first, x, second, share, LR)[0], expected)
    state = trainer.state_dict()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", ["third", ["first", "third"], (), {"a": ["first", 3]}])
def test_a_label_of_names_that_are_no_inputs_is_refused(wrong):
    with pytest.raises(SchemaError, match="label must hold names of inputs, which are first, x, second, share; got "):
        ModelDescription(INPUTS, OUTPUTS, label=wrong)


def test_a_description_shows_its_label():
    assert (
        eval(repr(ModelDescription(INPUTS, OUTPUTS, label=LABEL)), vars(orttrainer) | {"torch": torch}).label_ == LABEL
    )


def test_a_loss_of_a_module_takes_several_tensors():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_variances = nn.Parameter(torch.zeros(2))

        def forward(self, predictions, labels):
            losses = torch.stack([F.cross_entropy(predictions[0], labels[0]), F.mse_loss(predictions[1], labels[1])])
            return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.classes, self.values = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return self.classes(x), self.values(x)

    torch.manual_seed(0)
    model, criterion = Heads(), Weighted()
    reference, reference_criterion = copy.deepcopy(model), copy.deepcopy(criterion)
    both = nn.ModuleList([reference, reference_criterion])
    trainer = orttrainer.trainer(model, criterion, sgd(nn.ModuleList([model, criterion])))
    optimizer = sgd(both)
    for step in range(5):
        x, first, *_ = batch(step)
        labels = first, x[:, :2].cos()
        loss, predictions = trainer.step(x, labels)
        assert len(predictions) == 2
        torch.testing.assert_close(loss, torch_step(reference, optimizer, x, labels, reference_criterion))
    assert_parameters_close(nn.ModuleList([model, criterion]), both)


SMALL = {
    "cross entropy of classes": (torch.uint8, F.cross_entropy),
    "one class that is left out": (torch.uint8, nn.CrossEntropyLoss(ignore_index=2)),
    "negative log likelihood": (torch.uint8, lambda p, y: F.nll_loss(p.log_softmax(1), y, reduction="sum")),
    "unsigned, of 16 bits": (torch.uint16, lambda p, y: F.cross_entropy(p, y.long())),
    "unsigned, of 64 bits": (torch.uint64, lambda p, y: F.mse_loss(p[:, 0], y.float())),
}


@pytest.mark.parametrize("case", SMALL)
def test_labels_of_small_integers_train_as_in_pytorch(case):
    dtype, criterion = SMALL[case]
    module, reference = net(), net()
    trainer, optimizer = orttrainer.trainer(module, criterion, sgd(module)), sgd(reference)
    for step, rows in enumerate((6, 5)):
        x, y, *_ = batch(step, rows)
        loss, _ = trainer.step(x, y.to(dtype))
        assert torch.isclose(loss, torch_step(reference, optimizer, x, y.to(dtype), criterion))
    assert_parameters_close(module, reference)
