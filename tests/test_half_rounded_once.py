"""What PyTorch computes by one kernel on half tensors is computed in float32 and rounded once, and its gradient likewise."""

import copy

import pytest
import torch
import torch.nn.functional as F
from marks import usual
from torch import nn

import orttrainer

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
SIZE = 64
_generator = torch.Generator().manual_seed(0)
X = torch.cat([torch.linspace(-6, 6, 40), 2 * torch.randn(SIZE - 40, generator=_generator)])
OTHER = torch.randn(SIZE, generator=_generator)

ACTIVATIONS = {
    "gelu": lambda x, y: F.gelu(x),
    "gelu by tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "silu": lambda x, y: F.silu(x),
    "mish": lambda x, y: F.mish(x),
    "softplus": lambda x, y: F.softplus(x, 2.3),
    "log_sigmoid": lambda x, y: F.logsigmoid(x),
    "elu": lambda x, y: F.elu(x, 0.7),
    "hardswish": lambda x, y: F.hardswish(x),
}
FUNCTIONS = {
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "erfc": lambda x, y: torch.erfc(x),
    "sinc": lambda x, y: torch.sinc(x),
    "i0": lambda x, y: torch.special.i0(x),
    "log2": lambda x, y: x.abs().log2(),
    "log1p": lambda x, y: x.abs().log1p(),
    "expm1": lambda x, y: torch.expm1(x),
    "rsqrt": lambda x, y: x.abs().rsqrt(),
    "sum with a factor": lambda x, y: torch.add(x, y, alpha=0.25),
    "remainder": torch.remainder,
}
AXES = {
    "group_norm": lambda x, y: F.group_norm(x.view(2, 4, 8), 2),
    "batch_norm": lambda x, y: F.batch_norm(x.view(2, 4, 8), None, None, training=True),
    "var": lambda x, y: x.view(8, 8).var(-1),
    "std": lambda x, y: x.view(8, 8).std(-1),
    "norm": lambda x, y: torch.linalg.vector_norm(x.view(8, 8), 3, -1),
    "cumprod": lambda x, y: (x / 4).view(16, 4).cumprod(-1),
    "logcumsumexp": lambda x, y: torch.logcumsumexp(x.view(8, 8), -1),
    "weight_norm": lambda x, y: torch._weight_norm(x.view(8, 8), y[:8, None].abs(), 0),
}
LAYERS = {
    "linear of many axes": lambda x, y: F.linear(x.view(2, 4, 8), y[:24].view(3, 8), y[:3]),
    "attention": lambda x, y: F.scaled_dot_product_attention(*(z.view(1, 2, 8, 4) for z in (x, y, y.flip(0)))),
    "images of another size": lambda x, y: F.interpolate(x.view(1, 1, 8, 8), size=(5, 11), mode="bicubic"),
    "adaptive means": lambda x, y: F.adaptive_avg_pool1d(x.view(1, 2, 32), 5),
}


class Each(nn.Module):
    """The functions, each of weights of its own, which are 0, beside the batch."""

    def __init__(self, functions, dtype, rounds=True):
        super().__init__()
        self.functions, self.dtype, self.rounds = functions, dtype, rounds
        self.weights = nn.Parameter(torch.zeros(len(functions), SIZE))

    def forward(self, x, other):
        values = []
        for function, weight in zip(self.functions, self.weights):
            h, y = (x + weight).to(self.dtype), other.to(self.dtype)
            given = (h, y) if self.rounds else (Rounded.apply(h.float(), self.dtype), y.float())
            value = function(*given)
            values.append((value if self.rounds else Rounded.apply(value, self.dtype)).float().flatten())
        values = torch.cat(values)
        # Whole numbers, so that the cotangents are not rounded.
        return (values * (torch.arange(len(values)) % 5 - 2.0)).sum(), values


class Rounded(torch.autograd.Function):
    """A value, and the gradient, as half precision has them, in float32."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype).float(), None


FAMILIES = {
    "activations, float16": (ACTIVATIONS, torch.float16),
    "activations, bfloat16": (ACTIVATIONS, torch.bfloat16),
    "functions, float16": (FUNCTIONS, torch.float16),
    "functions, bfloat16": (FUNCTIONS, torch.bfloat16),
    "along axes, float16": (AXES, torch.float16),
    "along axes, bfloat16": (AXES, torch.bfloat16),
    "layers, float16": (LAYERS, torch.float16),
    "layers, bfloat16": (LAYERS, torch.bfloat16),
}


@pytest.mark.parametrize("name", usual(FAMILIES, "activations, float16", "along axes, bfloat16", "layers, float16"))
def test_one_kernel_is_rounded_once_and_so_is_its_gradient(name):
    family, dtype = FAMILIES[name]
    functions = list(family.values())
    expected, module = Each(functions, dtype, rounds=False), Each(functions, dtype)
    loss, values = expected(X, OTHER)
    loss.backward()
    trainer = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), lr=1.0))
    found = trainer.step(X, OTHER)[1]
    wanted = {"values": (found, values.detach()), "gradients": (-module.weights.detach(), expected.weights.grad)}
    for what, (a, b) in wanted.items():
        # Of what lies between two halves another may be the next; of 1 + erf(-5) and the like float32 has few digits.
        torch.testing.assert_close(a, b, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-5, msg=lambda m: f"{what}: {m}")  # noqa: B023
        assert (a != b).float().mean() < 0.03, what


def test_a_variance_that_float16_cannot_hold_has_a_root():
    class Deviation(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            y = (x * self.weight).half().std(-1).float()
            return y.mean(), y

    module, x = Deviation(), 1000 * torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    expected = module(x)[1].detach()
    found = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), lr=0.0)).step(x)[1]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


class Outputs(nn.Module):
    """Functions of half numbers that are no layer's, and so are the same in PyTorch."""

    def __init__(self, function, dtype):
        super().__init__()
        self.function, self.dtype, self.weight = function, dtype, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.function((x * self.weight).to(self.dtype)).float()


LOSSES = {
    "mse_loss": lambda x: F.mse_loss(400 * x, x),  # squares that are infinite, and so is their mean
    "huber_loss": lambda x: F.huber_loss(x, 3 * x, delta=0.5),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, 3 * x, reduction="sum"),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).to(x.dtype)),
    "a number that is rounded first": lambda x: (
        torch.remainder(x, 0.3) + torch.add(x, x, alpha=0.3) + torch.fmod(x, 0.7)
    ),
}


@HALVES
@pytest.mark.parametrize("name", LOSSES)
def test_what_are_several_kernels_is_rounded_between(name, dtype):
    module = Outputs(LOSSES[name], dtype)
    expected = module(X).detach()
    trainer = orttrainer.trainer(module, lambda y, label: (y.clamp(-9, 9) - label).square().mean(), _still(module))
    found = trainer.step(X, torch.zeros(()))[1]
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0.0)
    assert (found != expected).float().mean() < 0.01 or found.dim() == 0


def _still(module):
    return torch.optim.SGD(module.parameters(), lr=0.0)


@HALVES
def test_gradients_of_several_readers_are_summed_before_they_are_rounded(dtype):
    def quotient(rounded, h):
        return rounded(h / rounded(rounded(h.abs()) + 1))

    class Quotient(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(SIZE))

        def forward(self, x):
            y = quotient(lambda y: y, (x + self.weight).to(dtype)).float()
            return y.square().sum(), y

    def once(x):
        return Rounded.apply(x, dtype)

    module, weight = Quotient(), torch.zeros(SIZE, requires_grad=True)
    quotient(once, once(X + weight)).square().sum().backward()
    orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), lr=1.0)).step(X)
    torch.testing.assert_close(-module.weight.detach(), weight.grad, rtol=1.01 * torch.finfo(dtype).eps, atol=0.0)
    assert (-module.weight != weight.grad).float().mean() < 0.03


# ---------------------------------------------------------------- autocast


class Autocast(nn.Module):
    """A function of what a layer makes in bfloat16, and of the batch; as it is and in float32."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.function(self.layer(x), x)
        return y.float().square().mean(), y


IN_FLOAT32 = {
    "cdist": lambda h, x: torch.cdist(h, 2 * h),
    "distances of many rows, by products": lambda h, x: torch.cdist(h.repeat(5, 1), x.repeat(5, 1)),
    "hinge_embedding_loss": lambda h, x: F.hinge_embedding_loss(h, x.sign(), reduction="none"),
    "margin_ranking_loss": lambda h, x: F.margin_ranking_loss(h, x, x.sign(), 0.1, reduction="none"),
    "cosine_embedding_loss": lambda h, x: F.cosine_embedding_loss(h, x, x[:, 0].sign(), reduction="none"),
    "triplet_margin_loss": lambda h, x: F.triplet_margin_loss(h, x, 2 * x, reduction="none"),
    "binary_cross_entropy_with_logits": lambda h, x: F.binary_cross_entropy_with_logits(h, x.sigmoid()),
    "cross_entropy": lambda h, x: F.cross_entropy(h, x.argmax(-1), label_smoothing=0.1, reduction="none"),
    "ctc_loss": lambda h, x: F.ctc_loss(
        h[:, None], torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]), reduction="none"
    ),
    "prod": lambda h, x: h.prod(-1),
    "grid_sample": lambda h, x: F.grid_sample(
        h.reshape(-1, 1, 2, 4), x.tanh().reshape(-1, 2, 2, 2), align_corners=False
    ),
}
IN_BFLOAT16 = {
    "einsum": lambda h, x: torch.einsum("bi,bj->ij", h, x),
    "attention": lambda h, x: F.scaled_dot_product_attention(h[None], x[None], x[None]),
    "cumsum": lambda h, x: h.cumsum(0),
    "lerp": lambda h, x: torch.lerp(h, 2 * h, 0.3),
    "pow": lambda h, x: h**3,
    "adaptive_avg_pool1d": lambda h, x: F.adaptive_avg_pool1d(h[:, None], 3),
}


@pytest.mark.parametrize("name", IN_FLOAT32 | IN_BFLOAT16)
def test_autocast_computes_a_function_in_the_dtype_in_which_pytorch_does(name):
    module = Autocast((IN_FLOAT32 | IN_BFLOAT16)[name])
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    reference = copy.deepcopy(module)
    loss, expected = reference(x)
    loss.backward()
    found = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), lr=1.0)).step(x)[1]
    assert found.dtype == expected.dtype == (torch.float32 if name in IN_FLOAT32 else torch.bfloat16)
    share = 1e-5 if name in IN_FLOAT32 else torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found, expected.detach(), rtol=share, atol=share * expected.abs().max().item())
    change = reference.layer.weight.detach() - module.layer.weight.detach()
    gradient = reference.layer.weight.grad
    torch.testing.assert_close(change, gradient, rtol=2e-2, atol=1e-2 * gradient.abs().max().item())
