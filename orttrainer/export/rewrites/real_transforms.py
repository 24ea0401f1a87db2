"""Fourier transforms of real signals.

Their first and middle frequencies are real: exactly, for their phase is 0 or pi. Zeros go behind the signal, where torch has
them behind the complex one that it makes of it, which no exporter does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from orttrainer.export.rewrites.complex_parts import by_parts
from orttrainer.graph.passes.speed.fourier import is_product

__all__ = ["REWRITES", "resized", "several", "sizes_of"]


def _rfft(input, n=None, dim=-1, norm=None):
    return _exact(torch.fft.rfft(input, n, dim, norm), input.shape[dim] if n is None else n, dim)


def _exact(spectrum, points, dim):
    """`spectrum` of a real signal of so many points, along `dim`, without the rounding in what is zero."""
    if not torch.compiler.is_exporting() or (isinstance(points, int) and is_product(points, halves=2)):
        return spectrum  # the matrix is exact there (without FourierProductPass it is the operator, which rounds)
    place = torch.arange(spectrum.shape[dim], device=spectrum.device)
    parts = torch.view_as_real(spectrum)
    imaginary = (place > 0) & (2 * place != points)
    kept = torch.stack([torch.ones_like(imaginary), imaginary], -1)  # [frequencies, 2]
    kept = kept.view(-1, *[1] * (spectrum.dim() - 1 - dim % spectrum.dim()), 2)
    return torch.view_as_complex(torch.where(kept, parts, 0.0))  # not -0, of which the phase is -pi


def _stft(
    input, n_fft, hop_length=None, win_length=None, window=None, center=True, pad_mode="reflect", normalized=False,
    onesided=None, return_complex=None, align_to_window=None,
):  # fmt: skip
    """torch.stft of real signals: ONNX Runtime's STFT is less exact (400 points: 1e-3 of 30) and uses one thread."""
    given = input, n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex
    complex_valued = input.is_complex() or (window is not None and window.is_complex())
    if not torch.compiler.is_exporting() or complex_valued or align_to_window is not None or input.dim() not in (1, 2):
        return torch.stft(*given)
    if input.dim() == 1:
        spectrum = _stft(input[None], *given[1:])
        return by_parts(torch.select)(spectrum, 0, 0) if spectrum.is_complex() else spectrum[0]
    if center:
        input = F.pad(input[:, None], (n_fft // 2, n_fft // 2), mode=pad_mode)[:, 0]
    frames = input.unfold(-1, n_fft, n_fft // 4 if hop_length is None else hop_length)  # [batch, frames, n_fft]
    if window is not None or (win_length or n_fft) != n_fft:
        window = input.new_ones(win_length) if window is None else window
        before = (n_fft - window.shape[0]) // 2
        frames = frames * F.pad(window, (before, n_fft - window.shape[0] - before))
    norm = "ortho" if normalized else None
    spectrum = torch.fft.fft(frames, norm=norm) if onesided is False else _rfft(frames, norm=norm)
    spectrum = spectrum.transpose(1, 2)
    return spectrum if return_complex else torch.view_as_real(spectrum)


def resized(input, sizes: Mapping[int, int]):
    """`input` with these sizes, cut off or with zeros behind."""
    for dim, size in sizes.items():
        missing = size - input.shape[dim]
        if isinstance(missing, int) and missing <= 0:
            input = input.narrow(dim, 0, size)
        else:
            input = torch._C._nn.pad(input, [0, 0] * (input.dim() - 1 - dim % input.dim()) + [0, missing])
    return input


def several(value: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Axes or sizes, of which torch takes a single one, too."""
    return (value,) if isinstance(value, (int, torch.SymInt)) else value if value is None else tuple(value)


def sizes_of(s: Sequence[int], dim: Sequence[int]) -> dict[int, int]:
    """The axes that a transform along several gives a size; -1 is no size."""
    return {axis: size for axis, size in zip(dim, s, strict=True) if size != -1}


def _of_sizes(transform: Callable, default: tuple[int, ...] | None) -> Callable:
    """A transform along several axes, by default along these."""

    def applied(input, s=None, dim=default, norm=None, *, out=None):
        s, dim = several(s), several(dim)
        if s is None or input.is_complex():
            return transform(input, s, dim, norm)
        dim = tuple(range(-len(s), 0)) if dim is None else dim
        return transform(resized(input, sizes_of(s, dim)), None, dim, norm)

    return applied


def _half_of_inverse(default: tuple[int, ...] | None) -> Callable:
    """torch.fft.ihfft2, ihfftn: of the last axis half, and of the others all."""

    def transform(input, s, dim, norm):
        *others, last = range(input.dim()) if dim is None else dim
        half = torch.fft.ihfft(input, None, last, norm)
        return torch.fft.ifftn(half, None, others, norm) if others else half

    return _of_sizes(transform, default)


def _fftfreq(n, d=1.0, *, out=None, dtype=None, **options):
    places = torch.arange(n, dtype=dtype or torch.get_default_dtype(), **options)
    return torch.where(places < (n + 1) // 2, places, places - n) * (1.0 / (n * d))


def _rfftfreq(n, d=1.0, *, out=None, dtype=None, **options):
    return torch.arange(n // 2 + 1, dtype=dtype or torch.get_default_dtype(), **options) * (1.0 / (n * d))


_TWO = (-2, -1)
REWRITES = {
    torch.fft.fftfreq: _fftfreq,
    torch.fft.rfftfreq: _rfftfreq,
    torch.fft.rfft: _rfft,
    torch.stft: _stft,
    **{transform: _of_sizes(transform, _TWO) for transform in (torch.fft.fft2, torch.fft.ifft2, torch.fft.rfft2)},
    **{transform: _of_sizes(transform, None) for transform in (torch.fft.fftn, torch.fft.ifftn, torch.fft.rfftn)},
    torch.fft.ihfft2: _half_of_inverse(_TWO),
    torch.fft.ihfftn: _half_of_inverse(None),
}
