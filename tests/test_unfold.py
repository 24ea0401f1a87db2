"""What windows show is copied in rows, not gathered by places, and trains as in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fidelity import Loss, assert_trains_as_in_pytorch
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription

BY_PLACES = {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"}


class Shown(nn.Module):
    """What `view` makes of images, or signals, whose channels have weights."""

    def __init__(self, view):
        super().__init__()
        self.w, self.view = nn.Parameter(torch.rand(3, 1) + 0.5), view

    def forward(self, x):
        return self.view(x * (self.w if x.dim() == 3 else self.w[..., None]))


def images(step):
    """Another batch size at each step."""
    return [torch.randn(4 + step, 3, 7, 9, generator=torch.Generator().manual_seed(step))]


def slope(y):
    """A gradient, which the loss differentiates again."""
    windows = F.unfold(y, (3, 2), padding=1, stride=(1, 2))
    (g,) = torch.autograd.grad((windows * torch.arange(18).sin()[:, None]).sin().sum(), y, create_graph=True)
    return g


IMAGES = {
    "3 x 3": lambda y: F.unfold(y, 3, padding=1),
    "of sides": lambda y: nn.Unfold((2, 3), dilation=(2, 1), padding=(0, 2), stride=(1, 2))(y),
    "what no window shows": lambda y: F.unfold(y, 2, dilation=2, stride=3),
    "side by side": lambda y: F.unfold(y[..., :8], (7, 4), stride=(7, 4)),
    "of one image": lambda y: F.unfold(y[:1].squeeze(0), (2, 3)),
    "many taps": lambda y: F.unfold(y.flatten(2)[:, :, None], (1, 33), stride=(1, 4)),
    "many taps apart": lambda y: F.unfold(
        y.flatten(2)[..., None].repeat(1, 1, 2, 1), (33, 1), dilation=(2, 1), stride=(3, 1)
    ),
    "folded": lambda y: F.fold(F.unfold(y, (3, 2), stride=(2, 1)), (7, 9), (3, 2), stride=(2, 1)),
    "folded to one image": lambda y: F.fold(y[:1].squeeze(0).flatten(1)[:, :15].repeat(4, 1), (4, 6), 2),
    "of each axis": lambda y: y.unfold(2, 3, 1).unfold(3, 4, 2),
    "of channels": lambda y: y.unfold(1, 2, 1),
    "of many rows": lambda y: y.flatten(2).unfold(-1, 32, 1) + y.flatten(2)[..., 8:].unfold(-1, 24, 1)[..., :1],
    "of rows that end with the last": lambda y: y.unfold(-1, 5, 2),
    "of rows that end before it": lambda y: y.unfold(2, 3, 2).unfold(-2, 4, 3),
    "of rows that end behind it": lambda y: y.flatten(2).unfold(-1, 42, 5),
}


@pytest.mark.parametrize("view", IMAGES.values(), ids=IMAGES)
def test_windows_train_as_in_pytorch_and_are_not_gathered_by_places(view):
    trainer = assert_trains_as_in_pytorch(lambda: Shown(view), images, evaluates=True)
    graph = trainer.training_graph.graph.graph
    assert not [node for node in graph if node.op_type in BY_PLACES and len(node.inputs[0].shape) > 1]


GRADIENTS = {
    "differentiated twice": slope,
    "in torch.vmap": torch.vmap(lambda y: F.unfold(y[None], 3, padding=1)[0]),
}


@pytest.mark.parametrize("view", GRADIENTS.values(), ids=GRADIENTS)
def test_windows_whose_gradient_is_taken_apart_train_as_in_pytorch(view):
    assert_trains_as_in_pytorch(lambda: Shown(view), images, evaluates=False)


@pytest.mark.parametrize(
    "view",
    [lambda y: F.unfold(y, 3, padding=1), lambda y: F.unfold(y, 2, stride=2), lambda y: y.unfold(2, 3, 1)],
    ids=["all", "in steps", "of rows"],
)
def test_windows_of_images_of_any_size_train_as_in_pytorch(view):
    torch.manual_seed(0)
    ours, module = Loss(Shown(view)), Loss(Shown(view))
    module.load_state_dict(ours.state_dict())
    outputs = [IODescription("loss", []), IODescription("y", [])]
    desc = ModelDescription([IODescription("x", ["batch", 3, "height", "width"])], outputs)
    trainer = make(ours, loss_fn=None, desc=desc)
    for size in ((2, 3, 8, 12), (3, 3, 11, 6), (1, 3, 5, 7)):
        x = torch.randn(size)
        loss, y = module(x)
        (gradient,) = torch.autograd.grad(loss, [module.layer.w])
        torch.testing.assert_close(trainer.train_step(x, 0.1), (loss.detach(), y.detach()), rtol=1e-5, atol=1e-6)
        module.layer.w.data.sub_(0.1 * gradient)
    torch.testing.assert_close(ours.layer.w, module.layer.w, rtol=1e-5, atol=1e-6)
