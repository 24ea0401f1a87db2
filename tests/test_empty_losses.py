"""A batch of which nothing counts, no label or no row, has PyTorch's loss, NaN where that has it, and its gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from in_step import check_equal, step
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings

RATE, WEIGHTS = 0.05, torch.arange(1.0, 6.0)
LABELS = [1, 2, -100, 4], [-100] * 4, [0, 1, -100, -100]


class Scored(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 5), loss

    def forward(self, x, label):
        return self.loss(self.linear(x), label)


def engine_of(module):
    description = ModelDescription(
        [IODescription("x", ["n", 6]), IODescription("label", ["n"], torch.int64)], [IODescription("loss", [])]
    )
    return Engine(module, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())


def of_the_labelled(loss):
    """`loss` of the rows that have a label, and of ones."""
    return lambda y, label: loss(y[label >= 0], torch.ones_like(y)[label >= 0])


LOSSES = {
    "labels": F.cross_entropy,
    "labels, weighted": lambda y, label: F.cross_entropy(y, label, WEIGHTS),
    "labels, smoothed": lambda y, label: F.cross_entropy(y, label, label_smoothing=0.1),
    "labels, smoothed, weighted": lambda y, label: F.cross_entropy(y, label, WEIGHTS, label_smoothing=0.1),
    "labels, chosen": lambda y, label: F.cross_entropy(y[label >= 0], label[label >= 0]),
    "labels, chosen, and more": lambda y, label: (
        F.nll_loss(y[label >= 0].log_softmax(1), label[label >= 0], reduction="sum") + y.square().mean()
    ),
    "labels, flattened": lambda y, label: F.nll_loss(y.log_softmax(-1).view(-1, 5), label.view(-1)),
    "mean": lambda y, label: y[label >= 0].mean(),
    "mean of each column": lambda y, label: y[label >= 0].mean(0).sum(),
    "mean of what is computed": lambda y, label: (y[label >= 0].sin() * 2).mean(-1, keepdim=True).sum(),
    "root of a mean": lambda y, label: y[label >= 0].square().mean().sqrt(),
    "spread": lambda y, label: y[label >= 0].std(),
    "spread of each column": lambda y, label: y[label >= 0].var(0).sum(),
    "sum": of_the_labelled(lambda y, ones: (y - ones).square().sum()),
    "squares": of_the_labelled(F.mse_loss),
    "distances": of_the_labelled(F.l1_loss),
    "smooth distances": of_the_labelled(F.smooth_l1_loss),
    "logits": of_the_labelled(F.binary_cross_entropy_with_logits),
    "divergence": of_the_labelled(lambda y, ones: F.kl_div(y.log_softmax(-1), ones / 5)),
}


@pytest.mark.filterwarnings("ignore")  # torch's own: reduction='mean', and a spread of nothing
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_batch_of_nothing_trains_as_in_pytorch(loss):
    torch.manual_seed(0)
    module = Scored(loss)
    twin = copy.deepcopy(module)
    engine = engine_of(module)
    for labels in LABELS:
        step(engine, twin, {"x": torch.randn(len(labels), 6), "label": torch.tensor(labels)}, RATE)
    check_equal(module, twin)


def attended(queries, keys):
    """Of [heads, rows, numbers] and [heads, numbers, rows]."""
    return (queries @ keys).softmax(-1) @ queries


ALONG_ROWS = {
    "sums": lambda y: y.square().sum(-1),
    "sums of parts": lambda y: y[:, :4].reshape(-1, 2, 2).sum(-1).exp() / 9,
    "sums kept": lambda y: y.sum(-1, keepdim=True) * y,
    "means": lambda y: y.square().mean(-1),
    "norms": lambda y: y.norm(dim=-1),
    "products": lambda y: y.prod(-1),
    "largest": lambda y: y.amax(-1) + y.max(-1).values,
    "logarithms of sums": lambda y: y.logsumexp(-1),
    "cosines": lambda y: F.cosine_similarity(y, y + 1, dim=-1),
    "layers": lambda y: F.linear(y, torch.ones(3, 5)).relu().sum(-1),
    "neighbours": lambda y: (y.roll(1, 0) * y).sum(-1),
    "neighbours both ways": lambda y: y.roll((2, -1), (0, 1)).square(),
    "a vector with each": lambda y: torch.arange(4.0) @ y[:, :4].reshape(-1, 4, 1),
    "a matrix with each": lambda y: torch.ones(1, 2, 4) @ y[:, :4].reshape(-1, 4, 1).square(),
    "images, resized": lambda y: F.interpolate(y[:, :4].reshape(-1, 1, 2, 2), scale_factor=2, mode="bilinear").sin(),
    "heads": lambda y: attended(*(y[:, :4].reshape(-1, 2, 2).permute(perm) for perm in ((1, 0, 2), (1, 2, 0)))),
}
IN_DOUBLE = {
    "convolved": lambda y: F.conv2d(y[:, :4].reshape(-1, 1, 2, 2), torch.ones(3, 1, 2, 1).double()).sin(),
    "transposed": lambda y: F.conv_transpose2d(
        y[:, :4].reshape(-1, 1, 2, 2), torch.ones(1, 2, 2, 2).double(), stride=2
    ),
    "averaged": lambda y: F.avg_pool2d(y[:, :4].reshape(-1, 1, 2, 2), 2, 1, 1).square(),
    "resized": lambda y: F.interpolate(y[:, :4].reshape(-1, 1, 2, 2), scale_factor=2).sin(),
    "turned": lambda y: y.atan() + y.sinh(),
}


class AlongRows(nn.Module):
    """A layer for each form, of the rows that a batch chooses."""

    def __init__(self, forms=ALONG_ROWS):
        super().__init__()
        self.forms, self.layers = forms, nn.ModuleDict({name: nn.Linear(6, 5) for name in forms})

    def forward(self, x, label):
        rows = x[label >= 0]
        return sum(form(self.layers[name](rows)).sum() for name, form in self.forms.items())


def test_what_goes_along_rows_trains_where_no_row_is_left():
    """ONNX Runtime does not reduce what is empty along an axis that is counted from the last."""
    torch.manual_seed(0)
    module = AlongRows()
    twin = copy.deepcopy(module)
    engine = engine_of(module)
    for labels in LABELS:
        step(engine, twin, {"x": torch.randn(len(labels), 6), "label": torch.tensor(labels)}, RATE)
    check_equal(module, twin)


def test_what_is_written_out_in_float64_trains_where_no_image_is_left():
    torch.manual_seed(0)
    module = AlongRows(IN_DOUBLE).double()
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), 2**-5)
    trainer = orttrainer.trainer(module, lambda loss, label: loss, torch.optim.SGD(module.parameters(), 2**-5))
    for labels in LABELS:
        x, label = torch.randn(len(labels), 6).double(), torch.tensor(labels)
        optimizer.zero_grad()
        twin(x, label).backward()
        optimizer.step()
        trainer.step(x, label, label)
    torch.testing.assert_close(module.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (lambda y, label: y[label >= 0].mean(-1).sum(), False),
        (lambda y, label: y.mean(), False),
        (lambda y, label: y[label >= 0].mean(0).sum(), True),
    ],
    ids=["of each chosen row", "of the batch", "of the chosen rows"],
)
def test_only_a_mean_that_may_be_one_of_nothing_is_asked(function, asked):
    engine = engine_of(Scored(function))
    engine.train_step({"x": torch.randn(4, 6), "label": torch.tensor(LABELS[0])}, RATE)
    operands = [x for node in engine.training_graph.graph.graph if node.op_type == "Where" for x in node.inputs]
    constants = [x.const_value.numpy() for x in operands if x.const_value is not None]
    assert any(np.isnan(constant).any() for constant in constants) == asked


OF_NOTHING = {  # w: 2 x 3
    "sums": lambda w: w[:0].sum(-2).exp() + w[:, :0].sum((-1, -2)),
    "sums kept": lambda w: w[..., :0].sum(-1, keepdim=True).cos(),
    "products": lambda w: w.narrow(-1, 1, 0).prod(-1) + w[0, :0].prod(-1),
    "norms": lambda w: w[..., :0].norm(dim=-1) + w[0, :0].norm(1, -1),
    "logarithms of sums": lambda w: w[:, :0].logsumexp(-1).exp(),
    "means": lambda w: w[:, :0].mean(-1).nan_to_num(3.0) + w[:0].mean().nan_to_num(5.0),
    "spreads": lambda w: w[:, :0].var(-1).nan_to_num(3.0) + w[:0].std().nan_to_num(5.0),
    "squares": lambda w: F.mse_loss(w[:0], w[:0]).nan_to_num(2.0),
    "counts": lambda w: (w[:, :0] > 0).sum(-1) + (w[:0] > 0).any(-2).sum() + (w[:, :0] > 0).all(-1),
    "largest of no row": lambda w: w[:0].amax(-1).sum() + w[:0].max(-1).values.sum(),
    "added up": lambda w: w[:, :0].cumsum(-1).sum(-1) + w[:0].softmax(-1).sum(-1).sum(),
    "products of matrices": lambda w: (w[:, :0] @ w[:0]).sum() + (w[None, :, :0].expand(3, -1, -1) @ w[:0]).cos().sum(),
    "joined": lambda w: torch.cat([w[:, :0], w, w[:, :0]], -1) + torch.cat([w[0, :0], w[1, 1:1]]).sum(),
    "subscripts": lambda w: torch.einsum("ij,kj->ik", w[:, :0], w[:, :0]).cos(),
    "layers": lambda w: F.linear(w[:, :0], w[:, :0], w[0, :2]) + F.layer_norm(w[:0], (3,), w[0], w[1]).sum(),
    "pools": lambda w: F.max_pool1d(w[:0, None], 2).sum(),
    "attention of no query": lambda w: F.scaled_dot_product_attention(w[None, None, :0], w[None, None], w[None, None]),
    "attention to no key": lambda w: F.scaled_dot_product_attention(
        w[None, None], w[None, None, :0], w[None, None, :0]
    ),
}


class OfNothing(nn.Module):
    """For each form a matrix, of which it takes parts that are none whatever the batch."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterDict({name: torch.randn(2, 3).double() for name in OF_NOTHING})

    def forward(self, x):
        return sum(
            (form(w).sum() + w.sum()) * x.sin().mean() for w, form in zip(self.matrices.values(), OF_NOTHING.values())
        )


@pytest.mark.filterwarnings("ignore")  # torch's own: a spread of nothing
def test_parts_that_are_none_whatever_the_batch_train_as_in_pytorch():
    torch.manual_seed(0)
    module = OfNothing()
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), RATE)
    trainer = orttrainer.trainer(module, lambda y, label: y * label.mean(), torch.optim.SGD(module.parameters(), RATE))
    for rows in (4, 3):
        x, label = torch.randn(rows, 2).double(), torch.rand(rows).double()
        optimizer.zero_grad()
        (twin(x) * label.mean()).backward()
        optimizer.step()
        trainer.step(x, label)
    torch.testing.assert_close(module.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-13)
