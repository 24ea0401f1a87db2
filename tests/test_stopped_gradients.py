"""Gradients that autograd does not follow, or follows in its own way: exported faithfully or refused."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from marks import in_turn
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import ExportMismatchError, UnsupportedModelError
from orttrainer.export import observe_gradients


class Detach(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return (y * y.detach()).sum()


class DetachedInPlace(Detach):
    """What was made of it before has a gradient; of complex numbers, too."""

    def forward(self, x):
        y = self.linear(x)
        z = y * 1j + x
        before = y * 2 + torch.view_as_real(z).sum(-1)
        torch.detach_(z)
        y.detach_()
        return (self.linear(y) * before).sum() + (z * z).imag.sum()


class NoGrad(Detach):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            target = torch.tanh(self.linear(x)) * 2
        return ((y - target) ** 2).sum()


class NoGradOfSeveral(Detach):
    """Of what gives several tensors that have names."""

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            largest = y.max(1, keepdim=True).values + y.topk(2)[0]
            extrema = torch.aminmax(y)
        return (y * (largest.sum(1, keepdim=True) + extrema.max)).sum()


class GivenOut(Detach):
    """Results in tensors that have their shape, or another one, and in rows of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 4))

    def forward(self, x):
        y, whole, new = self.linear(x), torch.zeros_like(x), torch.empty(0)
        with torch.no_grad():
            torch.add(y, y, alpha=2, out=whole)
            torch.sort(y.square(), out=(new, places := torch.empty(0, dtype=torch.long)))
            torch.linalg.vector_norm(y, dim=0, out=self.rows[0])
            torch.max(y, 0, out=(self.rows[1], torch.empty(0, dtype=torch.long)))
        return (y * (whole + new * places)).sum() + (y * self.rows.sum(0)).sum()


class StraightThrough(Detach):
    def forward(self, x):
        y = self.linear(x)
        return ((y + (torch.round(y) - y).detach()) ** 2).sum()


class Data(Detach):
    def forward(self, x):
        y = self.linear(x)
        return (y / y.data.norm()).sum()


class DeepCopied(Detach):
    """Tensors of their own: of what came in, and of a parameter, which has no gradient by its copy."""

    def forward(self, x):
        scale, residual = copy.deepcopy([self.linear.weight, x])
        residual[0] = 0
        return (self.linear(residual) @ scale + x).square().sum()


class Slope(Detach):
    """By an input of which a copy is read beside it: the slope that forward asks for does not go through that."""

    def forward(self, x):
        x = x.requires_grad_()
        energy = (self.linear(x).tanh() * x.detach()).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope.square().sum()


class Padding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 3, padding_idx=2)
        self.decoder = nn.Linear(3, 6, bias=False)
        self.decoder.weight = self.embedding.weight  # tied: the padding row still learns through the decoder

    def forward(self, x):
        tokens = (x.abs() * 3).long() % 6
        return (self.decoder(self.embedding(tokens)) ** 2).sum()


class SpectralNorm(nn.Module):
    """Iterates on buffers under no_grad in every forward; its gradient treats them as constants."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        return (self.linear(x) ** 3).mean()


class SpectralNormOfTwoRounds(SpectralNorm):
    """The older one, which writes its vectors by `out=`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(4, 4), n_power_iterations=2)


class SquareWithWrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        assert torch.isfinite(dy).all()  # a decision by values, which nobody can trace
        return dy * x  # not 2 x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * dy * x


class TrueBackward(Detach):
    def forward(self, x):
        return Square.apply(self.linear(x)).sum()


class CustomBackward(Detach):
    def forward(self, x):
        return SquareWithWrongBackward.apply(self.linear(x)).sum()


def description() -> ModelDescription:
    return ModelDescription([IODescription("x", ["batch", 4], torch.float32)], [IODescription("loss", [])])


def make_trainer(module, **options) -> ORTTrainer:
    return ORTTrainer(module, None, description(), "SGDOptimizer", None, models.LEARNING_RATE, "cpu", **options)


class ByItsLargest(Detach):
    def forward(self, x):
        y = self.linear(x)
        return (y / (y.abs().max().item() + 1.0)).square().sum() * float(y.min())


class Running(Detach):
    """A buffer follows what is detached, beside numbers that Python has to know."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        counts = (y > 0).sum(1).tolist()
        return sum((row * (count + 1)).square().sum() for row, count in zip(y - self.mean, counts))


class ReadsItsStatistics(nn.Module):
    """A buffer that BatchNorm has moved is, to autograd, one written in place without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        y = self.norm(h) - self.norm.running_mean
        far = (h.mean(0) - self.norm.running_mean).square().sum() + self.norm.running_var.square().sum()
        return (self.norm(self.head(y)) * self.norm.running_var).square().sum() + far


class ReadsAveragesOfAll(ReadsItsStatistics):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)


class ReadsThoseOfInstances(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.InstanceNorm1d(1, affine=True, track_running_stats=True)

    def forward(self, x):
        y = self.norm(self.linear(x).unsqueeze(1).square())
        return (y - self.norm.running_mean * self.norm.running_var).square().sum()


@pytest.mark.parametrize(
    "kind",
    [
        Detach,
        DetachedInPlace,
        NoGrad,
        NoGradOfSeveral,
        GivenOut,
        StraightThrough,
        Data,
        DeepCopied,
        Slope,
        Padding,
        TrueBackward,
        SpectralNorm,
        SpectralNormOfTwoRounds,
        ByItsLargest,
        Running,
    ],
)
def test_what_autograd_leaves_out_is_left_out_of_the_graph(kind):
    assert_trains_as_in_pytorch(kind)


@pytest.mark.parametrize("kind", [ReadsItsStatistics, ReadsAveragesOfAll, ReadsThoseOfInstances])
def test_what_reads_moved_statistics_has_no_gradient_through_them(kind, caplog):
    caplog.set_level("INFO", "orttrainer")
    assert_trains_as_in_pytorch(kind)
    assert "exporter failed" not in caplog.text


def assert_trains_as_in_pytorch(kind):
    torch.manual_seed(0)
    module, twin = kind(), kind()
    twin.load_state_dict(module.state_dict())
    optimizer, trainer = torch.optim.SGD(twin.parameters(), lr=0.01), make_trainer(module)
    for step in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = twin(x)
        loss.backward()
        optimizer.step()
        assert trainer.train_step(x, 0.01).item() == pytest.approx(loss.item(), rel=1e-5)
    for mine, other in zip(module.state_dict().values(), twin.state_dict().values()):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_backward_of_its_own_that_cannot_be_traced_is_refused_by_the_name_of_the_parameter():
    torch.manual_seed(0)
    module = CustomBackward()
    before = module.linear.weight.clone()
    with pytest.raises(
        ExportMismatchError, match=r"gradient of parameter 'linear\.(weight|bias)' differs.*check_export=False"
    ):
        make_trainer(module).train_step(torch.randn(3, 4), 0.01)
    assert torch.equal(module.linear.weight, before)
    make_trainer(module, check_export=False).train_step(torch.randn(3, 4), 0.01)


def test_a_hook_that_changes_a_gradient_and_cannot_be_traced_is_refused_and_one_that_looks_at_it_is_not():
    torch.manual_seed(0)
    module = Detach()
    seen = []
    module.linear.weight.register_hook(lambda gradient: seen.append(gradient.norm()))
    make_trainer(module).train_step(torch.randn(3, 4), 0.01)
    assert seen
    module.linear.weight.register_hook(lambda gradient: gradient * (2 if gradient.isfinite().all() else 0))
    with pytest.raises(ExportMismatchError, match=r"gradient of parameter 'linear\.weight' differs.*a hook"):
        make_trainer(module).train_step(torch.randn(3, 4), 0.01)


def test_a_hook_for_an_accumulated_gradient_is_refused_since_there_is_none():
    module = Detach()
    handle = module.linear.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.clamp_(-0.1, 0.1))
    with pytest.raises(
        UnsupportedModelError, match=r"'linear\.weight' has a hook .*register_post_accumulate_grad_hook"
    ):
        make_trainer(module).train_step(torch.randn(3, 4), 0.01)
    handle.remove()
    make_trainer(module).train_step(torch.randn(3, 4), 0.01)


class Patches(nn.Module):
    """A normalization of a single image, whose gradient lies channels last."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 2, stride=2), norm(4, affine=True), nn.Linear(4, 4)

    def forward(self, x, hooked=lambda h: h):
        tokens = hooked(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.linear(tokens[:, 0]).tanh().mean()


@pytest.mark.parametrize(
    "batch, norm", in_turn([1, 2], {"BatchNorm2d": nn.BatchNorm2d, "InstanceNorm2d": nn.InstanceNorm2d})
)
def test_a_single_image_trains_by_its_gradient_which_pytorch_gets_wrong(norm, batch):
    torch.manual_seed(0)
    module = Patches(norm)
    twin, x = copy.deepcopy(module), torch.randn(batch, 3, 8, 8)

    def hooked(h):  # without which PyTorch 2.13 is not what finite differences are, for one image
        h.register_hook(torch.Tensor.contiguous)
        return h

    schema = ModelDescription([IODescription("x", [batch, 3, 8, 8], torch.float32)], [IODescription("loss", [])])
    trainer = ORTTrainer(
        module, None, schema, "SGDOptimizer", None, models.LEARNING_RATE, "cpu", enable_grad_norm_clip=False
    )
    trainer.train_step(x, 0.1)
    double = copy.deepcopy(twin).double()
    assert torch.autograd.gradcheck(  # finite differences
        lambda x: double(x, hooked), x.double().requires_grad_(), check_undefined_grad=False
    )
    twin(x, hooked).backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    for (name, found), expected in zip(module.named_parameters(), twin.parameters()):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_normalization_without_a_gradient_behind_it_is_observed():
    class Undefined(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            return (NoBackward.apply(self.norm(x)) + self.linear(x)).sum()

    module, x = Undefined(), torch.randn(3, 4)
    found = observe_gradients(module, None, description(), [x])
    module(x).backward()
    assert all(torch.equal(found[f"linear.{name}"], p.grad) for name, p in module.linear.named_parameters())


def test_the_check_leaves_the_module_as_it_was():
    module = NoGrad()
    module.linear.weight.grad = torch.ones(4, 4)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    make_trainer(module).eval_step(torch.ones(3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module.linear.weight.grad, torch.ones(4, 4))


def test_saved_forward_graph_has_standard_operators_only():
    trainer = make_trainer(Detach())
    trainer.train_step(torch.randn(3, 4), 0.01)
    assert {node.domain for node in trainer.onnx_model_.graph.node} == {""}
    assert {node.domain for node in trainer.training_graph.model.graph.node} == {""}
