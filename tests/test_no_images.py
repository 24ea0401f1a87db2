"""Networks that look at some of the images of a batch, of which there may be none: trained as in PyTorch."""

import copy

import pytest
import torch
from marks import usual
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription
from orttrainer.engine import Engine
from orttrainer.settings import OptimizerChoice, Settings


class Chosen(nn.Module):
    """All images have a score, and those that are kept one more, from the layers under test."""

    def __init__(self, layers):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 4)
        self.layers, self.second = layers, nn.LazyLinear(4)

    def forward(self, x, kept):
        images = F.softplus(self.stem(x))
        places = torch.nonzero(kept).flatten()
        features = self.layers(images[places])
        return self.head(images.mean((2, 3))).index_add(0, places, self.second(features.flatten(2).mean(2)))


def conv(*arguments, **options):
    return lambda: nn.Conv2d(*arguments, **options)


class Of(nn.Module):
    """A layer of images in another shape."""

    def __init__(self, shape, layer):
        super().__init__()
        self.shape, self.layer = shape, layer

    def forward(self, x):
        return self.layer(x.reshape(-1, *self.shape))


LAYERS = {
    "3 x 3": conv(16, 32, 3, padding=1),
    "1 x 1": conv(16, 32, 1),
    "strides": conv(16, 32, 3, stride=2, padding=1),
    "strides of 1 x 1": conv(16, 32, 1, stride=2),
    "dilations": conv(16, 32, 3, dilation=2),
    "groups": conv(16, 32, 3, groups=2),
    "depthwise": conv(16, 16, 3, padding=1, groups=16),
    "few channels": conv(16, 3, 5),
    "as large as the image": conv(16, 32, 8),
    "transposed": lambda: nn.ConvTranspose2d(16, 8, 3, padding=1),
    "transposed, strides": lambda: nn.ConvTranspose2d(16, 32, 4, stride=2, padding=1),
    "one axis": lambda: Of((16, 64), nn.Conv1d(16, 32, 3, padding=1)),
    "three axes": lambda: Of((16, 4, 4, 4), nn.Conv3d(16, 8, 3, padding=1)),
    "two, in blocks": lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.Softplus(), nn.Conv2d(32, 32, 3)),
    "one pixel": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 32, 3, padding=1)),
    "pools": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.MaxPool2d(2), nn.Conv2d(16, 16, 2), nn.AvgPool2d(2)),
    "pools that overlap": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.MaxPool2d(3, 2, 1)),
    "norms": lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3), nn.GroupNorm(2, 16), nn.Tanh()),
    "statistics that stay": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)),
    "resized": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 16, 3)),
    "pads": lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(16, 16, 3), nn.ReplicationPad2d(2)),
    "means of windows that overlap": lambda: nn.AdaptiveAvgPool2d(3),
    "resized by cubes": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "attention": lambda: Of((64, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)),
    "a GRU": lambda: Of((64, 16), Last(nn.GRU(16, 8, batch_first=True))),
    "an LSTM": lambda: Of((64, 16), Last(nn.LSTM(16, 8, 2, bidirectional=True, batch_first=True))),
    "an RNN": lambda: Of((64, 16), Last(nn.RNN(16, 8, nonlinearity="tanh", batch_first=True))),
}


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def trained(layers, batches, **settings):
    torch.manual_seed(0)
    module = Chosen(layers)
    module(torch.zeros(2, 3, 8, 8), torch.ones(2, dtype=torch.int64))  # its last layer learns its size
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    reference = copy.deepcopy(module).double()
    inputs = [
        IODescription("x", ["batch", 3, 8, 8], torch.float32),
        IODescription("kept", ["batch"], torch.int64),
        IODescription("label", ["batch"], torch.int64),
    ]
    outputs = [IODescription("loss", [], torch.float32), IODescription("scores", ["batch", 4], torch.float32)]
    engine = Engine(
        module,
        F.cross_entropy,
        ModelDescription(inputs, outputs),
        OptimizerChoice("SGDOptimizer"),
        Settings(**settings),
    )
    optimizer, losses = torch.optim.SGD(reference.parameters(), 0.1), []
    for kept in batches:
        x, kept, label = torch.randn(len(kept), 3, 8, 8), torch.tensor(kept), torch.randint(0, 4, (len(kept),))
        loss = F.cross_entropy(reference(x.double(), kept), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = engine.train_step({"x": x, "kept": kept, "label": label}, 0.1)[0][0]
        losses.append((found.item(), loss.item()))
    return module, reference, losses


USUAL = (
    "3 x 3", "1 x 1", "groups", "transposed, strides", "three axes", "two, in blocks", "pools", "norms", "pads", "an LSTM",
    "means of windows that overlap",
)  # fmt: skip


@pytest.mark.parametrize("name", usual(LAYERS, *USUAL))
def test_a_batch_of_which_no_image_is_looked_at_trains_the_rest(name):
    module, reference, losses = trained(LAYERS[name](), [[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]])
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-5)
    for (key, found), expected in zip(module.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=1e-5, msg=key)
