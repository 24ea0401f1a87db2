"""The checks on the first batch: what is rounding passes, what is more does not."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.engine import verify
from orttrainer.errors import ExportMismatchError
from orttrainer.export import export_module, observe_gradients

DESCRIPTION = ModelDescription([IODescription("x", [4])], [IODescription("loss", [])])


class Sum(nn.Module):
    """The sum of a function of weights times inputs, both fixed."""

    def __init__(self, function, weight):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.tensor(weight))

    def forward(self, x):
        return self.function(self.weight * x - 1).sum()


def _check(monkeypatch, module, error: float) -> None:
    monkeypatch.setattr(verify, "gradient_errors", lambda *arguments: {"weight": error})
    batch = [torch.ones(4)]
    forward = export_module(module, None, DESCRIPTION, batch)
    expected = observe_gradients(module, None, DESCRIPTION, batch)
    verify.check_gradients(forward, module, None, DESCRIPTION, batch, expected)


def times_a_constant(x):
    return nn.functional.linear(
        torch.tanh(x), torch.eye(4)
    )  # a float32 that is in no module; float64 does not mix with it


@pytest.mark.parametrize("function", [torch.tanh, torch.relu, times_a_constant])
def test_an_error_of_a_percent_is_refused_where_rounding_does_nothing_to_the_gradient(function, monkeypatch):
    with pytest.raises(ExportMismatchError, match="gradient of parameter 'weight' differs from PyTorch's"):
        _check(monkeypatch, Sum(function, [0.5, 0.9, 1.5, 2.0]), 1e-2)


def test_an_error_of_a_percent_passes_where_the_sign_under_a_relu_flips_by_rounding(monkeypatch):
    _check(monkeypatch, Sum(torch.relu, [0.5, 0.9, 1.0, 2.0]), 1e-2)


def test_what_float32_explains_takes_no_memory_for_float64(monkeypatch):
    """On some processors a ResNet's first step held its activations in float64, too: 720 MB, where training takes 460."""
    widened, double = [], nn.Module.double
    monkeypatch.setattr(nn.Module, "double", lambda module: widened.append(module) or double(module))
    _check(monkeypatch, Sum(torch.relu, [0.5, 0.9, 1 + 2.0**-22, 2.0]), 1e-2)
    assert not widened
    _check(monkeypatch, Sum(torch.relu, [0.5, 0.9, 1.0, 2.0]), 5e-2)  # neither of two moves is beyond 0
    assert widened


def test_a_gradient_that_is_0_but_for_rounding_is_not_refused_for_what_it_is():
    """That of a bias in front of BatchNorm; of two rows BatchNorm makes 1 and -1, and rounding is all that is left."""
    torch.manual_seed(2)
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    module, x, label = nn.Sequential(*layers, nn.Linear(6, 3)), torch.randn(2, 6), torch.randint(0, 3, (2,))
    reference = copy.deepcopy(module)
    loss, _ = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1)).step(
        x, label
    )
    torch.testing.assert_close(loss, nn.functional.cross_entropy(reference(x), label).detach())


def test_gradients_that_are_0_but_for_rounding_tell_nothing(monkeypatch):
    """PyTorch's may be 0 to the bit, of which any error is too large a part: here one in the last place of what is taken from itself."""
    vanishing = Sum(lambda x: x - x + 1, [0.5, 0.9, 1.5, 2.0])
    _check(monkeypatch, vanishing, 1e-7 / 1e-18)
    with pytest.raises(ExportMismatchError, match="gradient of parameter 'weight' differs from PyTorch's"):
        _check(monkeypatch, vanishing, 1e-3 / 1e-18)


def test_gradients_that_are_small_beside_the_loss_are_no_rounding(monkeypatch):
    """As where a constant is added to it: float64 has them."""
    with pytest.raises(ExportMismatchError, match="gradient of parameter 'weight' differs from PyTorch's"):
        _check(monkeypatch, Sum(lambda x: torch.tanh(x) + 1e8, [0.5, 0.9, 1.5, 2.0]), 1e-2)


def test_errors_are_numbers_where_pytorch_has_no_gradient_at_all():
    """As of a student that equals its teacher: what the graph has then is of rounding."""
    forward = export_module(Sum(torch.square, [1.0] * 4), None, DESCRIPTION, [torch.full([4], 1 + 1e-6)])
    (error,) = verify.gradient_errors(forward, {"weight": torch.zeros(4)}, [torch.full([4], 1 + 1e-6)]).values()
    assert 0 < error < math.inf


def test_errors_are_numbers_where_another_gradient_is_none():
    """NaN in PyTorch too, as of a root of what is negative."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.root, self.zero = nn.Parameter(-torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.root).sqrt().sum() * 1.0 + (0 * x * self.zero).sum()

    batch = [torch.ones(4)]
    module = Two()
    expected = observe_gradients(module, None, DESCRIPTION, batch)
    assert expected["root"].isnan().all() and not expected["zero"].any()
    forward = export_module(module, None, DESCRIPTION, batch)
    assert verify.gradient_errors(forward, expected, batch)["zero"] == 0
    verify.check_gradients(forward, module, None, DESCRIPTION, batch, expected)


@pytest.mark.parametrize("said, refused", [("FAIL : Shape mismatch", True), ("NOT_IMPLEMENTED : no kernel", False)])
def test_gradients_that_cannot_be_computed_are_not_the_modules(said, refused, monkeypatch, caplog):
    class Session:
        def run_with_ort_values(self, *_):
            raise RuntimeError(f"[ONNXRuntimeError] : {said}")

    batch = [torch.ones(4)]
    module = Sum(torch.tanh, [0.5] * 4)
    forward = export_module(module, None, DESCRIPTION, batch)
    monkeypatch.setattr(verify.runtime, "checking_session", lambda *_, **__: Session())
    expected = observe_gradients(module, None, DESCRIPTION, batch)
    if refused:
        with pytest.raises(ExportMismatchError, match=r"cannot be computed on the first batch.*Shape mismatch"):
            verify.check_gradients(forward, module, None, DESCRIPTION, batch, expected)
    else:
        verify.check_gradients(forward, module, None, DESCRIPTION, batch, expected)
        assert "so they are not checked" in caplog.text


class Normalized(nn.Module):
    """The third moment of what BatchNorm makes of a batch that hardly varies: float32 keeps two or three of its digits."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.norm(x) * self.scale).pow(3).mean()


class OfGroups(Normalized):
    """The same of features in groups, by a matrix that is neither parameter nor buffer, as TabNet has it: it stays float32."""

    groups = torch.eye(3)

    def forward(self, x):
        return super().forward(x @ self.groups)


class Placed(Normalized):
    """The same, put in its place in zeros that forward makes, which are float32."""

    dtype = None

    def forward(self, x):
        y = torch.zeros(8, 3, dtype=self.dtype)
        y[torch.arange(8)] = self.norm(x) * self.scale
        return y.pow(3).mean()


class PlacedInFloat32(Placed):
    """The same of zeros that are float32 by what forward says: float64 is rounded where it is put there."""

    dtype = torch.float32


class Bound(Normalized):
    """The same by what takes float32 only."""

    def forward(self, x):
        if self.scale.dtype != torch.float32:
            raise TypeError("kernels are for float32")
        return super().forward(x)


class Narrowed(Normalized):
    """The same in float32, whatever the parameters are."""

    def forward(self, x):
        return nn.functional.batch_norm(x.float(), None, None, training=True).pow(3).mean() * self.scale.float().mean()


class Initialized(Normalized):
    """The same with a flag, by which it decides and which it sets to a new tensor, as ActNorm of normflows does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("done", torch.tensor(0.0))

    def forward(self, x):
        if not self.done > 0.0:
            self.done = torch.tensor(1.0)
        return super().forward(x)


@pytest.mark.parametrize("place", ["child", "here"])
@pytest.mark.parametrize("kind", [Normalized, OfGroups, Placed, PlacedInFloat32, Bound, Narrowed, Initialized])
def test_a_forward_that_rounding_decides_is_exported(kind, place, monkeypatch):
    monkeypatch.setenv("ORTTRAINER_EXPORT", place)
    x = 1000 + 0.02 * torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    single, double = (Normalized().to(d)(x.to(d)).item() for d in (torch.float32, torch.float64))
    assert abs(single - double) > 1e-3 * abs(double)  # else this tests nothing
    description = ModelDescription([IODescription("x", ["batch", 3])], [IODescription("loss", [])])
    export_module(kind(), None, description, [x])


def test_float64_is_asked_once_for_all_outputs(monkeypatch):
    """It was once for each: ten minutes of a D-FINE, with the statistics of fifty layers."""

    class Twice(Normalized):
        def forward(self, x):
            y = self.norm(x) * self.scale
            return y.pow(3).mean(), y.pow(5).mean(), y.pow(7).mean()

    widened, double = [], nn.Module.double
    monkeypatch.setattr(nn.Module, "double", lambda module: widened.append(module) or double(module))
    monkeypatch.setenv("ORTTRAINER_EXPORT", "here")
    x = 1000 + 0.02 * torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    outputs = [IODescription(name, []) for name in ("loss", "fifth", "seventh")]
    export_module(Twice(), None, ModelDescription([IODescription("x", [8, 3])], outputs), [x])
    assert len(widened) < 2


class Single(Normalized):
    """The same of a module of which there is no copy."""

    def __init__(self):
        super().__init__()
        self.source = (number for number in range(3))


def test_a_difference_that_may_be_rounding_is_told_as_such():
    x = 1000 + 0.02 * torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    description = ModelDescription([IODescription("x", [8, 3])], [IODescription("loss", [])])
    told = "may be rounding.*is not known: a copy of the module does not run .*generator.*Let forward compute that part in float64"
    with pytest.raises(ExportMismatchError, match=told):
        export_module(Single(), None, description, [x])


class Alike(nn.Module):
    """A bias whose gradient is the difference of two sums, each of many equal numbers."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 1, 1))

    def forward(self, x):
        halves = (self.bias + x).tanh().mean((1, 2, 3)).chunk(2)
        return halves[0].sum() * 1.01 - halves[1].sum() + 1


def test_the_gradient_of_pixels_that_are_alike_is_not_refused_for_how_it_is_summed():
    batch = [torch.zeros(8, 1, 256, 256)]
    description = ModelDescription([IODescription("x", ["batch", 1, 256, 256])], [IODescription("loss", [])])
    forward = export_module(Alike(), None, description, batch)
    expected = observe_gradients(Alike(), None, description, batch)
    (error,) = verify.gradient_errors(forward, expected, batch).values()
    assert error < 1e-4


class Scaled(nn.Module):
    """Multiplies by a buffer in bfloat16, as RecurrentGemma does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.tensor(3.0, dtype=torch.bfloat16))

    def forward(self, x):
        return (self.weight * x * self.scale.float()).square().sum()


def test_gradients_beside_a_buffer_in_bfloat16_are_checked():
    batch = [torch.arange(4.0)]
    forward = export_module(Scaled(), None, DESCRIPTION, batch)
    wrong = {"weight": 2 * 2 * 9 * batch[0] ** 2}  # twice the gradient
    assert math.isclose(verify.gradient_errors(forward, wrong, batch)["weight"], 0.5, rel_tol=1e-5)
