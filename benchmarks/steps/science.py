"""More families: models with derivatives and with complex numbers in them."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from steps.families import family


class Residual2d(nn.Module):
    """What Poisson's equation in the plane leaves of a network (Raissi et al. 2019), of 5 layers of 64."""

    def __init__(self):
        super().__init__()
        widths = [2, 64, 64, 64, 64]
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
        self.network = nn.Sequential(*layers, nn.Linear(64, 1))

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.network(x).sum(), x, create_graph=True)
        second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        return second[0] + second[1]


@family
def physics_informed():
    return Residual2d(), F.mse_loss, lambda: (torch.rand(1024, 2), torch.rand(1024))


class Forces(nn.Module):
    """Forces of a continuous-filter network (Schuett et al. 2017): 8 molecules of 12 atoms, 2 interactions of width 64."""

    def __init__(self):
        super().__init__()
        self.start, self.energy = nn.Parameter(torch.randn(12, 64)), nn.Linear(64, 1)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(20, 64), nn.Softplus(), nn.Linear(64, 64)) for _ in range(2)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64)) for _ in range(2)
        )
        pairs = [pair for pair in itertools.product(range(12), range(12)) if pair[0] != pair[1]]
        self.register_buffer("pairs", torch.tensor(pairs).T.contiguous())
        self.register_buffer("centers", torch.linspace(0, 4, 20))

    def forward(self, positions):
        positions = positions.clone().requires_grad_(True)
        to, source = self.pairs
        distances = (positions[:, to] - positions[:, source]).norm(dim=-1, keepdim=True)
        basis, h = torch.exp(-(distances - self.centers).square()), self.start.expand(positions.shape[0], -1, -1)
        for pair_filter, update in zip(self.filters, self.updates):
            messages = h[:, source] * pair_filter(basis)
            h = h + update(torch.zeros_like(h).index_add(1, to, messages))
        return -torch.autograd.grad(self.energy(h).sum(), positions, create_graph=True)[0]


@family
def energy_and_forces():
    return Forces(), F.mse_loss, lambda: (2 * torch.randn(8, 12, 3), torch.randn(8, 12, 3))


class Slopes(nn.Module):
    """The norms of a critic's gradients, which WGAN-GP holds at 1 (Gulrajani et al. 2017)."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2)]
        self.critic = nn.Sequential(*layers, nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(128, 1, 4))

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        return torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)[0].flatten(1).norm(dim=1)


@family
def gradient_penalty():
    return Slopes(), F.mse_loss, lambda: (torch.randn(16, 3, 32, 32), torch.ones(16))


class FourierLayer(nn.Module):
    """Complex weights for the low frequencies (Li et al. 2021)."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes, self.skip = modes, nn.Conv2d(width, width, 1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width**2) for _ in range(2)
        )

    def forward(self, x):
        f, modes = torch.fft.rfft2(x), self.modes
        kept = torch.zeros_like(f)
        kept[:, :, :modes, :modes] = torch.einsum("bixy,ioxy->boxy", f[:, :, :modes, :modes], self.weights[0])
        kept[:, :, -modes:, :modes] = torch.einsum("bixy,ioxy->boxy", f[:, :, -modes:, :modes], self.weights[1])
        return F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + self.skip(x))


@family
def fourier_operator():
    layers = [FourierLayer(16, 8) for _ in range(3)]
    module = nn.Sequential(nn.Conv2d(1, 16, 1), *layers, nn.Conv2d(16, 1, 1))
    return module, F.mse_loss, lambda: (torch.randn(8, 1, 32, 32), torch.randn(8, 1, 32, 32))


class Coupling(nn.Module):
    """Half of the dimensions moved and scaled by what a small network makes of the other half (Dinh et al. 2017)."""

    def __init__(self, half: int, width: int):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(half, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2 * half)
        )

    def forward(self, x):
        kept, moved = x.chunk(2, dim=1)
        scale, shift = self.network(kept).chunk(2, dim=1)
        scale = torch.tanh(scale)
        return torch.cat([moved * scale.exp() + shift, kept], dim=1), scale.sum(1)


class RealNvp(nn.Module):
    """Negative log-likelihoods of points, by 12 couplings: 72 parameters of up to 1,024 elements."""

    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(4, 32) for _ in range(12))

    def forward(self, x):
        volumes = []
        for coupling in self.couplings:
            x, volume = coupling(x)
            volumes.append(volume)
        return 0.5 * x.square().sum(1) - torch.stack(volumes).sum(0)


@family
def normalizing_flow():
    return RealNvp(), lambda found, _: found.mean(), lambda: (torch.randn(256, 8), torch.zeros(256))
