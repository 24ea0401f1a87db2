"""What forward itself computes in half precision, by `torch.autocast` or `.half()`, trains as in PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import orttrainer
from orttrainer.errors import ExportMismatchError, SchemaError
from orttrainer.export import faithful

ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # 24, 11 and 8 bits of mantissa


def trained(module, dtype, **options):
    """Check loss and parameters of two steps against PyTorch's, within what half precision rounds; the trainer."""
    generator = torch.Generator().manual_seed(0)
    x, label = torch.randn(6, 8, generator=generator), torch.randn(6, 8, generator=generator)
    reference = copy.deepcopy(module)
    trains, expected = ([p for p in m.parameters() if p.requires_grad] for m in (module, reference))
    optimizer = torch.optim.SGD(expected, lr=0.5)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(trains, lr=0.5), **options)
    for _ in range(2):
        loss = F.mse_loss(reference(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x, label)[0], loss.detach(), rtol=ROUNDING[dtype], atol=0.0)
    for p, q in zip(trains, expected):
        torch.testing.assert_close(p, q, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    return trainer


class Normalized(nn.Module):
    """A function of half numbers and float32 weights, by autocast."""

    def __init__(self, function, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.dtype = function, dtype
        self.layer, self.weight, self.bias = nn.Linear(8, 8), nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            y = self.function(self.layer(x), self.weight, self.bias)
            assert y.dtype == self.dtype
        return y.float()


NORMALIZATIONS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (8,), w, b * w),
    "layer_norm without a bias": lambda x, w, b: F.layer_norm(x, (8,), w * b),
    "instance_norm": lambda x, w, b: F.instance_norm(x[:, :, None] * x[:, None], weight=w, bias=b).sum(1),
}


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_normalizations_of_half_numbers_take_weights_of_float32(name):
    trained(Normalized(NORMALIZATIONS[name], torch.float16), torch.float16)


class Adapted(nn.Module):
    """A frozen layer in half precision, with float32 beside it and behind it."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.base = dtype, nn.Linear(8, 8).to(dtype).requires_grad_(False)
        self.before, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.before(x)
        return self.head(self.base(torch.tanh(y).to(self.dtype)).float() + y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_behind_a_frozen_half_layer_trains(dtype):
    trained(Adapted(dtype), dtype)


class Calls(nn.Module):
    """A function of a layer's output."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self.layer(x))


def normalized_images(x):
    return F.batch_norm(F.conv2d(x.reshape(6, 2, 4, 1), x[:2, :2, None, None]), None, None, training=True)


FUNCTIONS = {
    "softmax": lambda x: torch.softmax(x.half(), -1).float(),
    "log1p of exp": lambda x: torch.log1p(torch.exp(x.half())).float(),
    "sin in bfloat16": lambda x: torch.sin(x.bfloat16()).float(),
    "products in bfloat16": lambda x: (torch.sigmoid(x.bfloat16() @ x.bfloat16().mT) @ x.bfloat16() / 8).float(),
    "images in bfloat16": lambda x: F.conv2d(F.pad(x.bfloat16(), (1, 1))[None, None], x[:1, None, None, :3].bfloat16())[
        0, 0
    ].float(),
    "batch norm of images in bfloat16": lambda x: normalized_images(x.bfloat16()).float().reshape(6, 8) / 4,
    "rows and parts in bfloat16": lambda x: torch.cat([x.bfloat16()[[0, 0, 2]], x.bfloat16()[1:4] * 2]).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_behind_half_computing_trains(name):
    trained(Calls(FUNCTIONS[name]), torch.bfloat16 if "bfloat16" in name else torch.float16)


@pytest.mark.parametrize("dtype, share", [(torch.float16, 0.03), (torch.bfloat16, 0.15)], ids=str)
def test_what_half_precision_does_not_explain_is_refused(dtype, share, monkeypatch):
    monkeypatch.setitem(faithful._REWRITES, torch.sin, lambda x: torch.sin(x) * (1 + share))
    with pytest.raises(ExportMismatchError, match="differs from the module's"):
        trained(Calls(lambda x: torch.sin(x.to(dtype)).float()), dtype)


def test_losses_are_rounded_where_pytorch_rounds(caplog):
    """Each operator's result, so that overflows and small terms are lost as in PyTorch: nearer than the format's own rounding."""
    module = Adapted(torch.bfloat16)
    x, label = torch.randn(4, 8), torch.randn(4, 8)
    expected = F.mse_loss(module(x), label)
    found = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.head.parameters(), lr=0.1)).step(x, label)
    torch.testing.assert_close(found[0], expected.detach(), rtol=1e-6, atol=0.0)
    assert not caplog.records  # as that ONNX Runtime has no kernels


ROUND_TRIPS = {
    "there and back": lambda x: x.to(torch.float8_e4m3fn).float(),
    "too large numbers": lambda x: torch.nan_to_num((500 * x).to(torch.float8_e4m3fn).float(), nan=7.0) / 500 + x,
    "with the gradient of no rounding": lambda x: x + (x.to(torch.float8_e5m2).float() - x).detach(),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_floats_of_8_bits_train_in_the_first_opset_that_has_them(name):
    trainer = trained(Calls(ROUND_TRIPS[name]), torch.float32)
    assert {x.domain: x.version for x in trainer.training_graph.model.opset_import}[""] == 19


def test_an_output_of_8_bits_is_refused_by_name():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            y = self.linear(x)
            return y, y.to(torch.float8_e4m3fn)

    module = Both()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trainer = orttrainer.trainer(module, lambda outputs, label: (outputs[0] - label).square().mean(), optimizer)
    for _ in range(2):
        with pytest.raises(SchemaError, match=r"output .* is torch.float8_e4m3fn, .*return it as .float\(\)"):
            trainer.step(torch.ones(3, 4), torch.ones(3, 2))
