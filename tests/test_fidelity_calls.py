"""How a module is called and what it returns: by name where names agree, else in order; nested and named outputs."""

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import SchemaError, UnsupportedModelError

A, B, C = (torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
Pair = collections.namedtuple("Pair", ["output", "loss"])


@dataclasses.dataclass
class Result:
    hidden: tuple
    output: torch.Tensor
    loss: torch.Tensor | None = None


class Base(nn.Module):
    """y = linear(a) - 2 b + 3 c; b and c may be left out. The loss is the mean of y^2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def compute(self, a, b=None, c=None):
        y = self.linear(a)
        y = y if b is None else y - 2 * b
        return y if c is None else y + 3 * c


class Positional(Base):
    def forward(self, a, b=None, c=None):
        y = self.compute(a, b, c)
        return y.square().mean(), y


class Keywords(Base):
    def forward(self, **tensors):
        return Positional.forward(self, **tensors)


class More(Base):
    """Takes anything besides, as the models of Hugging Face do."""

    def forward(self, a, b=None, c=None, **unused):
        return Positional.forward(self, a, b, c)


class Beside(Base):
    """Takes all but the first by name."""

    def forward(self, a, **more):
        return Positional.forward(self, a, **more)


class KeywordOnly(Base):
    def forward(self, a, *, c=None, **unused):
        return Positional.forward(self, a, None, c)


class Named(Base):
    """Its loss comes last, under its name."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, a, b=None, c=None):
        loss, y = Positional.forward(self, a, b, c)
        made = {
            "dict": lambda: {"hidden": (a, (y,)), "output": y, "loss": loss},
            "dataclass": lambda: Result((a, (y,)), y, loss),
            "named tuple": lambda: Pair(y, loss),
        }
        return made[self.kind]()


class WithoutLoss(Base):
    def forward(self, a):
        return {"hidden": a, "output": self.compute(a)}


def trained(module, inputs, outputs=("loss", "output"), loss_fn=None):
    """One step from copies of the same weights; returns what it gives and the outputs' names."""
    description = ModelDescription(
        [IODescription(name, ["batch", 6], torch.float32) for name in inputs],
        [IODescription(name, []) for name in outputs],
    )
    trainer = make(module, loss_fn=loss_fn, desc=description)
    return trainer.train_step(**inputs, Learning_Rate=0.0)


CALLS = {
    "all in order": (Positional, {"a": A, "b": B, "c": C}),
    "names in another order": (Positional, {"c": C, "a": A, "b": B}),
    "an optional one left out": (Positional, {"a": A, "c": C}),
    "**kwargs": (Keywords, {"c": C, "a": A}),
    "more than go by position, with **kwargs": (Beside, {"a": A, "c": C}),
    "those in another order": (Beside, {"c": C, "b": B, "a": A}),
    "keyword-only": (KeywordOnly, {"c": C, "a": A}),
    "other names beside **kwargs, in order": (More, {"first": A, "second": B}),
    "other names, in order": (Positional, {"first": A, "second": B}),
}


@pytest.mark.parametrize("case", CALLS)
def test_inputs_go_where_their_names_say(case):
    kind, inputs = CALLS[case]
    module = kind()
    by_name = {"first": "a", "second": "b"}
    with torch.no_grad():
        y = module.compute(**{by_name.get(name, name): x for name, x in inputs.items()})
    loss, output = trained(module, inputs)
    torch.testing.assert_close(output, y)
    torch.testing.assert_close(loss, y.square().mean())


def test_a_hook_before_the_forward_of_the_module_is_given_what_it_is_called_with():
    torch.manual_seed(0)
    module = Positional()
    module.register_forward_pre_hook(lambda layer, given: (2 * given[0], *given[1:]))
    with torch.no_grad():
        y = module.compute(2 * A, B)
    _, output = trained(module, {"a": A, "b": B})
    torch.testing.assert_close(output, y)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "named tuple"])
def test_named_outputs_are_found_by_name_in_any_order(kind):
    module = Named(kind)
    with torch.no_grad():
        y = module.compute(A, B)
    loss, output = trained(module, {"a": A, "b": B})
    torch.testing.assert_close(output, y)
    torch.testing.assert_close(loss, y.square().mean())


def test_with_a_loss_function_the_other_outputs_are_found_by_name_too():
    module = WithoutLoss()
    with torch.no_grad():
        y = module.compute(A)
    loss, output = trained(
        module, {"a": A, "label": B}, loss_fn=lambda prediction, label: (prediction["output"] - label).square().mean()
    )
    torch.testing.assert_close(output, y)
    torch.testing.assert_close(loss, (y - B).square().mean())


def test_outputs_of_other_names_are_taken_in_order_however_they_are_nested():
    class Nested(Base):
        def forward(self, a):
            y = self.compute(a)
            return {"x": y.square().mean(), "none": None, "rest": [y, {"deep": (y + 1,)}]}

    module = Nested()
    with torch.no_grad():
        y = module.compute(A)
    loss, first, second = trained(module, {"a": A}, outputs=("loss", "first", "second"))
    for found, expected in ((loss, y.square().mean()), (first, y), (second, y + 1)):
        torch.testing.assert_close(found, expected)


def test_a_name_that_forward_does_not_take_is_an_error_when_there_is_no_place_for_it():
    with pytest.raises(SchemaError, match=r"takes 3 inputs \(a, b, c\), but 4 are described \(a, b, c, d\)"):
        trained(Positional(), {"a": A, "b": B, "c": C, "d": A})
    with pytest.raises(
        SchemaError, match=r"takes 1 inputs \(a, and more beside these names\), but 2 are described \(x, c\)"
    ):
        trained(Beside(), {"x": A, "c": C})


class Caching(nn.Module):
    """Fits a buffer to the first batch, as ConViT does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("places", torch.zeros(1))

    def forward(self, x):
        if self.places.shape[0] != x.shape[1]:
            self.places = torch.arange(x.shape[1], dtype=torch.float32)
        return self.layer(x + self.places).square().mean()


def test_a_buffer_that_changes_its_shape_is_refused_until_it_has_done_so():
    description = ModelDescription(
        [IODescription("x", ["n", 4], torch.float32)], [IODescription("loss", [], torch.float32)]
    )
    rate, x = IODescription("Learning_Rate", [1], torch.float32), torch.randn(3, 4)
    model = Caching()
    with pytest.raises(UnsupportedModelError, match=r"the shape of 'places' from \[1\] to \[4\].* run one batch"):
        ORTTrainer(model, None, description, "SGDOptimizer", None, rate, "cpu").train_step(x, torch.tensor([0.1]))
    model = Caching()
    expected = model(x).item()
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, rate, "cpu")
    assert trainer.train_step(x, torch.tensor([0.1])).item() == pytest.approx(expected, rel=1e-5)


class Counting(nn.Module):
    """Adds to a buffer."""

    def __init__(self, change, **buffers):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 1), change
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        self.change(self)
        return self.layer(x + sum(b.sum() for b in self.buffers())).square().mean()


def add(m):
    m.total.add_(1)


def replace(m):
    m.total = m.total + 0.5


SHARED = torch.zeros(8)
REFUSED = {
    "another dtype": (replace, {"total": torch.tensor(0)}, r"dtype of 'total' from torch.int64 to torch.float32"),
    "one buffer twice": (add, {"total": SHARED, "other": SHARED}, "'total' and 'other' share memory"),
    "a view": (add, {"other": SHARED[2:4], "total": SHARED}, "'other' and 'total' share memory, and forward changes"),
    "a view that is written to": (add, {"whole": SHARED, "total": SHARED[2:4]}, "'total' and 'whole' share memory"),
    "a new tensor": (replace, {"total": SHARED, "view": SHARED[2:4]}, "'total' and 'view' share memory"),  # the view stays
}  # fmt: skip


def step(model, x):
    description = ModelDescription(
        [IODescription("x", ["n", 4], torch.float32)], [IODescription("loss", [], torch.float32)]
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, rate, "cpu")
    return [trainer.train_step(x, torch.tensor([0.01])).item() for _ in range(3)]


@pytest.mark.parametrize("name", REFUSED)
def test_buffers_that_a_graph_cannot_have_as_forward_leaves_them_are_refused_by_name(name):
    change, buffers, text = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=text):
        step(Counting(change, **buffers), torch.randn(3, 4))


def test_buffers_that_lie_side_by_side_in_one_storage_train():
    model, x = Counting(add, total=SHARED[:4], other=SHARED[4:]), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    found, expected, optimizer = step(model, x), [], torch.optim.SGD(twin.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        expected.append(twin(x))
        expected[-1].backward()
        optimizer.step()
    assert found == pytest.approx([loss.item() for loss in expected], rel=1e-4)
