"""What is done to a module between two steps is followed or refused: no step trains what the module does not have."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from pairs import OPTIMIZERS, RATE, Pair
from small import LR, batch, make, torch_step
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import prune

from orttrainer.errors import ModelError, StateError
from orttrainer.state.seen import Seen


class Layers(nn.Module):
    """Two layers of one shape, running statistics, a parameter of one element, and a bias that is None."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.act = nn.BatchNorm1d(4), nn.Tanh()
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.act(self.norm(self.second(self.act(self.first(x))))) * self.scale)


def exchange_data(m):
    m.first.weight.data, m.second.weight.data = m.second.weight.data, m.first.weight.data


def exchange_parameters(m):
    m.first.weight, m.second.weight = m.second.weight, m.first.weight


def average(m):
    """As an exponential moving average puts its own tensors in the place of the module's."""
    for parameter in m.parameters():
        parameter.data = parameter.data * 0.9


def transpose(m):
    m.second.weight.data = m.second.weight.data.t()


FOLLOWED = {
    "data exchanged between layers": exchange_data,
    "parameters exchanged between layers": exchange_parameters,
    "averages": average,
    "a transposed view of the same memory": transpose,
    "one element of equal value and other memory": lambda m: setattr(
        m, "scale", nn.Parameter(m.scale.detach().clone())
    ),
    "another parameter of the same memory": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.data)),
    "a buffer": lambda m: setattr(m.norm, "running_mean", torch.full((4,), 0.5)),
    "there and back in float64": lambda m: m.double().float(),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    "a buffer that forward does not use": lambda m: m.act.register_buffer("unused", torch.ones(2)),
}


@pytest.mark.parametrize("change", FOLLOWED)
def test_other_memory_is_taken_over_and_trained(change):
    torch.manual_seed(3)
    module = Layers()
    reference = copy.deepcopy(module)
    trainer = make(module, check_export=False)
    for step in range(4):
        if step < 3:  # before the first step, too, which makes the graph
            for changed in (module, reference):
                FOLLOWED[change](changed)
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], torch_step(reference, *batch(step)))
        torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()), rtol=1e-4, atol=1e-6)


REFUSED = {
    "a bias that is gone": (lambda m: setattr(m.head, "bias", None), "'head.bias' of the module is gone"),
    "a weight that is deleted": (lambda m: delattr(m.head, "weight"), "'head.weight' of the module is gone"),
    "a buffer that is gone": (lambda m: setattr(m.norm, "running_var", None), "'norm.running_var' of the module is gone"),
    "another dtype": (lambda m: m.double(), r"'scale' of the module is torch.float64 \[1\]"),
    "an equal layer": (lambda m: setattr(m, "first", copy.deepcopy(m.first)), r"layers .* compiled, .*: \['first'\]"),
    "layers exchanged": (
        lambda m: m._modules.update(first=m.second, second=m.first), r"layers .* compiled, .*: \['first', 'second'\]",
    ),
    "a layer inside a leaf": (lambda m: m.act.add_module("inner", nn.PReLU()), r"layers .* compiled, .*: \['inner'\]"),
    "another shape of the same memory": (
        lambda m: setattr(m.head.weight, "data", m.head.weight.data.view(4, 3)), r"'head.weight' .* is torch.float32 \[4, 3\]",
    ),
    "another dtype of the same memory": (
        lambda m: setattr(m.norm, "running_var", m.norm.running_var.view(torch.int32)),
        r"'norm.running_var' .* is torch.int32 \[4\], but was torch.float32 \[4\]",
    ),
    "a bias that was None": (
        lambda m: setattr(m.second, "bias", nn.Parameter(torch.ones(4))), r"were None .*: \['second.bias'\]",
    ),
    "weights tied": (lambda m: setattr(m.second, "weight", m.first.weight), r"tied or untied .*: \['first.weight', 'second.weight'\]"),
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_what_the_graph_cannot_follow_is_refused_and_nothing_is_trained(change):
    module = Layers()
    trainer = make(module, check_export=False)
    trainer.train_step(*batch(), LR)
    apply, text = REFUSED[change]
    apply(module)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stored = {name: tensor.clone() for name, tensor in trainer._engine._state.stored.items()}
    for _ in range(2):  # it is not forgotten once it was told
        with pytest.raises(StateError, match=text):
            trainer.train_step(*batch(), LR)
    for kept, now in ((before, module.state_dict()), (stored, trainer._engine._state.stored)):
        assert all(torch.equal(kept[name], now[name]) for name in kept)


def test_a_tied_weight_that_is_untied_is_refused_until_it_is_tied_again():
    module = Layers()
    module.second.weight = module.first.weight
    reference = copy.deepcopy(module)
    trainer = make(module, check_export=False)
    for step in range(3):
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], torch_step(reference, *batch(step)))
        module.second.weight = nn.Parameter(torch.ones(4, 4))
        with pytest.raises(StateError, match=r"tied or untied since the graph was compiled: \['first.weight'\]"):
            trainer.train_step(*batch(step), LR)
        module.second.weight = module.first.weight


def test_without_what_torch_compile_asks_of_tensors_the_same_is_seen(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    module = Layers()
    seen = Seen(module.modules())
    assert seen.holds()
    module.scale.requires_grad_(False)
    assert not seen.holds()
    module.scale.requires_grad_(True)
    assert seen.holds()
    transpose(module)
    assert not seen.holds()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_frozen_parameter_is_seen_in_every_mode(mode):
    module = Layers()
    with mode():
        seen = Seen(module.modules())
        assert seen.holds()
        module.scale.requires_grad_(False)
        assert not seen.holds()


LATE_MODULE = """
REGISTRY = []
SCALE = 2.0

def register(entry):
    REGISTRY.append(entry)

def scaled(x):
    return SCALE * x

register("scaled")
"""


class ImportsLate(nn.Module):
    """Imports in its first forward what it computes with."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        from late_module import scaled

        return self.head(scaled(x))


def test_what_an_import_within_forward_runs_is_not_followed_and_what_forward_calls_is(tmp_path, monkeypatch, exports):
    (tmp_path / "late_module.py").write_text(LATE_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = ImportsLate()
    reference, trainer = copy.deepcopy(module), make(module)
    trainer.train_step(*batch(0), LR)
    late = sys.modules["late_module"]
    torch_step(reference, *batch(0))
    late.register("another")
    for step, scale in ((1, 2.0), (2, 0.5)):
        late.SCALE = scale
        loss = torch_step(reference, *batch(step))
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], loss)
        assert len(exports) == step


class Table(nn.Module):
    """Keeps its state in a dict and a list, too, and reads it from there; a tensor of the list is no part of the state."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)
        self.register_buffer("total", torch.zeros(4))
        self.table, self.rows = {"weight": self.weight, "total": self.total}, [self.total, torch.ones(4)]

    def forward(self, x):
        self.total += x.detach().mean(0)
        return self.head(x * self.table["weight"] + self.table["total"] * self.rows[1] + self.rows[0])


def test_what_trains_is_no_change_of_a_dict_or_list_that_holds_it(exports):
    pair = Pair(Table())
    pair.steps(3)
    assert len(exports) == 1
    pair.change(lambda module: module.rows[1].fill_(3.0))
    pair.steps(2)
    assert len(exports) == 2
    pair.change(lambda module: module.table.update(weight=module.rows[1]))
    pair.steps(2)
    assert len(exports) == 3


class Adapted(nn.Module):
    """A frozen layer with a trained change of low rank (LoRA), which is added to its weight while it is `merged`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(3, 2))
        self.merged = False

    def merge(self, merged: bool) -> None:
        self.merged = merged
        self.layer.weight.data += (self.up @ self.down).detach() * (1 if merged else -1)

    def forward(self, x):
        return self.layer(x) if self.merged else self.layer(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_adapters_that_are_merged_for_an_evaluation_are_evaluated_so_and_train_on(optimizer):
    torch.manual_seed(0)
    pair = Pair(Adapted(), optimizer=optimizer)
    pair.steps(2)
    pair.change(lambda module: module.merge(True))
    x, y = batch(9)
    for _ in range(2):
        found = pair.engine.eval_step({"x": x, "label": y})
        expected = pair.reference(x).detach()
        torch.testing.assert_close(found, [pair.loss(expected, y), expected], rtol=1e-4, atol=1e-5)
        with pytest.raises(ModelError, match="nothing to train: no parameter reaches the loss"):
            pair.engine.train_step({"x": x, "label": y}, RATE)
    pair.change(lambda module: module.merge(False))
    pair.steps(2)


def prune_the_smallest(module, amount):
    layers = [(layer, "weight") for layer in module.modules() if isinstance(layer, nn.Linear)]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=amount)


def test_what_is_pruned_again_is_ranked_by_the_weights_of_the_moment(caplog):
    """torch ranks what it has masked, which a forward makes and a step does not run: at first 20 %, then 30 % of the rest."""
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    pair = Pair(module, optimizer="SGD with momentum")
    pair.change(lambda m: prune_the_smallest(m, 0.2))
    for _ in range(3):
        pair.steps(5)
        for layer, other in zip(pair.module[::2], pair.reference[::2]):
            torch.testing.assert_close(layer.weight, other.weight.detach(), rtol=1e-4, atol=1e-5)
        pair.change(lambda m: prune_the_smallest(m, 0.3))
    pair.steps(2)  # which compares the masks, too
    assert (module[0].weight == 0).sum() + (module[2].weight == 0).sum() >= 70  # of 112, 1 - 0.8 * 0.7**3 of them
    assert "weight'" not in caplog.text  # neither that forward writes it, nor that somebody changed it


HOOKS_OF_ALL = {
    "before forward": (module_hooks.register_module_forward_pre_hook, lambda m, given: (given[0] * 1.5,)),
    "behind forward": (module_hooks.register_module_forward_hook, lambda m, given, y: y * 1.5),
    "before backward": (module_hooks.register_module_full_backward_pre_hook, lambda m, dy: (dy[0] * 1.5,)),
}


@pytest.mark.parametrize("case", HOOKS_OF_ALL)
def test_a_hook_of_all_modules_is_followed_when_it_comes_and_when_it_goes(case):
    register, hook = HOOKS_OF_ALL[case]
    pair = Pair(nn.Linear(4, 3), optimizer="SGD with momentum")
    pair.steps(2)
    with register(lambda module, *rest: hook(module, *rest) if isinstance(module, nn.Linear) else None):
        pair.steps(2)
    pair.steps(2)
