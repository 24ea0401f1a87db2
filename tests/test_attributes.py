"""Attributes that are changed between two steps: numbers, flags, hooks, what is in eval mode. The steps behind it have them."""

from __future__ import annotations

import argparse
import copy
import functools
import types

import numpy as np
import pairs
import pytest
import torch
from marks import slow, usual
from pairs import RATE, Pair
from small import batch, description
from torch import nn

from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.engine.ways import check_can_go_on
from orttrainer.errors import UnsupportedModelError

GLOBAL = 1.0
options = argparse.Namespace(gain=1.0, other=0)
mean = torch.zeros(())


class Annealed(nn.Module):
    """Reads attributes of every kind."""

    power = 1.0  # of the class: an instance may have its own

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.beta, self.use, self.scales = 1.0, True, [1.0, 1.0]
        self.shift, self.config = torch.zeros(6), types.SimpleNamespace(gain=1.0, name="x")
        self.offset, self.spread = 0.0, 1.0
        self.steps, self.step, self.kept, self.last = 0, 0, None, None

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.ones(6)
        y = self.norm(self.layer(x) - x.mean()) * self.beta * self.scales[1] + self.shift * self.kept
        if self.use:
            y = torch.tanh(y) ** self.power * self.config.gain
        if not self.training:
            self.last = y
        return self.head(spread(self, y) + getattr(self, "offset"))  # noqa: B009


def spread(module, y):
    return y * module.spread * GLOBAL * options.gain


def set_entry(module):
    module.scales[1] = 3.0


def freeze(module):
    module.norm.eval()


CHANGES = {
    "a number": lambda m: setattr(m, "beta", 2.0),
    "a flag": lambda m: setattr(m, "use", False),
    "an entry of a list": set_entry,
    "a tensor in a list": lambda m: m.scales.__setitem__(1, torch.tensor([1.0, 2, 3, 4, 5, 6])),
    "another list": lambda m: setattr(m, "scales", [1.0, 0.5]),
    "a tensor in place": lambda m: m.shift.add_(0.5),
    "another tensor": lambda m: setattr(m, "shift", torch.full((6,), -0.5)),
    "an entry of a configuration": lambda m: setattr(m.config, "gain", 4.0),
    "what the class had": lambda m: setattr(m, "power", 2.0),
    "what another function reads": lambda m: setattr(m, "spread", 3.0),
    "what is read by its name": lambda m: setattr(m, "offset", 1.0),
    "a hook": lambda m: m.layer.register_forward_hook(lambda layer, given, y: 2 * y),
    "a hook before": lambda m: m.head.register_forward_pre_hook(lambda layer, given: (given[0] + 1,)),
    "a layer in eval mode": freeze,
    "the momentum of a norm": lambda m: setattr(m.norm, "momentum", 0.5),
    "forward itself": lambda m: setattr(m, "forward", lambda x: m.head(m.norm(m.layer(x)) - 1)),
}


class Mixed(nn.Module):
    """Reads what lies deeper than its own attributes."""

    temperature, offsets = 1.0, [0.0, 0.0]

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0), table={"a": [1.0, 2.0]})
        self.own, self.slotted, self.times = Record(), Slotted(), (lambda numbers: lambda y: y * numbers[0])([1.0])
        self.scale, self.parts = np.ones(6, np.float32), [torch.ones(6), torch.zeros(6)]

    def forward(self, x):
        y = self.layer(x) * self.config.inner.gain * self.config.table["a"][1] / self.temperature + self.offsets[0]
        y = (
            squashed(y) ** self.slotted.power * torch.from_numpy(self.scale) * self.parts[0]
            + self.parts[1]
            + Constants.shift
        )
        return self.head(self.times(y) * self.own.inner.power * pairs.FACTOR * schedule())


class Record:
    """An object within another, of a class of the user's."""

    def __init__(self):
        self.inner = types.SimpleNamespace(power=1.0)

    def __call__(self):
        return self.inner.power


class Constants:
    shift, other = 0.5, 1.0


schedule = Record()


class Slotted:
    __slots__ = ("power",)

    def __init__(self):
        self.power = 1.0


def squashed(y):
    return torch.tanh(y)


DEEPER = {
    "an attribute of the class": lambda m: setattr(Mixed, "temperature", 2.0),
    "a list of the class": lambda m: Mixed.offsets.__setitem__(0, 0.5),
    "a configuration in another": lambda m: setattr(m.config.inner, "gain", 3.0),
    "another configuration": lambda m: setattr(m.config, "inner", types.SimpleNamespace(gain=0.5)),
    "a list in a dict": lambda m: m.config.table["a"].__setitem__(1, 3.0),
    "an object in an object": lambda m: setattr(m.own.inner, "power", 2.0),
    "an array in place": lambda m: m.scale.__setitem__(2, 4.0),
    "a tensor in a list": lambda m: m.parts.__setitem__(0, torch.full((6,), 2.0)),
    "a tensor in a list in place": lambda m: m.parts[1].add_(0.5),
    "a global class": lambda m: setattr(Constants, "shift", -1.0),
    "an object without a dictionary": lambda m: setattr(m.slotted, "power", 2.0),
    "a function": lambda m: globals().update(squashed=lambda y: torch.relu(y)),
    "a list around a function": lambda m: m.times.__closure__[0].cell_contents.__setitem__(0, 2.0),
    "a variable of another module": lambda m: setattr(pairs, "FACTOR", 2.0),
    "a global object": lambda m: setattr(schedule.inner, "power", 2.0),
    "a variable around a function": lambda m: setattr(m.times.__closure__[0], "cell_contents", [3.0]),
}


@pytest.mark.parametrize("change", usual(DEEPER, *[*DEEPER][::2]))
def test_what_lies_deeper_is_followed(change, exports, monkeypatch):
    for owner, name in ((Mixed, "temperature"), (Constants, "shift"), (pairs, "FACTOR"), (schedule.inner, "power")):
        monkeypatch.setattr(owner, name, getattr(owner, name, 1.0), raising=False)  # which is undone behind the test
    monkeypatch.setattr(Mixed, "offsets", [0.0, 0.0])
    monkeypatch.setitem(globals(), "squashed", lambda y: torch.tanh(y))
    pair = Pair(Mixed(), optimizer="SGD with momentum")
    pair.steps(2)
    pair.change(DEEPER[change])
    pair.steps(2)
    Constants.other = exports  # which nothing reads
    again = types.FunctionType(squashed.__code__, globals())  # as where the cell of a notebook is run once more
    monkeypatch.setitem(globals(), "squashed", again)
    pair.steps(1)
    assert len(exports) == 2


@pytest.mark.parametrize(("owner", "name"), [("test_attributes", "GLOBAL"), ("test_attributes.options", "gain")])
def test_global_variables_are_followed(owner, name, monkeypatch, exports):
    pair = Pair(Annealed())
    pair.steps(2)
    monkeypatch.setattr(f"{owner}.{name}", 3.0)
    pair.steps(2)
    monkeypatch.setattr("test_attributes.options.other", 1)  # which nothing reads
    monkeypatch.setattr("test_attributes.mean", torch.ones(()))  # a global of a name that an attribute has in forward
    pair.steps(1)
    assert len(exports) == 2


def test_a_global_that_a_loss_reads_is_followed(monkeypatch):
    pair = Pair(Annealed(), loss=lambda scores, label: GLOBAL * nn.functional.cross_entropy(scores, label))
    pair.steps(2)
    monkeypatch.setattr("test_attributes.GLOBAL", 0.5)
    pair.steps(2)


class Focal:
    """A loss that is no module."""

    def __init__(self):
        self.gamma, self.calls = 1.0, 0

    def __call__(self, scores, label):
        return self.compute(scores, label)

    def compute(self, scores, label):
        self.calls += 1
        found = nn.functional.cross_entropy(scores, label, reduction="none")
        return (found * (1 - torch.exp(-found)) ** self.gamma).mean()


def scaled(scores, label, scale):
    return scale * nn.functional.cross_entropy(scores, label)


def in_closures():
    """A loss, and what sets the variable that it reads."""
    weight = 1.0

    def inner(scores, label):
        return weight * nn.functional.cross_entropy(scores, label)

    def loss(scores, label):
        return inner(scores, label) + 1

    def change():
        nonlocal weight
        weight = 4.0

    return loss, change


def of_an_object():
    loss = Focal()
    return loss, lambda: setattr(loss, "gamma", 3.0)


def of_a_method():
    loss = Focal()
    return loss.compute, lambda: setattr(loss, "gamma", 3.0)


def partial():
    loss = functools.partial(scaled, scale=1.0)
    return loss, lambda: loss.keywords.update(scale=2.0)


def of_defaults():
    def loss(scores, label, weights=[1.0]):  # noqa: B006
        return weights[0] * nn.functional.cross_entropy(scores, label)

    return loss, lambda: loss.__defaults__[0].__setitem__(0, 2.0)


def of_a_function():
    def loss(scores, label):
        return loss.weight * nn.functional.cross_entropy(scores, label)

    loss.weight = 1.0
    return loss, lambda: setattr(loss, "weight", 3.0)


def of_functions():
    chosen = {"squash": torch.tanh}
    loss = lambda scores, label: nn.functional.cross_entropy(chosen["squash"](scores), label)  # noqa: E731
    return loss, lambda: chosen.update(squash=torch.sigmoid)


@pytest.mark.parametrize(
    "made", [in_closures, of_an_object, slow(of_a_method), partial, of_defaults, slow(of_a_function), of_functions]
)
def test_what_a_loss_that_is_no_module_has_is_followed(made, exports):
    loss, change = made()
    pair = Pair(Annealed(), loss=loss)
    pair.reference_loss = loss  # not a copy
    pair.steps(2)
    change()
    pair.steps(2)
    assert len(exports) == 2


@pytest.mark.parametrize("name", usual(CHANGES, *[*CHANGES][::2]))
def test_the_next_step_has_what_was_changed(name):
    pair = Pair(Annealed())
    pair.steps(2)
    pair.change(CHANGES[name])
    pair.steps(3)


def test_in_the_midst_of_a_block_of_batches_the_sums_of_gradients_stay():
    pair = Pair(Annealed(), blocks=3)
    pair.steps(4)
    pair.change(CHANGES["a number"])
    pair.steps(5)


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.first, self.second = nn.Linear(4, 3), 1.0, 1.0

    def forward(self, x):
        return one_way(self, x) if x.sum() > 0 else other_way(self, x)


def one_way(module, x):
    return module.head(x) * module.first


def other_way(module, x):
    return module.head(x + module.second)


def test_what_another_way_reads_is_followed_and_ways_in_turns_are_kept(exports):
    pair = Pair(TwoWays())
    positive = [bool(batch(step)[0].sum() > 0) for step in range(12)]
    assert True in positive[:4] and False in positive[:4] and True in positive[4:] and False in positive[4:]
    pair.steps(4)
    assert len(exports) == 2
    pair.change(lambda m: setattr(m, "second", 2.0))
    pair.change(lambda m: setattr(m, "first", 3.0))
    pair.steps(8)
    assert len(exports) == 4


def test_attributes_of_a_loss_are_followed():
    pair = Pair(Annealed(), loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    pair.steps(1)
    pair.loss.label_smoothing = pair.reference_loss.label_smoothing = 0.5
    pair.steps(2)


def test_a_frozen_norm_trains_again_when_it_is_freed(exports):
    pair = Pair(Annealed())
    for change in (freeze, lambda m: m.train(), freeze, lambda m: m.train()):
        pair.steps(2)
        pair.change(change)
    pair.steps(1)
    assert len(exports) == 2  # a graph that was there is taken again


def test_who_evaluates_and_goes_on_without_train_has_the_same_layers_frozen(exports):
    """train_step trains a module in eval mode, too, as the legacy engine did."""
    pair = Pair(Annealed())
    pair.change(freeze)
    pair.steps(2)
    pair.module.eval()
    pair.steps(2)
    pair.change(CHANGES["a number"])  # and so a graph that is made then
    pair.steps(2)
    assert len(exports) == 2


class KeepsFrozen(Annealed):
    """Its norm is never in train mode, as detectors have it."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def test_a_module_that_is_to_be_compiled_is_followed():
    """`torch.compile` has layers whose mode is a property, and code that is not run as it stands."""
    pair = Pair(Annealed())
    pair.engine = Engine(
        torch.compile(pair.module), pair.loss, description(), OptimizerChoice("AdamOptimizer", clip=False), Settings()
    )
    pair.steps(2)
    for name in ("a number", "what another function reads", "a layer in eval mode"):
        pair.change(CHANGES[name])
        pair.steps(2)


def test_a_train_of_the_modules_own_holds(exports):
    pair = Pair(KeepsFrozen().eval())
    pair.reference.train()
    pair.steps(2)
    pair.module.train()
    pair.steps(1)
    pair.module.eval()
    pair.change(CHANGES["a number"])
    pair.steps(2)
    assert len(exports) == 2


def test_what_forward_does_not_read_or_writes_itself_costs_nothing(exports):
    pair = Pair(Annealed())
    for step in range(3):
        pair.steps(1)
        pair.module.steps = step
        pair.module.step = step  # torch's own code knows such a name
        pair.module.note = f"step {step}"
        pair.module.kept = torch.ones(6)
    assert len(exports) == 1


def test_hooks_of_other_modules_cost_nothing(exports):
    pair, other = Pair(Annealed()), nn.Linear(2, 2)
    for _ in range(3):
        pair.steps(1)
        other.register_forward_hook(lambda layer, given, y: None)
        assert pair.engine._ways._attributes.hold(trains=True)
    assert len(exports) == 1


def test_what_an_evaluation_leaves_is_looked_at_once(exports, caplog):
    pair = Pair(Annealed())
    for step in range(3):
        pair.steps(1)
        pair.module.eval()(batch(step)[0])
        pair.module.train()
    assert len(exports) == 2
    assert "'last' changed, which forward reads, so the module was exported again" in caplog.text
    assert "made no difference" in caplog.text


def test_eval_step_has_what_was_changed():
    pair = Pair(Annealed())
    pair.steps(1)
    pair.change(CHANGES["a number"])
    x, y = batch(5)
    found = pair.engine.eval_step({"x": x, "label": y})[1]
    pair.reference.eval()
    torch.testing.assert_close(found, pair.reference(x).detach(), rtol=1e-4, atol=1e-5)
    found = pair.engine.eval_step({"x": x}, ["output"])[0]
    torch.testing.assert_close(found, pair.reference(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_change_with_which_forward_fails_changes_nothing_and_can_be_undone():
    pair = Pair(Annealed())
    pair.steps(1)
    before = copy.deepcopy(pair.module.state_dict())
    x, y = batch(9)
    pair.module.beta = "none"
    for _ in range(2):
        with pytest.raises(TypeError):
            pair.engine.train_step({"x": x, "label": y}, RATE)
    for name, value in pair.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    pair.module.beta = 1.0
    pair.steps(2)


def test_on_several_ranks_the_state_stays():
    graphs = []
    for frozen in (False, True):
        pair = Pair(Annealed())
        if frozen:
            pair.module.head.bias.requires_grad_(False)
        pair.engine.compile(dict(zip(("x", "label"), batch(0))))
        graphs.append(pair.engine.training_graph)
    check_can_go_on(graphs[0], graphs[0], alone=False, accumulated=0)
    with pytest.raises(UnsupportedModelError, match="Make a new ORTTrainer, or undo the change"):
        check_can_go_on(*graphs, alone=False, accumulated=0)
