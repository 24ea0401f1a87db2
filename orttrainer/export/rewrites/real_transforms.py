"""Fourier transforms of real signals.

Their first and middle frequencies are real: exactly, for their phase is 0 or pi.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from orttrainer.graph.passes.speed.fourier import is_product

__all__ = ["REWRITES"]


def _rfft(input, n=None, dim=-1, norm=None):
    return _exact(torch.fft.rfft(input, n, dim, norm), input.shape[dim] if n is None else n, dim)


def _exact(spectrum, points, dim):
    """`spectrum` of a real signal of so many points, along `dim`, without the rounding in what is zero."""
    if not torch.compiler.is_exporting() or (isinstance(points, int) and is_product(points, real=True)):
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
        return _stft(input[None], *given[1:])[0]
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


REWRITES = {torch.fft.rfft: _rfft, torch.stft: _stft}
