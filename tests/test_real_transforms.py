"""Fourier transforms of real signals, and their short-time form, train as in PyTorch; what is real of a spectrum is so exactly."""

from __future__ import annotations

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch, described
from marks import usual
from small import make
from torch import nn


def spectrogram(n_fft: int, win_length: int | None = None, **options):
    def function(x):
        window = torch.hann_window(win_length or n_fft)
        spectrum = torch.stft(x, n_fft, win_length=win_length, window=window, **{"return_complex": True, **options})
        return torch.view_as_real(spectrum) if spectrum.is_complex() else spectrum

    return function


FUNCTIONS = {  # of [batch, 64]
    "spectrogram": spectrogram(16),
    "a hop that leaves some": spectrogram(16, hop_length=7, pad_mode="constant"),
    "a short window, normalized": spectrogram(20, 15, hop_length=5, normalized=True),
    "not centered, both sides": spectrogram(12, hop_length=3, center=False, onesided=False),
    "no window, real parts": lambda x: torch.stft(x, 16, win_length=8, return_complex=False),
    "of one signal": lambda x: torch.view_as_real(x[0].stft(16, hop_length=8, window=torch.hann_window(16), return_complex=True)),
    "of one signal, odd": lambda x: torch.view_as_real(torch.stft(x[0], 7, return_complex=True, window=torch.ones(7))),
    "of any length": lambda x: spectrogram(8)(x.t().contiguous()).abs().mean(2),
    "rows": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "columns, cut off": lambda x: torch.view_as_real(torch.fft.rfft(x.reshape(-1, 8, 8), n=6, dim=1, norm="ortho")),
    "cut off and with zeros behind": lambda x: torch.fft.fft2(x.reshape(-1, 8, 8), s=(6, 11), norm="ortho").abs(),
    "of the last axes": lambda x: torch.view_as_real(torch.fft.ifftn(x.reshape(-1, 8, 8), s=(9,))),
    "half, of two axes": lambda x: torch.fft.rfft2(x.reshape(-1, 8, 8), s=(-1, 9), dim=(2, 1)).abs(),
    "half of the inverse": lambda x: torch.fft.ihfft2(x.reshape(-1, 8, 8), s=(7, 10)).abs(),
    "half of the inverse, of one axis": lambda x: torch.fft.ihfftn(x.reshape(-1, 8, 8), dim=1).abs(),
    "frequencies": lambda x: x * torch.fft.fftfreq(64, 0.5) + x[:, :33].mean() * torch.fft.rfftfreq(len(x)).sum(),
    "with zeros behind": lambda x: torch.view_as_real(torch.fft.rfft(x, n=1100)),
}  # fmt: skip


class Transformed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x):
        return self.function(x * self.scale)


def signals(step: int):
    return [torch.randn(12 + step, 64, generator=torch.Generator().manual_seed(step))]


@pytest.mark.parametrize(
    "name",
    usual(
        FUNCTIONS, "spectrogram", "a short window, normalized", "of any length", "half of the inverse", "frequencies"
    ),
)
def test_spectra_train_as_in_pytorch(name):
    assert_trains_as_in_pytorch(lambda: Transformed(FUNCTIONS[name]), signals, evaluates=True)


@pytest.mark.parametrize("points", [16, 100, 512, 2048])
def test_the_middle_frequency_has_no_imaginary_part(points):
    """Nor is it -0, of which the phase is -pi."""

    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            spectrum = torch.fft.rfft(x * self.scale)
            return spectrum.abs().mean(), spectrum.angle()[:, [0, -1]]

    x = torch.randn(3, points, generator=torch.Generator().manual_seed(0))
    x[1:] = -x[1:].abs()  # with the phase pi
    x[2, ::2] *= -1
    phases = make(Spectrum(), loss_fn=None, desc=described([x])).train_step(x, 0.0)[1]
    torch.testing.assert_close(phases, Spectrum()(x)[1].detach())
