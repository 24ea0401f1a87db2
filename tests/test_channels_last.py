"""Convolutions whose weights the state holds with the channels of a tap side by side train as those that it holds as declared."""

from __future__ import annotations

import onnx
import pytest
import torch
from marks import in_turn
from test_passes_nchwc import sessions_opened
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription
from orttrainer.engine import Engine
from orttrainer.graph.passes.speed.channels_last import ChannelsLastWeightPass
from orttrainer.settings import OptimizerChoice, Settings

OPTIMIZERS = {"SGDOptimizer": torch.optim.SGD, "AdamOptimizer": torch.optim.Adam, "LambOptimizer": None}
RATE = 1e-3


class Hourglass(nn.Module):
    """Images [n, 3, 16, 16] -> [n, 2, 8, 8]: convolutions in blocks, with strides, dilations, of small images, applied twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(32)
        self.plain, self.strided = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.Conv2d(32, 32, 3, 2, 1)
        self.twice, self.small = nn.Conv2d(32, 32, (3, 5), padding=(1, 2)), nn.Conv2d(32, 64, 3, 4, 1)
        self.dilated, self.single = nn.Conv2d(32, 32, 3, padding=2, dilation=2), nn.Conv2d(64, 64, 3, 2, 1)
        self.up, self.head = nn.ConvTranspose2d(64, 32, 8), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        x = F.relu(self.norm(self.plain(F.relu(self.stem(x)))))
        x = torch.tanh(self.twice(F.relu(self.twice(self.strided(x)))))
        small = F.relu(self.small(self.dilated(x)))
        return self.head(self.up(torch.tanh(self.single(small))) + x)


WEIGHTS = {"plain", "strided", "twice", "dilated", "small", "single", "up"}


def engine(module, optimizer="AdamOptimizer", size=4, **settings) -> Engine:
    images = [IODescription("x", [size, 3, 16, 16], torch.float32), IODescription("y", [size, 2, 8, 8], torch.float32)]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", [size, 2, 8, 8], torch.float32)]
    choice = OptimizerChoice(optimizer, clip=False)
    return Engine(module, F.mse_loss, ModelDescription(images, outputs), choice, Settings(**settings))


def batch(step: int, size: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(size, 3, 16, 16, generator=generator),
        "y": torch.randn(size, 2, 8, 8, generator=generator),
    }


def train(one: Engine, steps=range(4), sizes=(4, 4)) -> list[float]:
    return [float(one.train_step(batch(step, sizes[step % 2]), RATE)[0][0]) for step in steps]


def held(one: Engine) -> set[str]:
    entries = one.training_graph.signature.state
    return {e.name.removesuffix(".weight") for e in entries if e.transposed and e.role == "parameter"}


PLAIN = {"disabled_passes": ("ChannelsLastWeightPass",)}


@pytest.mark.parametrize(
    "optimizer, accumulate, size, settings",
    in_turn(
        list(OPTIMIZERS),
        [1, 2],
        [4, "n"],
        [{}, {"native_kernels": True}, {"disabled_passes": ("BlockedConvolutionPass", "SmallImagesPass")}],
    ),
)
def test_it_trains_as_the_plain_layout_and_as_torch(optimizer, accumulate, size, settings):
    module, other, reference = Hourglass(), Hourglass(), Hourglass()
    one = engine(module, optimizer, size, accumulation_steps=accumulate, **settings)
    two = engine(other, optimizer, size, accumulation_steps=accumulate, **PLAIN)
    sizes = (4, 4) if size == 4 else (4, 3)
    losses = train(one, sizes=sizes)
    assert losses == pytest.approx(train(two, sizes=sizes), rel=1e-5)
    assert held(one) == WEIGHTS and not held(two)
    expected = two.state_dict()
    for name, value in one.state_dict().items():
        assert value.is_contiguous()
        # Adam moves by what is left of rounding.
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    if OPTIMIZERS[optimizer] is None:
        return
    update = OPTIMIZERS[optimizer](reference.parameters(), RATE)
    for step in range(4):
        given = batch(step, sizes[step % 2])
        value = F.mse_loss(reference(given["x"]), given["y"])
        assert losses[step] == pytest.approx(value.item(), rel=1e-4)
        (value / accumulate).backward()
        if (step + 1) % accumulate == 0:
            update.step()
            update.zero_grad()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"native_kernels": True}], ids=["plain", "native"])
def test_no_weight_is_brought_into_its_declared_order(settings, monkeypatch):
    opened = sessions_opened(monkeypatch)
    train(engine(Hourglass(), **settings), [0])
    (graph,) = [model.graph for model in opened if any(v.name == "plain.weight_new" for v in model.graph.output)]
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in graph.input}
    assert shapes["plain.weight"] == shapes["Moment_1_plain.weight"] == (32, 3, 3, 16)
    read = {name for node in graph.node if node.op_type == "Transpose" for name in node.input}
    assert not {f"{name}.weight" for name in WEIGHTS} & read


def test_the_parameter_stays_live_as_a_view():
    module = Hourglass()
    weight = module.plain.weight
    one = engine(module)
    train(one, [0])
    assert module.plain.weight is weight and weight.shape == (32, 16, 3, 3)
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    before = weight.detach().clone()
    train(one, [1])
    assert not torch.equal(weight, before)
    with torch.no_grad():
        module.head.weight.zero_()
        module.up.weight.zero_()
        module.head.bias.fill_(1.0)
    given = batch(2)
    assert train(one, [2]) == [pytest.approx(F.mse_loss(torch.ones_like(given["y"]), given["y"]).item(), rel=1e-5)]


def test_a_state_dict_loads_into_either_layout():
    one, two = engine(Hourglass()), engine(Hourglass(), **PLAIN)
    train(one)
    train(two, [0])
    state = one.state_dict()
    assert state["plain.weight"].shape == state["Moment_1_plain.weight"].shape == (32, 16, 3, 3)
    two.load_state_dict(state)
    assert train(two, [5]) == pytest.approx(train(one, [5]), rel=1e-5)
    one.load_state_dict(two.state_dict())
    assert train(one, [6]) == pytest.approx(train(two, [6]), rel=1e-5)


def test_the_saved_graph_has_the_declared_layout(tmp_path):
    one = engine(Hourglass())
    train(one, [0])
    one.training_graph.plain.save(tmp_path / "step.onnx")
    graph = onnx.load(tmp_path / "step.onnx").graph
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert shapes["plain.weight"] == [32, 16, 3, 3]


def test_a_weight_in_channels_last_of_the_callers_is_taken_over():
    module, other = Hourglass().to(memory_format=torch.channels_last), Hourglass()
    assert train(engine(module)) == pytest.approx(train(engine(other)), rel=1e-5)


class Grouped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, padding=1, groups=2), nn.Conv2d(64, 2, 1))


class Read(nn.Module):
    """The weight is no operand of a convolution alone."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x):
        return self.head(self.body(x))[:, :2] + self.head.weight.square().mean()


class Odd(nn.Sequential):
    """Channels that fill no block; a kernel of one tap; few weights."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 40, 3, padding=1), nn.Conv2d(40, 128, 1), nn.Conv2d(128, 16, 1),
            nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 2, 1),
        )  # fmt: skip


@pytest.mark.parametrize("module", [Grouped, Read, Odd])
def test_other_weights_stay_as_they_are(module):
    one = engine(module())
    assert len(set(train(one))) == 4
    assert not held(one)


def test_few_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(ChannelsLastWeightPass, "LARGE", 32 * 32 * 9 + 1)
    one = engine(Hourglass())
    train(one, [0])
    assert held(one) == {"twice", "small", "single", "up"}
