"""Where a slope is infinite, masks choose, as PyTorch's do: 0 times infinity would make the weights NaN in silence."""

import copy

import pytest
import torch
import torch.nn.functional as F
from marks import slow
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.pipeline import SPEED_PASSES


def distances(h):
    """The usual squared distances of metric learning: of a row to itself 0 or a little below."""
    h = h[:, 4:].tanh()
    n = h.square().sum(1)
    return (n[:, None] + n - 2 * h @ h.T - 1e-4).clamp(min=0).sqrt()


FORMS = {
    "relu": lambda h: F.relu(h).sqrt(),
    "relu-power": lambda h: F.relu(h) ** 0.5,
    "relu-log": lambda h: F.relu(h).log().clamp(min=-5),
    "relu-log-chosen": lambda h: torch.where(h > 0, F.relu(h).log(), 0.0),
    "relu-rsqrt": lambda h: F.relu(h).rsqrt().clamp(max=3),
    "relu-divided": lambda h: (1 / F.relu(h)).clamp(max=3),
    "relu-of-views": lambda h: torch.cat([F.relu(h).T, F.relu(h[:, :1] + 50).T]).mean(0).sqrt(),
    "relu-tanh": lambda h: F.relu(h).tanh().sqrt(),
    "relu-dropout": lambda h: F.dropout(F.relu(h), 1e-4).sqrt(),
    "relu-xlogy": lambda h: torch.xlogy(F.relu(h), F.relu(h)),
    "relu-hypot": lambda h: torch.hypot(F.relu(h), F.relu(h)),
    "relu6": lambda h: F.relu6(h).sqrt(),
    "hardtanh": lambda h: F.hardtanh(h, 0, 9).sqrt(),
    "threshold": lambda h: F.threshold(h, 0, 0).sqrt(),
    "hardshrink": lambda h: F.hardshrink(h, 0.1).abs().clamp_min(0).sqrt(),
    "softshrink": lambda h: F.softshrink(h, 0.1).square().pow(0.25),
    "hardsigmoid": lambda h: F.hardsigmoid(h).sqrt(),
    "clamp": lambda h: h.clamp(min=0).sqrt(),
    "clamp-by-tensors": lambda h: torch.clamp(h, torch.zeros(()), torch.full((), 2.0)).sqrt(),
    "clamp-acos": lambda h: torch.acos(h.clamp(-1, 1)),
    "clamp-distances": distances,
    "maximum": lambda h: torch.maximum(h, torch.zeros(())).sqrt(),
    "minimum": lambda h: (-torch.minimum(h, torch.zeros(()))).sqrt(),
    "maximum-ties": lambda h: torch.maximum(F.relu(h), F.relu(h)).sqrt(),
    "max": lambda h: h.max(1).values.clamp(min=0).sqrt(),
    "std": lambda h: F.relu(h).std(0),
    "std-of-equal": lambda h: (h * 0).std() + h.mean(),
    "std-mean": lambda h: torch.std_mean((h[:1]).expand(4, -1), 0)[0] + h.mean(0),
}


class Terms(nn.Module):
    """A layer for each form, so that one whose weights become NaN hides no other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 8) for name in FORMS})
        for layer in self.layers.values():
            layer.bias.data[:4] = -50.0

    def forward(self, x):
        return sum(form(self.layers[name](x)).sum() for name, form in FORMS.items())


PLAIN = [chosen.__name__ for chosen in SPEED_PASSES]


@pytest.fixture(scope="module", params=[(), slow(PLAIN)], ids=["passes", "plain"])
def trained(request):
    torch.manual_seed(0)
    model, x = Terms(), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.001)
    description = ModelDescription(
        [IODescription("x", ["n", 6], torch.float32)], [IODescription("loss", [], torch.float32)]
    )
    choice, settings = OptimizerChoice("SGDOptimizer", clip=False), Settings(disabled_passes=request.param)
    engine = Engine(model, None, description, choice, settings)
    for _ in range(2):
        engine.train_step({"x": x}, 0.001)
        optimizer.zero_grad()
        twin(x).backward()
        optimizer.step()
    return model.layers, twin.layers


@pytest.mark.parametrize("name", FORMS)
def test_masks_choose_from_infinite_gradients(trained, name):
    own, expected = (layers[name] for layers in trained)
    assert not expected.weight.isnan().any()
    torch.testing.assert_close(own.weight, expected.weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(own.bias, expected.bias, rtol=1e-4, atol=1e-6)
