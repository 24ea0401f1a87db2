"""Functions that the exporters refuse or change, in the forms that replace them: values, gradients, any batch size."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from exported import Model
from fidelity import assert_trains_as_in_pytorch, vectors
from marks import in_turn, slow, usual
from small import make
from test_fidelity import Loss, described
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.errors import ExecutionError, ExportError

RATE = 0.1


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def after(layer, width=None, **parts):
    """`layer` behind a weight, so that there is a gradient to compare."""
    scale = nn.Parameter(random(*(width or (1,)), seed=9) + 2.0)
    return Model(lambda m, x, *more: layer(m, x * m.scale, *more), scale=scale, **parts)


LAYERS = {
    "adaptive max, uneven": (lambda m, x: F.adaptive_max_pool2d(x, (3, 2)), (3, 7, 5)),
    "adaptive max, with indices": (
        lambda m, x: (lambda y, i: y * (i + 1))(*F.adaptive_max_pool2d(x, (3, 2), return_indices=True)), (3, 7, 5),
    ),
    "adaptive max of a line": (lambda m, x: F.adaptive_max_pool1d(x, 3), (3, 7)),
    "adaptive max of a volume": (lambda m, x: F.adaptive_max_pool3d(x, (2, 1, 3)), (2, 4, 5, 7)),
    "adaptive mean of a volume": (lambda m, x: F.adaptive_avg_pool3d(x, (2, 1, 3)), (2, 4, 5, 7)),
    "mean with a divisor": (
        lambda m, x: F.avg_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True, count_include_pad=False, divisor_override=5),
        (3, 7, 6),
    ),
    "fractional max": (lambda m, x: F.fractional_max_pool2d(x, 2, (3, 2), _random_samples=m.drawn), (3, 7, 5)),
    "projected LSTM": (lambda m, x: m.lstm(x)[0] + m.lstm(x)[1][1].sum(), (5, 6)),
    "log of two exponentials": (lambda m, x: torch.logaddexp(200 * x, 190 * x.flip(0)), (4,)),
    "log of sums of exponentials far apart": (
        lambda m, x: torch.logcumsumexp(x - x.new_tensor([300.0, 200, 0, 90, 300, 50]), 2) * 0.01, (5, 6),
    ),
    "log of exponentials of minus infinity": (
        lambda m, x: torch.logaddexp(x.masked_fill(x > 0, -math.inf), x.masked_fill(x > 0.5, -math.inf)).clamp(min=-9), (4,),
    ),
    "angles, on the axes too": (
        lambda m, x: torch.atan2(x * torch.tensor([0.0, 0, 1, 1, -1, 0, -0.0]), (x * 0 + 1) * torch.tensor([-1.0, 1, 0, 2, -2, 0, -3])), (7,),
    ),
    "slopes of angles, on the axes too": (
        lambda m, x: torch.atan2((x * 0 + 1) * torch.tensor([0.0, 0, 1, 1, -1, 0]), x * torch.tensor([-1.0, 1, 0, 2, -2, 0])), (6,),
    ),
    "phases of a spectrum": (lambda m, x: torch.fft.rfft(x).angle() * torch.tensor([0.1, 1, 1, 0.1]), (6,)),
    "logarithm and exponential near 1 and 0": (
        lambda m, x: torch.log1p(x * 1e-5) * 1e5 + torch.expm1(x * 1e-6) * 1e6 + torch.special.expm1(x) + torch.log1p(x.exp()), (5,),
    ),
    "sinc, at 0 too": (lambda m, x: torch.sinc(x * torch.tensor([0.0, 1, 2, 3])), (4,)),
    "cosines of short vectors": (lambda m, x: F.cosine_similarity(0.3 * x, x.sin() + 0.2, eps=0.9), (4,)),
    "mean over all axes, by None": (
        lambda m, x: x.mean(dim=None, keepdim=True) * x.mean(None) * x.mean(axis=1).sum(), (4,),
    ),
    "variance below its floor": (
        lambda m, x: F.gaussian_nll_loss(x, 0.5 * x.detach(), x.square() * 1e-3, True, 1e-2, reduction="none"), (4,),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("case", [slow(name) if name == "projected LSTM" else name for name in LAYERS])
def test_the_form_has_the_value_and_the_gradient_of_the_original(case):
    function, shape = LAYERS[case]
    parts = {
        "fractional max": {"drawn": nn.Buffer(torch.rand(1, 3, 2, generator=torch.Generator().manual_seed(1)))},
        "projected LSTM": {"lstm": nn.LSTM(6, 5, 2, proj_size=3, bidirectional=True, batch_first=True)},
    }.get(case, {})
    torch.manual_seed(0)
    module = Loss(after(function, shape, **parts))
    batches = [[random(1 if parts and "drawn" in parts else 2 + step, *shape, seed=step)] for step in range(2)]
    ours = copy.deepcopy(module)
    trainer = make(ours, loss_fn=None, desc=described(batches[0]))
    for inputs in batches:
        module.zero_grad()
        loss, y = module(*inputs)
        loss.backward()
        found_loss, found_y = trainer.train_step(*inputs, RATE)
        torch.testing.assert_close(found_y, y.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-4, atol=1e-5)
        for (name, parameter), trained in zip(module.named_parameters(), ours.parameters()):
            parameter.data.sub_(RATE * parameter.grad)
            torch.testing.assert_close(
                trained.detach(),
                parameter.detach(),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )


LENGTHS, TARGET_LENGTHS = torch.tensor([12, 9, 12]), torch.tensor([4, 2, 0])
TARGETS = torch.tensor([[1, 2, 2, 4], [3, 1, 0, 0], [0, 0, 0, 0]])
CTC = {
    "mean": ({}, TARGETS),
    "sum": ({"reduction": "sum"}, TARGETS),
    "targets in a row": ({"reduction": "sum"}, torch.tensor([1, 2, 2, 4, 3, 1])),
    "another blank": ({"blank": 4}, TARGETS % 4),
    "not enough time": (
        {"zero_infinity": True, "reduction": "sum"},
        torch.tensor([[1, 1, 1, 1], [3, 1, 0, 0], [0, 0, 0, 0]]),
    ),
}


@pytest.mark.parametrize("case", usual(CTC, "targets in a row"))
def test_connectionist_temporal_classification_trains_as_in_pytorch(case):
    options, targets = CTC[case]
    lengths = torch.tensor([5, 9, 12]) if case == "not enough time" else LENGTHS

    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x, targets, lengths, target_lengths):
            log_probs = self.linear(x).log_softmax(-1)
            return F.ctc_loss(log_probs, targets, lengths, target_lengths, **options), log_probs

    torch.manual_seed(0)
    module = Speech()
    inputs = [random(12, 3, 6), targets, lengths, TARGET_LENGTHS]
    description = ModelDescription(
        [IODescription(f"x{i}", list(x.shape), x.dtype) for i, x in enumerate(inputs)],
        [IODescription("loss", []), IODescription("log_probs", [])],
    )
    ours = copy.deepcopy(module)
    loss = module(*inputs)[0]
    found = make(ours, loss_fn=None, desc=description).train_step(*inputs, RATE)[0]
    torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    for parameter, gradient, trained in zip(module.parameters(), gradients, ours.parameters()):
        torch.testing.assert_close(trained.detach(), parameter.detach() - RATE * gradient, rtol=1e-4, atol=1e-5)


def test_connectionist_temporal_classification_takes_batches_of_any_size():
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x, targets):
            lengths, target_lengths = targets[:, 0] * 0 + x.shape[0], (targets > 0).sum(1)
            return F.ctc_loss(self.linear(x).log_softmax(-1), targets, lengths, target_lengths)

    torch.manual_seed(0)
    module = Speech()
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    description = ModelDescription(
        [IODescription("x", [12, "batch", 6], torch.float32), IODescription("targets", ["batch", 4], torch.int64)],
        [IODescription("loss", [])],
    )
    trainer = make(module, loss_fn=None, desc=description)
    for step, targets in enumerate((TARGETS, TARGETS[:1], TARGETS[[1, 0, 1, 0]])):
        x = random(12, len(targets), 6, seed=step)
        loss = twin(x, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, targets, RATE), loss.detach(), rtol=1e-5, atol=1e-5)


WRONG_LENGTHS = {
    "padded": (
        TARGETS,
        [
            ("lengths", [13, 9, 12]),
            ("lengths", [-1, 9, 12]),
            ("target_lengths", [5, 2, 0]),
            ("target_lengths", [-1, 2, 0]),
        ],
    ),
    "in a row": (
        torch.tensor([1, 2, 2, 4, 3, 1]),
        [("target_lengths", [4, 1, 0]), ("target_lengths", [4, 2, 1]), ("target_lengths", [5, 2, -1])],
    ),
}


@pytest.mark.parametrize("targets, wrong", WRONG_LENGTHS.values(), ids=WRONG_LENGTHS)
def test_lengths_that_a_later_batch_cannot_have_fail_as_in_pytorch(targets, wrong):
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x, targets, lengths, target_lengths):
            return F.ctc_loss(self.linear(x).log_softmax(-1), targets, lengths, target_lengths)

    inputs = {"x": random(12, 3, 6), "targets": targets, "lengths": LENGTHS, "target_lengths": TARGET_LENGTHS}
    description = ModelDescription(
        [IODescription(name, list(x.shape), x.dtype) for name, x in inputs.items()], [IODescription("loss", [])]
    )
    module = Speech()
    trainer = make(module, loss_fn=None, desc=description)
    trainer.train_step(*inputs.values(), RATE)
    before = copy.deepcopy(module.state_dict())
    for name, lengths in wrong:
        batch = {**inputs, name: torch.tensor(lengths)}
        with pytest.raises(RuntimeError, match="Expected"):
            module(*batch.values())
        with pytest.raises(ExecutionError, match="out of"):
            trainer.train_step(*batch.values(), RATE)
        assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())


LOSSES_OF_EACH = {
    "cross entropy": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "cross entropy, smoothed": lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
    "log-likelihood": lambda x, t: F.nll_loss(F.log_softmax(x, 1), t, reduction="none"),
}


@pytest.mark.parametrize("name, which", in_turn(list(LOSSES_OF_EACH), ["all", "the larger of each pair"]))
def test_losses_of_each_sample_have_the_size_of_any_batch(name, which):
    torch.manual_seed(0)
    module = nn.Linear(6, 5)
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    description = ModelDescription(
        [IODescription("x", ["batch", 6], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [])],
    )

    def loss_fn(scores, labels):
        losses = LOSSES_OF_EACH[name](scores, labels)
        return losses.mean() if which == "all" else losses.view(-1, 2).amax(1).mean()

    trainer = make(module, loss_fn=loss_fn, desc=description)
    for step, batch in enumerate((4, 2, 6)):
        x, labels = random(batch, 6, seed=step), torch.arange(batch) % 5
        loss = loss_fn(twin(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, labels, RATE), loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, lambda x, t, **o: F.nll_loss(F.log_softmax(x, 0), t, **o)])
def test_a_loss_takes_one_sample_without_a_batch(loss_fn, reduction):
    model = nn.Linear(6, 5)
    description = ModelDescription(
        [IODescription("x", [6], torch.float32), IODescription("label", [], torch.int64)], [IODescription("loss", [])]
    )
    x, label = random(6), torch.tensor(3)
    expected = loss_fn(model(x), label).detach()
    loss = make(model, loss_fn=lambda y, t: loss_fn(y, t, reduction=reduction), desc=description).train_step(
        x, label, RATE
    )
    torch.testing.assert_close(loss, expected)


def test_unique_values_choose_and_count():
    """torch.unique is a pair of functions that a flag chooses from, as those of torch.nn.functional are."""
    model = nn.Linear(6, 5)
    description = ModelDescription(
        [IODescription("x", ["batch", 6], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [])],
    )

    def loss_fn(y, labels):
        found, places = torch.unique(labels, return_inverse=True)
        return y[places].square().mean() * found.numel() + torch.unique_consecutive(labels).sum()

    trainer = make(model, loss_fn=loss_fn, desc=description)
    for labels in (torch.tensor([4, 0, 0, 2]), torch.tensor([1, 1, 1])):
        x = random(len(labels), 6)
        expected = loss_fn(model(x), labels).detach()
        torch.testing.assert_close(trainer.train_step(x, labels, RATE), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32], ids=str)
def test_unique_values_of_types_that_the_runtime_has_not(dtype):
    def function(m, x):
        codes = (2 * x.abs()).to(dtype)
        found, places, counts = torch.unique(codes, return_inverse=True, return_counts=True)
        rows = torch.unique(codes[:, :1], dim=0)
        return m.linear(x) * found.float().sum() * len(rows) / 20 + (places + counts[0]) / 50

    assert_trains_as_in_pytorch(lambda: Model(function, linear=nn.Linear(6, 6)), vectors, evaluates=True)


@pytest.mark.parametrize("rows", [4, "batch"])
def test_what_is_mapped_over_the_batch_trains_as_in_pytorch(rows):
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x, y):
            return torch.func.vmap(lambda a, b: F.mse_loss(self.linear(a), b))(x, y).mean()

    torch.manual_seed(0)
    module = Mapped()
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    description = ModelDescription(
        [IODescription("x", [rows, 6], torch.float32), IODescription("y", [rows, 5], torch.float32)],
        [IODescription("loss", [])],
    )
    trainer = make(module, loss_fn=None, desc=description)
    for step, batch in enumerate((4, 4, 4 if rows == 4 else 7)):
        x, y = random(batch, 6, seed=step), random(batch, 5, seed=step + 9)
        loss = twin(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, y, RATE), loss.detach(), rtol=1e-5, atol=1e-5)


class Pyramid(nn.Module):
    """Means and maxima over parts of images of any size, beside each other (SPP) and enlarged again (PSP)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 1)

    def forward(self, x):
        y = self.layer(x)
        parts = [F.adaptive_max_pool2d(y, (3, 2)), F.adaptive_avg_pool2d(y, (1, 4)), F.adaptive_avg_pool2d(y, 3)]
        parts.append(F.adaptive_avg_pool2d(y, (None, 2)).mean(2))
        parts.append(F.adaptive_avg_pool1d(y.flatten(2), 5))
        coarse = F.interpolate(F.adaptive_avg_pool2d(y, 2), size=y.shape[2:], mode="bilinear")
        return torch.cat([part.flatten(1) for part in parts], 1).square().mean() + (coarse * y).mean()


def test_adaptive_pools_of_images_of_any_size():
    torch.manual_seed(0)
    module = Pyramid()
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    description = ModelDescription([IODescription("x", ["n", 2, "h", "w"])], [IODescription("loss", [])])
    trainer = make(module, loss_fn=None, desc=description)
    for step, (height, width) in enumerate(((7, 9), (8, 4), (5, 13))):
        x = random(2, 2, height, width, seed=step)
        loss = twin(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, RATE), loss.detach(), rtol=1e-5, atol=1e-5)


def test_a_function_inside_a_function_is_seen():
    """F.linear_cross_entropy calls F.cross_entropy, whose label smoothing the exporters forget."""
    model = nn.LinearCrossEntropyLoss(6, 5, label_smoothing=0.2) if hasattr(nn, "LinearCrossEntropyLoss") else None
    if model is None:
        pytest.skip("this torch has no LinearCrossEntropyLoss")  # an older one
    x, label = random(4, 6), torch.tensor([0, 3, 1, 4])
    description = ModelDescription(
        [IODescription("x", ["batch", 6], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [])],
    )
    expected = model(x, label).detach()
    torch.testing.assert_close(make(model, loss_fn=None, desc=description).train_step(x, label, RATE), expected)


def test_an_orthogonal_matrix_trains_as_in_pytorch():
    def batch(step):
        return [random(3 + step, 6)]

    assert_trains_as_in_pytorch(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), batch, evaluates=True)


class Eigenvalues(nn.Linear):
    def forward(self, x):
        return x * torch.linalg.eigvals(self.weight).abs()


def test_what_the_exporters_do_not_have_is_named():
    layer = Eigenvalues(6, 6, bias=False)
    with pytest.raises(ExportError, match="linalg_eig"):
        make(Loss(layer), loss_fn=None, desc=described([random(3, 6)])).train_step(random(3, 6), RATE)


def test_a_trained_number_stays_what_it_is_called_behind_operators_that_leave_it_as_it_is():
    """torch's translations give it back, and its exporter finds parameters by the names of values, which it had changed."""

    def gated(m, x):
        return x * m.gate.transpose(0, -1) * m.gate.repeat(()) + m.gate.logsumexp(())

    make_layer = lambda: Model(gated, gate=nn.Parameter(torch.tensor(0.7)))  # noqa: E731
    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)
