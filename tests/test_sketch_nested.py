"""Batches whose arguments or label are tuples and dicts of tensors, as recurrent states and the targets of several heads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.errors import SchemaError

STEPS, WORDS, HIDDEN = 4, 7, 5


class Language(nn.Module):
    """Next words, by states that the caller carries from batch to batch."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(WORDS, 4), nn.LSTM(4, HIDDEN), nn.Linear(HIDDEN, WORDS)

    def forward(self, words, states):
        y, states = self.lstm(self.embedding(words), states)
        return self.head(y).flatten(0, 1), states


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.number, self.kind = nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x, change):
        x = x * change["scale"] + change["shift"]
        return {"number": self.number(x)[:, 0], "kind": self.kind(x)}


def of_words(scores, label):
    return F.cross_entropy(scores[0], label)


def of_heads(scores, label):
    """`label` is a tuple or a dict."""
    number, kind = label.values() if isinstance(label, dict) else label
    return F.mse_loss(scores["number"], number) + F.cross_entropy(scores["kind"], kind)


class Twins:
    """A trainer, and a copy of its model that PyTorch trains."""

    def __init__(self, model, criterion, **options):
        self.criterion, self.model, self.twin = criterion, model, copy.deepcopy(model)
        self.trainer = orttrainer.trainer(model, criterion, torch.optim.SGD(model.parameters(), lr=0.5), **options)
        self.optimizer = torch.optim.SGD(self.twin.parameters(), lr=0.5)

    def step(self, inputs, label):
        """Train both on a batch, compare them, and return what the trainer and the twin predicted."""
        loss, prediction = self.trainer.step(*inputs, label)
        predicted = self.twin(*inputs)
        expected = self.criterion(predicted, label)
        self.optimizer.zero_grad()
        expected.backward()
        self.optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
        for mine, other in zip(self.model.parameters(), self.twin.parameters()):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
        return prediction, predicted


def language(length, batch=2):
    return torch.randint(0, WORDS, (length, batch)), torch.randint(0, WORDS, (length * batch,))


DESCRIBED = ModelDescription(
    [IODescription("words", ["length", 2]), *(IODescription(name, [1, 2, HIDDEN]) for name in "hc"),
     IODescription("label", ["all"])],
    [IODescription("loss", []), IODescription("scores", ["all", WORDS]),
     *(IODescription(f"next_{name}", [1, 2, HIDDEN]) for name in "hc")],
)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"model_desc": DESCRIBED}], ids=["by the first batch", "described"])
def test_states_are_carried_from_batch_to_batch(options):
    torch.manual_seed(0)
    twins = Twins(Language(), of_words, **options)
    states = (torch.zeros(1, 2, HIDDEN), torch.zeros(1, 2, HIDDEN))
    for length in (3, 2, 5, 3) if options else (3, 3, 3, 3):
        words, label = language(length)
        (_, *states), (_, expected) = twins.step((words, tuple(states)), label)
        for mine, other in zip(states, expected):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-4, atol=1e-6)
    words, label = language(3)
    loss, _ = twins.trainer.eval_step(words, tuple(states), label)
    torch.testing.assert_close(loss, of_words(twins.model(words, tuple(states)), label).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", [tuple, lambda parts: dict(zip(("number", "kind"), parts))], ids=["tuple", "dict"])
def test_the_targets_of_several_heads(form):
    torch.manual_seed(0)
    twins = Twins(Heads(), of_heads)
    for rows in (5, 5, 3):
        change = {"scale": torch.rand(rows, 1), "shift": torch.randn(4)}
        twins.step((torch.randn(rows, 4), change), form([torch.randn(rows), torch.randint(0, 3, (rows,))]))


def test_another_form_than_that_of_the_first_batch_is_refused():
    trainer = Twins(Language(), of_words).trainer
    words, label = language(3)
    zeros = torch.zeros(1, 2, HIDDEN)
    trainer.step(words, (zeros, zeros), label)
    for states in ((zeros, zeros, zeros), zeros):
        with pytest.raises(SchemaError, match="what comes before the label, or something in it, is a "):
            trainer.step(words, states, label)
    with pytest.raises(SchemaError, match="a batch has a float where a tensor belongs"):
        trainer.step(words, (zeros, 0.5), label)
    with pytest.raises(SchemaError, match=r"input 'states_1', axis 0 .*: expected size 1 .*, got 2"):
        trainer.step(words, (zeros, zeros.repeat(2, 1, 1)), label)


def test_names_of_what_lies_in_dicts_give_way_to_those_of_arguments():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a, a_b, label):
            return self.layer(a["b"] + 2 * a_b + 3 * label)

    torch.manual_seed(0)
    model = Sums()
    expected, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = orttrainer.trainer(model, F.cross_entropy, optimizer)
    for rows in (5, 3):
        inputs = {"a": {"b": torch.randn(rows, 4)}, "a_b": torch.randn(rows, 4), "label": torch.randn(rows, 4)}
        kinds = torch.randint(0, 3, (rows,))
        loss, scores = trainer.eval_step(inputs, kinds)
        torch.testing.assert_close(scores, expected(**inputs).detach())
        torch.testing.assert_close(loss, F.cross_entropy(expected(**inputs), kinds).detach())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, shift=None, scale=None, **rest):
        y = self.layer(x) * scale
        return y if shift is None else y + shift + rest["more"]


class PassesOn(nn.Module):
    """As wrappers of models do, adapters among them."""

    def __init__(self):
        super().__init__()
        self.inner = Scaled()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("make_model", [Scaled, PassesOn])
@pytest.mark.parametrize(
    "names",
    [("scale", "x"), ("x", "scale", "unused"), ("more", "scale", "x", "shift")],
    ids=lambda names: " ".join(names),
)
def test_what_forward_takes_by_keywords_that_it_does_not_name_is_called_by_name(make_model, names):
    torch.manual_seed(0)
    sizes, twins = {"x": 4, "scale": 1}, Twins(make_model(), F.cross_entropy)
    for rows in (5, 5, 3):
        inputs, kinds = {name: torch.randn(rows, sizes.get(name, 3)) for name in names}, torch.randint(0, 3, (rows,))
        loss, scores = twins.trainer.step(inputs, kinds)
        predicted = twins.twin(**inputs)
        expected = F.cross_entropy(predicted, kinds)
        twins.optimizer.zero_grad()
        expected.backward()
        twins.optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(scores, predicted.detach(), rtol=1e-4, atol=1e-6)
    for mine, other in zip(twins.model.parameters(), twins.twin.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_predictions_behind_what_is_no_tensor_are_returned():
    class Likely(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            mean = self.layer(x)
            return {"mean": mean, "likely": torch.distributions.Normal(mean, 1.0), "name": "mean", "twice": 2 * mean}

    def unlikely(prediction, y):
        return -prediction["likely"].log_prob(y).mean()

    twins = Twins(Likely(), unlikely)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    expected = twins.twin(x)
    for call in (twins.trainer.eval_step, twins.trainer.step):
        loss, found = call(x, y)
        torch.testing.assert_close(loss, unlikely(expected, y))
        torch.testing.assert_close(found, (expected["mean"], expected["twice"]))
