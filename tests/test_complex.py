"""Complex numbers are pairs of real ones in the graph, inside forward and as state; the module keeps its own tensors."""

import copy
import math

import pytest
import torch
from marks import slow
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription, ORTTrainer, load_checkpoint, save_checkpoint
from orttrainer.errors import SchemaError, StateError
from orttrainer.export.rewrites import complex_functions


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.fft.rfft(self.linear(x)).abs().mean()


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 2))

    def forward(self, x):
        return (x.to(torch.cfloat) @ torch.view_as_complex(self.weight)).abs().mean()


def trainer_of(model, optimizer="SGDOptimizer"):
    description = ModelDescription(
        [IODescription("x", ["n", 4], torch.float32)], [IODescription("loss", [], torch.float32)]
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    return ORTTrainer(model, None, description, optimizer, None, rate, torch.device("cpu"))


def assert_trains_like_pytorch(model, *, sizes=(3, 3, 5), rate=0.1, adam=False):
    """Train `model` beside a copy of it in PyTorch; return its trainer."""
    twin = copy.deepcopy(model)
    trainer = trainer_of(model, "AdamWOptimizer" if adam else "SGDOptimizer")
    optimizer = torch.optim.AdamW(twin.parameters(), rate) if adam else torch.optim.SGD(twin.parameters(), rate)
    for size in sizes:
        x = torch.randn(size, 4)
        loss, expected = trainer.train_step(x, torch.tensor([rate])), twin(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for (name, found), expected in zip(model.state_dict().items(), twin.state_dict().values()):
        torch.testing.assert_close(
            found, expected, rtol=1e-4 if adam else 1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    return trainer


@pytest.mark.parametrize("make", [Spectrum, Rotation], ids=["rfft", "view_as_complex"])
def test_complex_numbers_inside_forward_train_like_pytorch(make):
    torch.manual_seed(0)
    assert_trains_like_pytorch(make())


class Functions(nn.Module):
    """Of complex numbers z, from the batch, and w, a parameter: the weighted sum of squares of what each function gives."""

    def __init__(self, functions):
        super().__init__()
        self.linear, self.w = nn.Linear(4, 24), nn.Parameter(torch.randn(3, 4, 2))
        self.functions = functions

    def forward(self, x):
        z, w = torch.view_as_complex(self.linear(x).view(-1, 3, 4, 2))[0], torch.view_as_complex(self.w)
        total = x.sum() * 0
        for function in self.functions:
            y = function(z, w)
            y = torch.view_as_real(y) if y.is_complex() else y
            total = total + (y.square() * torch.arange(1.0, y.numel() + 1).view(y.shape)).mean()
        return total


def into_slices(z, w):
    """As a Fourier neural operator keeps the low frequencies (Li et al. 2021, section 4)."""
    result = torch.zeros(3, 6, dtype=torch.cfloat)
    result[:, 1:5] = z * w
    return torch.fft.irfft(result, n=10)


def written(z, w):
    """Sums of rows into a tensor, and a number into another."""
    result = torch.zeros(4, 4, dtype=torch.cfloat)
    result.index_add_(0, torch.tensor([0, 2, 2]), z)
    result.scatter_add_(1, torch.tensor([[1, 1, 0, 3]]), w[:1])
    result.index_copy_(0, torch.tensor([3]), z[:1] * w[:1])
    return result.masked_fill_(torch.eye(4) > 0, 1 - 2j).scatter_(1, torch.tensor([[2], [1]]), 0.5)


def heard(z, w, **options):
    """A spectrogram, changed, and the signal that has it."""
    signal = torch.cat((z.real, w.imag, z.imag, w.real), -1)  # [3, 16]
    options = {"n_fft": 8, "hop_length": 2, "window": torch.hann_window(options.get("win_length", 8)), **options}
    spectrum = torch.stft(signal, return_complex=True, **{k: v for k, v in options.items() if k != "length"})
    return torch.istft(spectrum * (1 + 0.5j), **options)


WHERE = torch.tensor([[True, False, True, False]] * 3)
FUNCTIONS = {
    "slices": [
        lambda z, w: z[1], lambda z, w: z[torch.tensor([0, 2])], lambda z, w: z[..., 0][z.real[:, 0] > 0].abs().sum(),
        lambda z, w: w[z.abs() > 0.5].sum() * z[z.real[:, 1] > 0, 1:].sum(), lambda z, w: z[:, None] * w[..., 1:2], lambda z, w: z[:, ::2],
        lambda z, w: z.select(1, 2), lambda z, w: z.index_select(1, torch.tensor([3, 0])), lambda z, w: z.unbind(1)[1],
        lambda z, w: z.gather(1, torch.tensor([[1, 2], [0, 0], [3, 1]])), lambda z, w: z.chunk(2, 1)[1] * w.split(2, 1)[0],
    ],
    "forms": [
        lambda z, w: z.unsqueeze(1) * w.unsqueeze(0), lambda z, w: z[None].squeeze(0).permute(1, 0), lambda z, w: z.repeat(2, 1),
        lambda z, w: z[None].expand(2, -1, -1), lambda z, w: torch.nn.functional.pad(z, (1, 2)), lambda z, w: z.cumsum(1),
        lambda z, w: torch.where(WHERE, z, w), lambda z, w: z.masked_fill(WHERE, 2.0), lambda z, w: torch.ones_like(z) + z,
        into_slices, lambda z, w: torch.full((4,), 1 + 2j) * z, lambda z, w: torch.full_like(z, 2.0) * w, lambda z, w: z.new_zeros(3, 4) - z,
    ],
    "functions": [
        lambda z, w: z.exp(), lambda z, w: (z + 3).log(), lambda z, w: (z + 4).sqrt(), lambda z, w: z.sin() + w.cos(),
        lambda z, w: z.tanh(), lambda z, w: z**2 + w.square(), lambda z, w: (z - z) ** 0 * w, lambda z, w: (w + 4) ** 0.5, lambda z, w: torch.linalg.norm(z),
        lambda z, w: torch.exp(1j * z.real) * (2 - 1j) * w, lambda z, w: z / (1 + z.abs()),
    ],
    "more functions": [
        lambda z, w: (z / 3).expm1() + (w / 4).log1p(), lambda z, w: (z + 3).log2() + (w + 4).log10(), lambda z, w: z.sinh() - w.cosh(),
        lambda z, w: z.tan(), lambda z, w: z.sigmoid() + w.sgn(), lambda z, w: (z + 4).rsqrt() * w.exp2(), lambda z, w: 2**z + 1j**w,
        lambda z, w: torch.addcmul(z, w, z, value=2) + torch.addcdiv(z, z, w + 4), lambda z, w: z * (z.conj() == z.conj()) * (z != w),
        lambda z, w: z * z.isclose(z + w / 1e6, rtol=1e-6) + w * torch.isclose(z, z),
        lambda z, w: z * (z.isfinite() & ~z.isnan() & ~w.isinf()) if (z == None) is False and z != None else w,  # noqa: E711
    ],
    "norms": [
        lambda z, w: torch.linalg.norm(z, 2, dim=1) + z.norm(p=3, dim=1), lambda z, w: torch.linalg.norm(w[0], 3) * (w - w).norm(),
        lambda z, w: torch.linalg.matrix_norm(z) + torch.linalg.matrix_norm(w, math.inf), lambda z, w: torch.linalg.norm(z, 1),
        lambda z, w: torch.dist(z, w) + z.dist(w, 3), lambda z, w: torch.norm(z, dim=0, keepdim=True) * torch.linalg.vector_norm(w), lambda z, w: z.norm(3) * w.norm(2, 1, True),
        lambda z, w: torch.linalg.norm(z, 2, 1, True) * torch.linalg.vector_norm(w, 3, (0, 1)) + (z @ w.T).norm(),
    ],
    "inverse functions and factors": [
        lambda z, w: z.asin() + w.acos(), lambda z, w: z.atan() * w.asinh(), lambda z, w: torch.acosh(3 * z) + z.arctanh(),
        lambda z, w: (w.real * 9 + 0j).arccos() + (40 * z).arcsinh(), lambda z, w: torch.complex(torch.zeros(3, 4), w.real * 3).arctan(),
        lambda z, w: (w.real * 3 + 0j).acosh() + (w.real * 3 + 0j).atanh(),
        lambda z, w: (z - z).sinc() + w.sinc(), lambda z, w: torch.conj_physical(z) * w,
        lambda z, w: torch.linalg.multi_dot([z, w.T, z, w[0]]), lambda z, w: torch.linalg.cross(z[:, :3], w[:, 1:]) + z[:, :3].cross(w[:, :3], dim=1),
        lambda z, w: torch.linalg.solve_triangular(w[:, :3] + 5 * torch.eye(3), z, upper=False),
        lambda z, w: torch.linalg.solve_triangular(w[:, :3] / 4, z.T, upper=True, left=False, unitriangular=True),
        lambda z, w: torch.linalg.cholesky(z @ z.mH + 1j * w.real[:, :3].diag().diag() + 3 * torch.eye(3)),
        lambda z, w: torch.linalg.cholesky(z @ z.mH + 3 * torch.eye(3), upper=True).real, lambda z, w: z.take(torch.tensor([5, -1])) * w[0, :2],
        lambda z, w: z[:1].expand_as(w) * z[:, :1].broadcast_to(3, 4), lambda z, w: z.index_fill(1, torch.tensor([2, 0]), 1j) * w.index_fill(0, torch.tensor([0]), 2),
        lambda z, w: z.masked_scatter(WHERE, w) * w.clone().index_fill_(1, torch.tensor([3]), 0.5),
    ],
    "far from 0": [
        lambda z, w: (100 * z).tanh() + (w.imag * 1j).tanh(), lambda z, w: (100j * z).tan(), lambda z, w: (15 * w).sigmoid(),
        lambda z, w: (z - 30).sigmoid() + (z + 30).sigmoid(),
    ],
    "dtypes": [
        lambda z, w: z.cdouble().exp().cfloat() * w.type(torch.complex128).to(w), lambda z, w: z.type_as(w.cdouble()).abs(),
    ],
    "along axes": [
        lambda z, w: z.var(1) + w.std(1, correction=0), lambda z, w: z.prod(1, keepdim=True) * w, lambda z, w: z.cumprod(1) + w.prod(),
        lambda z, w: z.T[:3].trace() * w.diag() + z.diff(dim=1)[:, 0], lambda z, w: z.roll((1, 2), (0, 1)) * w,
        lambda z, w: z.masked_select(WHERE) * w.index_add(1, torch.tensor([3, 1]), z[:, :2])[0, :2].sum(),
        lambda z, w: torch.trapezoid(z, dim=0) + torch.cumulative_trapezoid(w, dx=0.5, dim=0)[-1] * torch.flip(z, (0,))[0],
        lambda z, w: z.unfold(1, 2, 1) * w[:, :3, None], lambda z, w: torch.nn.functional.pad(z, (1, 2), value=1.5), written,
    ],
    "imaginary parts of conjugates": [
        lambda z, w: z.conj().imag * w.mH[:, :1].imag.sum(), lambda z, w: torch.fft.ifft(z.real).imag, lambda z, w: torch.fft.ihfft(w.real).imag,
        lambda z, w: torch.fft.ifft(z.real) * torch.fft.ifft(w.imag).detach(),
    ],
    "transforms": [
        lambda z, w: torch.fft.irfft(z, n=9), lambda z, w: torch.fft.fft(z, n=3, norm="ortho"), lambda z, w: torch.fft.ifft(w, n=6, dim=0),
        lambda z, w: torch.fft.fft2(z, s=(4, 3)), lambda z, w: torch.fft.irfft2(w, s=(2, 8)), lambda z, w: torch.fft.hfft(z, n=10),
        lambda z, w: torch.fft.irfftn(z, s=(5,), dim=(1,)) + torch.fft.fftn(w[:, :1], s=(3, 5)).abs(),
        lambda z, w: torch.fft.fftshift(z) * torch.fft.ifftshift(w, dim=1), heard, lambda z, w: heard(z, w, onesided=False, length=18),
        lambda z, w: heard(z, w, win_length=6, normalized=True, length=9), lambda z, w: heard(z[:1], w[:1])[0],
        lambda z, w: heard(z, w, window=torch.ones(8), center=False),
    ],
    "more products": [
        lambda z, w: torch.tensordot(z, w, ([1], [1])), lambda z, w: torch.inner(z, w), lambda z, w: torch.kron(z[:1], w),
        lambda z, w: z.mv(w[0]) + z[0].dot(w[1]), lambda z, w: torch.addmm(z[:, :3], z, w.T, beta=2, alpha=1j), lambda z, w: z.mH @ w,
        lambda z, w: torch.baddbmm(z[None, :, :3], z[None], w.T[None]), lambda z, w: torch.linalg.solve(w @ w.T + 9 * torch.eye(3), z),
        lambda z, w: torch.linalg.solve(z @ z.mH + 9 * torch.eye(3), w[:, 0]),
        lambda z, w: torch.conv1d(z[:, None], w[:2, None, :3], z[0, :2], padding=1),
        lambda z, w: torch.conv_transpose1d(z[:, None], w[:1, None, :2], stride=2),
    ],
    "products": [
        lambda z, w: torch.einsum("ij,kj->ik", z, w), lambda z, w: torch.einsum("...j, kj -> k...", z, w),
        lambda z, w: torch.einsum("ij,kj", z, w), lambda z, w: torch.einsum("ij,ij->", z, w).abs(),
        lambda z, w: torch.einsum("ij->j", z), lambda z, w: torch.einsum("ij,kj,kl->il", z, w, w),
        lambda z, w: z[None] @ w.T[None], lambda z, w: torch.bmm(z[None], w.T[None]), lambda z, w: nn.functional.linear(z, w),
        lambda z, w: torch.outer(z[0], w[1]), lambda z, w: torch.vdot(z[0], w[1]).abs(), lambda z, w: z @ w.mT,
    ],
}  # fmt: skip


FUNCTIONS["joined with real ones"] = [
    lambda z, w: torch.stack((z.real, w)), lambda z, w: torch.stack((torch.arange(4), z[0], w[1].real), 1), lambda z, w: torch.cat((z, w.real), 1),
    lambda z, w: torch.hstack((z.abs().double(), w)).cfloat(), lambda z, w: torch.block_diag(z[:2], w.imag), lambda z, w: torch.dstack((WHERE, z)), lambda z, w: torch.hstack((z[0], w[0])),
    lambda z, w: torch.zeros(3, 4, dtype=torch.cfloat).index_put((torch.tensor([0, 2, 0]),), z * w, accumulate=True),
    lambda z, w: torch.zeros(3, dtype=torch.cfloat).index_put_((torch.tensor([0, 2]),), z[0, :2]),
]  # fmt: skip
FUNCTIONS["arithmetic of several precisions"] = [
    lambda z, w: z + w.cdouble(), lambda z, w: z.real.double() - w, lambda z, w: z * w.real.double(), lambda z, w: w.cdouble() / (z + 9),
    lambda z, w: z.clone().sub_(w.imag.double()), lambda z, w: z.double().to(torch.complex64) + w.imag.double(),
]  # fmt: skip
FUNCTIONS["arithmetic with numbers of Python's"] = [
    lambda z, w: z.real + 0j, lambda z, w: 1j - z.imag, lambda z, w: (z.real - 1j) / 2j, lambda z, w: (2 - 1j) / (w.real + 9),
    lambda z, w: 1j - z + (w + 2j), lambda z, w: (z / 2j).subtract(1j, alpha=2), lambda z, w: torch.add(z, w.real, alpha=2j),
    lambda z, w: torch.rsub(z.real, 1j, alpha=3), lambda z, w: z.clone().mul_(2j).add_(1j, alpha=2), lambda z, w: w.real**2 + (1 + 1j),
    lambda z, w: torch.arange(4) + 1j * z,
]  # fmt: skip
IN_DOUBLE_PRECISION = [
    lambda v: v + 0j, lambda v: 1j - v, lambda v: v / 2j, lambda v: v**2 + (1 + 1j), lambda v: torch.complex(v, 2 * v).mul_(1 / 3 + 0.1j),
    lambda v: v.to(torch.complex64) * 1j + v,
]  # fmt: skip
LONG_FUNCTIONS = [*FUNCTIONS][1::2]


@pytest.mark.parametrize("name", [slow(name) if name in LONG_FUNCTIONS else name for name in FUNCTIONS])
def test_functions_of_complex_numbers_train_like_pytorch(name):
    torch.manual_seed(0)
    assert_trains_like_pytorch(Functions(FUNCTIONS[name]), sizes=(1, 1, 1), rate=1e-3)


class Doubled(nn.Module):
    """The weighted squares of what each function gives."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.1, -1.3, 0.7], dtype=torch.float64))

    def forward(self, x):
        found = torch.stack([torch.view_as_real(function(x * self.w)) for function in IN_DOUBLE_PRECISION])
        return (found.square() * torch.tensor([1 / 3, 1.0], dtype=torch.float64)).mean()


def test_arithmetic_in_double_precision_keeps_all_digits():
    module, x = Doubled(), torch.randn(2, 3, dtype=torch.float64)
    twin = copy.deepcopy(module)
    expected = twin(x)
    expected.backward()
    loss, *_ = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), 0.1)).step(x)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(module.w.detach(), (twin.w - 0.1 * twin.w.grad).detach(), rtol=1e-13, atol=0)


# ---------------------------------------------------------------- state


def number(*shape):
    return torch.randn(*shape, dtype=torch.cfloat)


class Complex(nn.Module):
    """The linear layer gives complex numbers z, and `forward` of them and the module makes the loss."""

    def __init__(self, compute, **state):
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 8), compute
        for name, value in state.items():
            (self.register_parameter if isinstance(value, nn.Parameter) else self.register_buffer)(name, value)

    def forward(self, x):
        z = torch.view_as_complex(self.linear(x).view(-1, 4, 2))
        return self.compute(self, z).abs().square().mean()


def low_frequencies(m, z):
    """A layer of the Fourier neural operator (Li et al. 2021, section 4)."""
    f = torch.fft.rfft(torch.cat((z.real, z.imag), -1))
    kept = torch.zeros(f.shape[0], 5, dtype=torch.cfloat)
    kept[:, 1:4] = torch.einsum("bi,io->bo", f[:, 1:4], m.w)
    return torch.fft.irfft(kept, n=8)


def diagonal_recurrence(m, z):
    """The kernel of a diagonal state space model (Gu et al. 2022, section 3.3)."""
    steps = m.a.exp()[:, None] ** torch.arange(6)
    return torch.einsum("n,nl->l", m.c * (m.a.exp() - 1) / m.a, steps).real * z.real.sum()


@pytest.mark.parametrize("equation", ["hn,hnl->lh", "hnl,hn->lh"])
def test_of_the_factors_of_an_einsum_the_one_of_fewer_axes_is_made_a_matrix(equation):
    sizes = {"h": 3, "n": 4, "l": 7}
    factors = [number(*(sizes[letter] for letter in term)) for term in equation.split("->")[0].split(",")]
    read = []

    def einsum(equation, *operands):
        read.extend(operands)
        return torch.einsum(equation, *operands)

    torch.testing.assert_close(complex_functions._einsum(einsum, equation, *factors), torch.einsum(equation, *factors))
    assert sorted(x.numel() for x in read) == [4 * 3 * 4, 2 * 3 * 4 * 7]


def moving_average(write):
    def compute(m, z):
        with torch.no_grad():
            write(m, m.average * 0.9 + z.mean(0) * 0.1)
        return z - m.average

    return compute


def assigned(m, new):
    m.average = new


def by_slices(m, new):
    m.average[:2], m.average[2:] = new[:2], new[2:]


def by_filling(m, new):
    m.average.zero_()
    m.average += new


PARAMETERS = {
    "matrix": lambda: Complex(lambda m, z: z @ m.w + m.b, w=nn.Parameter(number(4, 4)), b=nn.Parameter(number(4))),
    "number": lambda: Complex(lambda m, z: z * m.w, w=nn.Parameter(torch.tensor(1 + 2j))),
    "frozen": lambda: Complex(lambda m, z: z @ m.w, w=nn.Parameter(number(4, 4), requires_grad=False)),
    "double": lambda: Complex(
        lambda m, z: (z.to(torch.cdouble) * m.w).to(torch.cfloat), w=nn.Parameter(torch.randn(4, dtype=torch.cdouble))
    ),
    "unitary": lambda: Complex(
        lambda m, z: (z @ torch.matrix_exp(m.w - m.w.mH)).real, w=nn.Parameter(0.3 * number(4, 4))
    ),
    "inverse": lambda: Complex(lambda m, z: z @ torch.linalg.inv(m.w), w=nn.Parameter(number(4, 4) + 4 * torch.eye(4))),
    "Fourier operator": lambda: Complex(low_frequencies, w=nn.Parameter(number(3, 3))),
    "state space": lambda: Complex(
        diagonal_recurrence, a=nn.Parameter(-0.5 + 1j * torch.arange(3.0)), c=nn.Parameter(number(3))
    ),
}
BUFFERS = {
    "rotary table": lambda: Complex(lambda m, z: z * m.f[: z.shape[0]] + m.f[0], f=torch.polar(torch.ones(8, 4), torch.rand(8, 4))),
    "conjugated": lambda: Complex(lambda m, z: (z * m.f).real, f=number(4).conj()),
    "imaginary part": lambda: Complex(lambda m, z: z * m.f, f=number(4).conj().imag),
    **{
        f"average, {write.__name__}": lambda write=write: Complex(moving_average(write), average=torch.zeros(4, dtype=torch.cfloat))
        for write in (assigned, by_slices, by_filling)
    },
    "average, copied": lambda: Complex(moving_average(lambda m, new: m.average.copy_(new)), average=number(4)),
    "average, of real numbers": lambda: Complex(moving_average(lambda m, new: m.average.copy_(new.real)), average=number(4)),
    "average, lerp_": lambda: Complex(moving_average(lambda m, new: m.average.lerp_(new, 0.5)), average=number(4)),
    "average, data": lambda: Complex(moving_average(lambda m, new: setattr(m.average, "data", new)), average=number(4)),
}  # fmt: skip


LONG = "Fourier operator", "unitary", "average, by_filling", "average, copied", "average, lerp_", "average, data"
STATES = PARAMETERS | BUFFERS


@pytest.mark.parametrize("make", [slow(STATES[name]) if name in LONG else STATES[name] for name in STATES], ids=STATES)
def test_complex_state_trains_like_pytorch(make):
    torch.manual_seed(0)
    assert_trains_like_pytorch(make(), rate=0.02)


def test_adam_takes_both_parts_of_complex_parameters_apart_as_pytorch_does():
    torch.manual_seed(0)
    trainer = assert_trains_like_pytorch(PARAMETERS["matrix"](), rate=0.02, adam=True)
    assert trainer.state_dict()["Moment_1_w"].shape == (4, 4, 2)


def test_a_layer_of_complex_numbers_shared_by_two_names():
    torch.manual_seed(0)
    model = Complex(lambda m, z: m.second(m.first(z)))
    model.first = nn.Linear(4, 4, dtype=torch.cfloat)
    model.second = nn.Linear(4, 4, dtype=torch.cfloat)
    model.second.weight = model.first.weight
    assert_trains_like_pytorch(model, rate=0.02)


def test_a_checkpoint_has_complex_tensors_as_the_module_has_them(tmp_path):
    torch.manual_seed(0)
    model, x, rate = PARAMETERS["matrix"](), torch.randn(3, 4), torch.tensor([0.02])
    trainer = trainer_of(model, "AdamWOptimizer")
    trainer.train_step(x, rate)
    save_checkpoint(trainer, tmp_path)
    state = trainer.state_dict()
    assert all(
        torch.equal(state[name], value) and state[name].dtype == value.dtype
        for name, value in model.state_dict().items()
    )
    expected = [trainer.train_step(x, rate).item() for _ in range(2)]
    other = trainer_of(PARAMETERS["matrix"](), "AdamWOptimizer")
    load_checkpoint(other, tmp_path)
    assert [other.train_step(x, rate).item() for _ in range(2)] == expected


def test_what_is_done_to_a_complex_parameter_between_steps_is_followed():
    torch.manual_seed(0)
    model, other, x = PARAMETERS["matrix"](), PARAMETERS["matrix"](), torch.randn(3, 4)
    trainer = trainer_of(model)
    trainer.train_step(x, torch.tensor([0.02]))
    expected = other(x).detach()
    model.load_state_dict(other.state_dict(), assign=True)  # from here on both have one memory
    torch.testing.assert_close(trainer.train_step(x, torch.tensor([0.02])), expected)
    model.w.data = torch.zeros(4, 4, dtype=torch.cdouble)
    with pytest.raises(
        StateError, match=r"'w' of the module is torch.complex128 \[4, 4\], but was torch.complex64 \[4, 4\]"
    ):
        trainer.train_step(x, torch.tensor([0.02]))


def test_complex_numbers_that_a_model_gives_are_refused_by_name():
    class Spectrum(nn.Linear):
        def forward(self, x):
            return torch.fft.rfft(super().forward(x))

    def make(spectrum, loss):
        module = spectrum(4, 6)
        return orttrainer.trainer(module, loss, torch.optim.SGD(module.parameters(), 0.1))

    x, label = torch.randn(5, 4), torch.randn(5, 4)
    trainer = make(Spectrum, lambda spectrum, label: (spectrum.abs() - label).square().mean())
    with pytest.raises(
        SchemaError, match=r"'output' is torch.complex64, .* return real and imaginary part, torch.view_as_real"
    ):
        trainer.step(x, label)

    class InParts(Spectrum):
        def forward(self, x):
            return torch.view_as_real(super().forward(x))

    trainer = make(InParts, lambda parts, label: (torch.view_as_complex(parts).abs() - label).square().mean())
    expected = torch.view_as_real(
        torch.fft.rfft(nn.functional.linear(x, trainer.model.weight, trainer.model.bias))
    ).detach()
    torch.testing.assert_close(trainer.step(x, label)[1], expected)
