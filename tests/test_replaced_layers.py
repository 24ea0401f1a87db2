"""Layers without weights that are replaced, added or removed between steps are followed; those with weights are refused."""

from __future__ import annotations

import pytest
import torch
from pairs import OPTIMIZERS, RATE, Pair
from small import LR, batch, make, torch_step
from torch import nn

from orttrainer import trainer
from orttrainer.errors import StateError


class Layers(nn.Module):
    """An activation that is there twice, and a list whose order matters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LeakyReLU(0.3))
        self.first, self.second, self.third = nn.Tanh(), nn.Sigmoid(), None
        self.third = self.first
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.third(self.second(self.first(self.body(x)))))


def shared(m):
    m.third = m.second


def order(m):
    """The same paths, the same classes, and another order."""
    del m.body._modules["1"]
    m.body._modules["1"] = nn.Tanh()


CHANGES = {
    "another activation": lambda m: m.body.__setitem__(1, nn.ReLU()),
    "one of another number": lambda m: m.body.__setitem__(2, nn.LeakyReLU(0.6)),
    "one more": lambda m: m.body.append(nn.Softplus()),
    "one less": lambda m: m.body.__delitem__(1),
    "what is there twice is there once": shared,
    "another order": order,
    "another order of the same": lambda m: m.body._modules.update({"1": m.body._modules.pop("1")}),
    "another container": lambda m: setattr(m, "body", nn.Sequential(m.body[0], nn.ELU())),
    "equal": lambda m: m.body.__setitem__(1, nn.Tanh()),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_without_weights_are_followed_there_and_back(change, accumulate):
    torch.manual_seed(2)
    ours, theirs = Layers(), Layers()
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, theirs)]
    sketch = trainer(
        ours, nn.functional.cross_entropy, optimizers[0], check_export=False, gradient_accumulation_steps=accumulate
    )
    for step in range(6):
        if step == 3:
            kept = [[(m._modules, dict(m._modules)) for m in model.modules()] for model in (ours, theirs)]
            CHANGES[change](ours), CHANGES[change](theirs)
        if step == 5:
            for held, was in (pair for pairs in kept for pair in pairs):
                held.clear()
                held.update(was)
        x, y = batch(step)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(theirs(x), y)
        torch.testing.assert_close(sketch.eval_step(x, y)[0], expected)
        loss, _ = sketch.step(x, y)
        expected = nn.functional.cross_entropy(theirs(x), y)
        torch.testing.assert_close(loss, expected.detach())
        (expected / accumulate).backward()
        if (step + 1) % accumulate == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


class Doubled(Layers):
    """Another graph in eval mode."""

    def forward(self, x):
        return super().forward(x) * (1 if self.training else 2)


@pytest.mark.parametrize("change", ["another activation", "what is there twice is there once"])
def test_the_graph_of_eval_mode_follows_too_and_the_legacy_trainer(change):
    torch.manual_seed(2)
    module, reference = Doubled(), Doubled()
    reference.load_state_dict(module.state_dict())
    ours = make(module, "SGDOptimizer", check_export=False)
    x, y = batch()
    for step in range(4):
        if step == 2:
            CHANGES[change](module), CHANGES[change](reference)
        for _ in range(2):
            expected = torch_step(reference.train(), x, y)
            torch.testing.assert_close(ours.train_step(x, y, LR)[0], expected)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(reference.eval()(x), y)
        torch.testing.assert_close(ours.eval_step(x, y)[0], expected)
    torch.testing.assert_close(module.state_dict(), reference.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_stay_those_of_the_parameters(optimizer):
    pair = Pair(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), optimizer=optimizer)
    for activation in (nn.ReLU(), nn.Identity(), nn.Tanh()):
        pair.steps(2)
        pair.module[1] = pair.reference[1] = activation
    pair.steps(2)


REFUSED = {
    "another weight": lambda m: setattr(m, "head", nn.Linear(6, 3)),
    "a weight more": lambda m: m.body.append(nn.PReLU()),
    "a weight less": lambda m: setattr(m, "head", nn.Flatten()),
    "a buffer more": lambda m: m.body.append(nn.BatchNorm1d(6, affine=False)),
    "a weight in another place": lambda m: setattr(m, "body", nn.Sequential(nn.Identity(), m.body[0])),
    "a weight twice": lambda m: setattr(m, "first", m.head),
}


@pytest.mark.parametrize("change", REFUSED)
def test_layers_with_other_weights_are_refused_and_may_be_put_back(change):
    pair = Pair(Layers())
    pair.steps(1)
    kept = [(layer._modules, dict(layer._modules)) for layer in pair.module.modules()]
    REFUSED[change](pair.module)
    said = "layers of the module were replaced, added or removed since the graph was compiled, and with them parameters or buffers"
    with pytest.raises(StateError, match=said):
        pair.engine.train_step(dict(zip(("x", "label"), batch(1))), RATE)
    for held, was in kept:
        held.clear()
        held.update(was)
    pair.steps(2)
