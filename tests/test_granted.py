"""Decisions by the sizes of inputs: a batch of other sizes goes the way that forward goes on it, as in PyTorch."""

from __future__ import annotations

import copy
import math

import older
import pytest
import torch
import torch.nn.functional as F
from in_step import check_equal, step
from marks import slow
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import UnsupportedModelError

RATE, SIZES = 0.05, (4, 6, 3, 1, 2, 6)
PLACES = torch.linspace(0.5, 1.5, 4)[:, None]


class Sized(nn.Module):
    """loss of `function(layer(x))`."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 5), function

    def forward(self, x, label):
        return self.function(self.layer(x)) * label.mean()


class Squared(nn.Module):
    def forward(self, y):
        return y.square().mean()


def engine_of(module, size="n"):
    description = ModelDescription(
        [IODescription("x", [size, 6]), IODescription("label", [size])], [IODescription("loss", [])]
    )
    return Engine(module, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())


def batch(size):
    dice = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, 6, generator=dice), "label": torch.rand(size, generator=dice)}


def repeated(y):
    """Places for more rows than there are, as of a table that grows with the longest sequence."""
    places = PLACES if len(y) <= len(PLACES) else torch.cat([PLACES, PLACES])
    return (y * places[: len(y)]).square().mean()


def hardest(y):
    """The mean of the largest half of the rows."""
    return y.square().sum(1).topk(int(len(y) * 0.5) or 1)[0].mean()


def pooled(pool, y, width):
    return pool(y.T[None], width).square().mean()


def with_numbers(y):
    """By the overloads that take a number, to which decompositions come."""
    aten, share = torch.ops.aten, 1 / len(y)
    sums = aten.add.Scalar(y, share, 2) + aten.sub.Scalar(y, share).square() + aten.remainder.Scalar(y.square(), share)
    return aten.mul.Scalar(sums.mean(), share)


def moved(y):
    """Each row beside the one before it, as labels are shifted: of two rows that is one, of one none."""
    before = y.T.new_zeros(y.T.shape)
    before[:, 1:] = y.T[:, :-1].clone()
    return (before * y.T + y.T.square()).mean()


def scores(y):
    """ONNX Runtime's operator ends the process where there are no rows."""
    rows = y.reshape(-1, 1, 5).expand(-1, 2, 5).unsqueeze(1)
    return torch.einsum("bcxd,bcyd->bcxy", rows, rows).square().mean()


def scaled(y, scale):
    return (y * scale).square().mean() + y.sum() * scale


def classes(y):
    return torch.arange(len(y)) % 5


def marked(y):
    """Where a row is of a class, as detectors write their targets."""
    targets = torch.zeros_like(y)
    targets[range(len(y)), classes(y)] = 1.0
    return F.binary_cross_entropy_with_logits(y, targets)


def root(number):
    try:
        return math.sqrt(number)
    except ValueError:
        return 7.0


def spectrum(y):
    return torch.fft.irfft(torch.fft.rfft(y, dim=0) * 0.5, n=len(y), dim=0)[-1].square().mean()


def hardest_by_value(y):
    return hardest(y) * (2 if y[0, 0].item() > 0 else 3)


FORMS = {  # what is done, and how many graphs the sizes need
    "nothing": (lambda y: y.square().mean(), 1),
    "more than": (lambda y: y.square().mean() if y.shape[0] > 5 else y.sum(), 2),
    "more than one": (lambda y: y.var(0).sum() if len(y) > 1 else y.sum(), 2),
    "more than two": (lambda y: y.var(0).sum() if len(y) > 2 else y.sum(), 2),
    "moved by one": (moved, 1),
    "even": (lambda y: y.square().mean() if y.size(0) % 2 == 0 else y.sum(), 2),
    "of all elements": (lambda y: y.square().mean() if y.numel() > 15 else y.sum(), 2),
    "one size": (lambda y: y.square().mean() if y.shape[0] == 4 else y.sum(), 2),
    "modulo the size": (lambda y: (y * ((torch.arange(len(y)) + 1) % len(y) | len(y))[:, None]).square().mean(), 1),
    "rolled by a size": (lambda y: (y.roll(len(y) // 2, 0) * y.cumsum(0)).square().mean(), 1),
    "sums and products with what a size gives": (with_numbers, 1),
    "as many bins": (
        lambda y: (y * torch.bincount(y.argmax(1), minlength=len(y) + 5)[: len(y), None]).square().sum(),
        1,
    ),
    "as many classes": (lambda y: (F.one_hot(torch.arange(len(y)), len(y)).float() @ y).cumsum(0).square().mean(), 1),
    "the quotient and the rest": (lambda y: y[: divmod(len(y) + 5, 3)[0]].square().mean() + divmod(len(y), 2)[1], 1),
    "a rounded size": (lambda y: y[: round(len(y) * 0.7)].square().mean(), 1),
    "a root and a logarithm": (lambda y: scaled(y, 1 / math.sqrt(len(y)) + math.log(len(y), 7) - math.log2(len(y))), 1),
    "a root that not all have": (lambda y: scaled(y, root(len(y) - 2.5)), 2),
    "a divisor that may be 0": (lambda y: scaled(y, 1 / math.log(len(y) + 1) + math.cos(len(y))), 1),
    "as many layers as it has bits": (lambda y: sum(y.sum() ** k for k in range(int(math.log2(len(y))) + 1)), 3),
    "more than a root": (lambda y: y.square().mean() if math.sqrt(len(y)) > 2 else y.sum(), 2),
    "a class of each row, by a range": (lambda y: y.log_softmax(1)[range(len(y)), classes(y)].mean() + marked(y), 1),
    "a class of each row, by a list": (lambda y: y.log_softmax(1)[list(range(0, y.shape[0])), classes(y)].mean(), 1),
    "rows in another order": (lambda y: (y[range(len(y) - 1, -1, -1)] * y.cumsum(0)).square().mean(), 1),
    "numbers of a range": (lambda y: (y * torch.tensor(range(len(y)))[:, None]).square().mean() * len(range(4)), 1),
    "a list that is changed": (lambda y: (y[[*range(len(y))][::-1]] * y.cumsum(0)).square().mean(), 5),
    "int() of a size": (lambda y: scaled(y[: int(y.size(0)) // 2 + 1].view(-1, 5), int(y.shape[0])), 1),
    "int() of each size": (lambda y: (y[range(int(y.size(0)))].view(*map(int, y.shape)) * y.cumsum(0)).mean(), 1),
    "more than, of int()": (lambda y: y.square().mean() if int(y.shape[0]) > 5 else y.sum(), 2),
    "int() beside its type": (lambda y: scaled(y, int(y.size(0)) * (2 if type(y.dim()) is int else 5)), 1),
    "a size in a text": (lambda y: scaled(y, len("batch %d" % len(y))), 5),  # noqa: UP031
    "quotients of negative numbers": (lambda y: scaled(y[: -(-len(y) // 3)].cumsum(0), (3 - len(y)) // 2), 1),
    "windows by a divisor": (lambda y: F.avg_pool2d(y[None], 2, 2, 0, True, False, 3).square().mean(), 1),
    "a square": (lambda y: y[: math.isqrt(len(y)) ** 2].square().mean() / float(len(y)), 1),
    "windows put together": (
        lambda y: y.view(-1, 1, 5).reshape(int(y.shape[0] * 5 / 5), 5).cumsum(0).square().mean(),
        1,
    ),
    "a window of all": (lambda y: pooled(F.max_pool1d, y, len(y)) + pooled(F.avg_pool1d, y, y.shape[0]), 1),
    "a quotient of sizes": (lambda y: (y * (100 // (len(y) // 3))).square().mean() if len(y) >= 3 else y.sum(), 2),
    "groups of three": (  # of fewer rows a remainder by no groups is asked for, which there is not
        lambda y: y[: len(y) // 3 * 3].view(len(y) // 3, -1).cumsum(0).square().mean() if len(y) >= 3 else y.sum(),
        2,
    ),
    "a spectrum of all rows": (
        lambda y: spectrum(torch.einsum("bk,bc,bkc->bc", y.tanh(), y.tanh(), y[:, :, None].tanh() * y[:, None].tanh())),
        2 if older.is_older("torch") else 1,  # of four rows the strides of 2.9's spectra are others than of six
    ),
    "an einsum of many": (  # of which torch multiplies others first where there are other sizes
        lambda y: torch.einsum("bi,ij,bj,j->b", y, y.T @ y, y.tanh(), y[0]).tanh().mean(),
        1,
    ),
    "an einsum of many, by lists of axes": (
        lambda y: torch.einsum(y, [0, 1], y.T @ y, [1, 2], y.tanh(), [0, 2], y[0], [2], [0]).tanh().mean(),
        1,
    ),
    "an einsum of no rows": (lambda y: scores(y[1:]) if len(y) > 1 else y.sum(), 2),
    "a window of all but one": (lambda y: pooled(F.max_pool1d, y, max(1, len(y) - 1)), 5),
    "places modulo the size": (lambda y: (y.take_along_dim(y.argsort(0), 0) * y).cumsum(0).square().mean(), 1),
    "a table that grows": (repeated, 2),
    "each row": (lambda y: sum(row.square().sum() * (i + 1) for i, row in enumerate(y)), 5),
    "chosen rows, beside a reshape": (
        lambda y: sum([row.sum() for row in y if row.sum() > 0], y.mean()) * y[:, :4].T.reshape(2, -1).square().mean(),
        6,  # of the second batch of six, a row's sum has another sign by then
    ),
    "each row, sliced": (lambda y: sum(y[i : i + 1].square().sum() * (i + 1) for i in range(len(y))), 5),
    "squeezed": (lambda y: y.squeeze().mean(0).square().sum(), 2),
    "squeezed along the batch": (lambda y: y.squeeze(0).mean(0).square().sum(), 2),
    "halves": (lambda y: torch.stack([part.mean() for part in y.chunk(2)]).square().sum(), 2),
    "parts by keyword": (lambda y: sum(part.mean() for part in torch.split(tensor=y, split_size_or_sections=2)), 3),
    "parts of other axes": (lambda y: sum(part.sum() for part in y.split(split_size=2, dim=1)), 1),
    "a share of the rows": (hardest, 2),
    "a share of the rows, beside a decision by a value": (hardest_by_value, 3),
    "parts": (lambda y: sum(part.mean() * (i + 1) for i, part in enumerate(y.split(2))), 3),
}


class RowByRow(torch.autograd.Function):
    """Has three times the gradient, written down for one row after the other."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        dx = torch.zeros_like(dy)
        for row in range(dy.size(0)):
            dx[row] = 3 * dy[row]
        return dx


class OfOneRow(RowByRow):
    @staticmethod
    def backward(ctx, dy):
        return dy * (3 if len(dy) > 1 else 5)


def hooked(y):
    y.register_hook(lambda dy: torch.stack([row * (place + 1) for place, row in enumerate(dy)]))
    return y.square().mean()


FORMS |= {  # by sizes gradients alone depend on
    "a backward of each row": (lambda y: RowByRow.apply(y).square().mean(), 5),
    "a backward of one row": (lambda y: OfOneRow.apply(y).square().mean(), 2),
    "a hook of each row": (hooked, 5),
}
LONG = (
    "chosen rows, beside a reshape",
    "int() beside its type", "a size in a text", "more than, of int()", "int() of each size",
    "of all elements", "squeezed along the batch", "a window of all but one", "each row, sliced", "each row",
    "an einsum of many, by lists of axes", "parts", "halves", "numbers of a range", "a list that is changed", "rows in another order", "a square", "a divisor that may be 0", "as many layers as it has bits", "more than a root", "a share of the rows", "an einsum of no rows", "moved by one", "a quotient of sizes", "even", "more than",
)  # fmt: skip


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in FORMS])
def test_each_size_trains_as_in_pytorch(name):
    function, graphs = FORMS[name]
    torch.manual_seed(0)
    module = Sized(function)
    twin, engine = copy.deepcopy(module), engine_of(module)
    for size in SIZES:
        step(engine, twin, batch(size), RATE)
    check_equal(module, twin)
    assert len(engine._ways.known) == graphs


def test_code_that_ran_often_before_has_one_graph_too():
    """Python has put other instructions in its place then."""
    torch.manual_seed(0)
    module = Sized(FORMS["a class of each row, by a list"][0])
    for _ in range(20):
        module(**batch(4))
    twin, engine = copy.deepcopy(module), engine_of(module)
    for size in SIZES:
        step(engine, twin, batch(size), RATE)
    check_equal(module, twin)
    assert len(engine._ways.known) == 1


def test_a_first_batch_of_one_row_goes_its_own_way():
    torch.manual_seed(0)
    module = Sized(FORMS["more than one"][0])
    twin, engine = copy.deepcopy(module), engine_of(module)
    for size in (1, 4, 1):
        step(engine, twin, batch(size), RATE)
    check_equal(module, twin)


def test_two_sizes_that_forward_compares():
    def forward(x, other):
        return (x + other if len(x) == len(other) else x * other.mean()).square().mean()

    torch.manual_seed(0)
    module = Sized(forward)
    module.forward = lambda x, other: forward(module.layer(x), module.layer(other))
    twin = copy.deepcopy(module)
    twin.forward = lambda x, other: forward(twin.layer(x), twin.layer(other))
    description = ModelDescription(
        [IODescription("x", ["n", 6]), IODescription("other", ["m", 6])], [IODescription("loss", [])]
    )
    engine = Engine(module, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())
    for n, m in ((4, 4), (3, 5), (5, 5), (2, 3)):
        step(engine, twin, {"x": batch(n)["x"], "other": batch(m)["x"]}, RATE)
    check_equal(module, twin)
    assert len(engine._ways.known) == 2


def test_evaluation_goes_the_way_of_its_size():
    module = Sized(FORMS["more than"][0])
    engine = engine_of(module)
    engine.train_step(batch(4), RATE)
    for size in (6, 4):
        torch.testing.assert_close(engine.eval_step(batch(size))[0], module(**batch(size)).detach())


def test_a_size_that_forward_does_not_take_changes_nothing():
    def choosy(y):
        if len(y) > 5:
            raise ValueError("too many rows")
        return y.square().mean()

    module = Sized(choosy)
    engine = engine_of(module)
    engine.train_step(batch(4), RATE)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(Exception, match="too many rows"):
        engine.train_step(batch(6), RATE)
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    engine.train_step(batch(4), RATE)


def test_where_no_graph_can_be_made_the_error_says_of_which_sizes():
    module = Sized(FORMS["more than"][0])
    engine = engine_of(module)
    engine.train_step(batch(4), RATE)
    with pytest.raises(UnsupportedModelError, match=r"of sizes \(x\.shape\[0\] <= 5\)"):
        engine.eval_step({"x": batch(6)["x"]})  # of a part of a batch no graph is made


NORMALIZED = {
    "rows": lambda: nn.BatchNorm1d(5),
    "places of rows": lambda: nn.Sequential(nn.Unflatten(1, (5, 1)), nn.BatchNorm1d(5, momentum=None)),
    "channels": lambda: nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.InstanceNorm1d(1, track_running_stats=True)),
}


def trained(engine, twin, sizes):
    for size in sizes:
        step(engine, twin, batch(size), RATE)


@pytest.mark.parametrize("name", NORMALIZED)
def test_one_row_is_evaluated_by_a_module_that_does_not_train_on_it(name):
    module = Sized(nn.Sequential(NORMALIZED[name](), Squared()))
    twin, engine = copy.deepcopy(module), engine_of(module)
    trained(engine, twin, (4, 6))
    for size in (1, 3, 1):
        expected = copy.deepcopy(twin).eval()(**batch(size)).detach()
        torch.testing.assert_close(engine.eval_step(batch(size))[0], expected)
    assert len(engine._ways.known) == 1
    trained(engine, twin, (2, 4))
    check_equal(module, twin)


def test_one_row_is_evaluated_first_and_after_a_change():
    module = Sized(nn.Sequential(nn.BatchNorm1d(5), nn.RMSNorm(5), Squared()))
    twin, engine = copy.deepcopy(module), engine_of(module)
    for eps in (1e-5, 1e-2):
        module.function[0].eps = twin.function[0].eps = eps
        expected = copy.deepcopy(twin).eval()(**batch(1)).detach()
        torch.testing.assert_close(engine.eval_step(batch(1))[0], expected)
        trained(engine, twin, (4,))
    check_equal(module, twin)


@pytest.mark.parametrize("seed", [0, 3])  # with others the gradients of two rows were rounding, and refused
@pytest.mark.parametrize("first", [[], [1], [4]])
def test_one_row_that_the_module_does_not_train_on_changes_nothing(first, seed):
    torch.manual_seed(seed)
    module = Sized(nn.Sequential(nn.BatchNorm1d(5), Squared()))
    engine = engine_of(module)
    for size in first:
        engine.eval_step(batch(size))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        engine.train_step(batch(1), RATE)
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
