"""What forward itself computes in half precision, by `torch.autocast` or `.half()`, trains as in PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import orttrainer
from orttrainer.errors import ExportMismatchError, SchemaError, UnsupportedModelError
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


class Divided(nn.Module):
    """Whole numbers, divided by others that may be 0 on another batch, beside half ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        whole = (x * 4).int()
        return (self.layer(x).half() * 2.5).float() * (7 // (whole.abs() + 1)) + whole % (x.shape[0] + 1)


def test_whole_numbers_are_divided_beside_half_ones():
    trained(Divided(), torch.float16)


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


def by_numbers(x, scale):
    """Functions of half numbers, and of numbers that these have not all digits of, or that are infinite or 0 among them."""
    return [
        0.1 * x,
        x * 2049,
        x * (1e-7 * len(x)),
        (x > 0).to(x.dtype) * -1e9 + x,
        (x * 1e5).clamp(-10, 10),
        x * 20 * 1e-8 * 1e8,
        x / 1e5 * 1e4,
        7.1234 / x,
        torch.div(x, 0.3, rounding_mode="trunc") + x,
        x.clone().mul_(0.1).div_(0.7),
        x * scale,
        x / scale,
        scale * x,
        x + 0.1 - 1e-8,
        (x.abs() + 1) ** 0.3,
        F.leaky_relu(x, 0.1),
    ]


class Rounds(nn.Module):
    """All of these, of numbers that are no layer's, and so are the same in PyTorch."""

    def __init__(self, functions, dtype):
        super().__init__()
        self.functions, self.dtype = functions, dtype
        self.weight, self.scale = nn.Parameter(torch.ones(8)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return torch.stack(self.functions((x * self.weight).to(self.dtype), self.scale)).float()


def rounded(functions, dtype):
    """What PyTorch computes, and what is computed here."""
    torch.manual_seed(0)
    module, x = Rounds(functions, dtype), torch.randn(200, 8)
    expected = module(x).detach()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    trainer = orttrainer.trainer(module, lambda y, label: (y.clamp(-9, 9) - label).square().mean(), optimizer)
    return expected, trainer.step(x, torch.zeros(()))[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_beside_half_tensors_are_rounded_where_pytorch_rounds(dtype):
    expected, found = rounded(by_numbers, dtype)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_operator_of_half_tensors_that_is_several_in_onnx_is_rounded_once(dtype):
    def functions(x, scale):
        y = x.flip(1)
        sums = torch.addcmul(x, x, y, value=0.3), torch.addcdiv(x, x, y, value=0.3), torch.lerp(x, y, 0.3)
        return [*sums, F.softplus(x, 7.1), x * scale]

    expected, found = rounded(functions, dtype)
    # The last bit of float32 may be another: of exp, and where a product is added in one instruction.
    assert (found != expected).float().mean() < 1e-3


NUMBERS = {
    "mask": lambda x: (x + (1 - (x > -1).half()) * -1e9).softmax(-1),
    "quotient": lambda x: x / 1e5 * 1e5,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_pass_by_numbers_that_half_precision_has_not(name):
    trained(Calls(lambda x: NUMBERS[name](x.half()).float()), torch.float16)


ROUND_TRIPS = {
    "there and back": lambda x: x.to(torch.float8_e4m3fn).float(),
    "too large numbers": lambda x: torch.nan_to_num((500 * x).to(torch.float8_e4m3fn).float(), nan=7.0) / 500 + x,
    "transposed": lambda x: x.to(torch.float8_e4m3fn).T.float().T,
    "in other sizes": lambda x: x.to(torch.float8_e5m2).reshape(-1).float().reshape(x.shape),
    "joined and taken apart": lambda x: torch.cat([y.to(torch.float8_e4m3fnuz) for y in (x, x.sin())], 1).float()[
        :, 4:12
    ],
    "of some places": lambda x: x + x.to(torch.float8_e4m3fn)[:, [0]].float(),
    "of zeros": lambda x: x + torch.zeros_like(x, dtype=torch.float8_e4m3fn).float(),
    "with the gradient of no rounding": lambda x: x + (x.to(torch.float8_e5m2).float() - x).detach(),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_floats_of_8_bits_train_in_the_first_opset_that_has_them(name):
    trainer = trained(Calls(ROUND_TRIPS[name]), torch.float32)
    assert {x.domain: x.version for x in trainer.training_graph.model.opset_import}[""] == 19


@pytest.mark.parametrize("kind", ["buffer", "frozen weight"])
def test_state_of_8_bits_is_refused_by_name(kind):
    module = Calls(lambda x: x * module.table.float())
    table = torch.ones(1).to(torch.float8_e4m3fn)
    if kind == "frozen weight":
        module.table = nn.Parameter(table, requires_grad=False)
    else:
        module.register_buffer("table", table)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(
        UnsupportedModelError, match=r"'table' of the model is of torch.float8_e4m3fn, .*tensor\.half\(\)"
    ):
        trainer.step(torch.ones(3, 8), torch.ones(3, 8))


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="torch has none")
def test_powers_of_two_of_8_bits_are_refused_by_name():
    module = Calls(lambda x: x * x.detach().abs().to(torch.float8_e8m0fnu).float())
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(UnsupportedModelError, match=r"forward makes numbers of torch.float8_e8m0fnu, by .*exp2"):
        trainer.step(torch.ones(3, 8), torch.ones(3, 8))


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
