import numpy as np
import torch

from orttrainer.testing import Case

N = np.array(7)
REAL, COMPLEX = (2, 6, 3, 1), (2, 6, 3, 2)


def pairs(y):
    return torch.view_as_real(y.resolve_conj())


def transform(function, axis, n=None):
    """Of a real or complex signal in pairs."""

    def apply(x):
        signal = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
        y = function(signal, n=n, dim=axis)
        return pairs(y) if y.is_complex() else y.unsqueeze(-1)

    return apply


def dft(shape, *more, opset=20, **options):
    return Case("DFT", shape, *more, opset=opset, **options)


def stft(length, step, window=True, onesided=True):
    def function(x, w=None):
        signal = torch.view_as_complex(x) if x.shape[-1] == 2 else x[..., 0]
        frames = signal.unfold(1, length, step)
        y = (torch.fft.rfft if onesided else torch.fft.fft)(frames if w is None else frames * w)
        return pairs(y)

    return function


FFT, IFFT, RFFT, IRFFT = torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.irfft
# fmt: off
CASES = [
    dft(REAL, torch=transform(FFT, 2)),
    dft(COMPLEX, torch=transform(FFT, 2)),
    dft(COMPLEX, None, np.array(1), torch=transform(FFT, 1), name="axis"),
    dft(COMPLEX, None, np.array(-3), inverse=1, torch=transform(IFFT, 1), name="inverse"),
    dft(REAL, None, np.array(1), inverse=1, torch=transform(IFFT, 1), name="inverse-of-real"),
    dft(REAL, None, np.array(1), onesided=1, torch=transform(RFFT, 1), name="onesided"),
    dft((2, 5, 1), onesided=1, torch=transform(RFFT, 1), name="onesided-odd"),
    dft(COMPLEX, N, np.array(1), torch=transform(FFT, 1, 7), name="longer"),
    dft(COMPLEX, np.array(4), np.array(1), inverse=1, torch=transform(IFFT, 1, 4), name="shorter"),
    dft(REAL, N, np.array(1), onesided=1, torch=transform(RFFT, 1, 7), name="onesided-longer"),
    dft(REAL, np.array(4), np.array(1), onesided=1, torch=transform(RFFT, 1, 4), name="onesided-shorter"),
    *(dft((2, bins, 2), n, onesided=1, inverse=1, torch=transform(IRFFT, 1, n and int(n)), name=f"real-{bins}-{n}")
      for bins, n in ((4, None), (4, np.array(7)), (4, np.array(9)), (4, np.array(4)), (1, np.array(1)))),
    dft(REAL, opset=18, torch=transform(FFT, 1), name="18"),
    dft(COMPLEX, N, opset=18, axis=2, inverse=1, torch=transform(IFFT, 2, 7), name="18-longer"),
    dft(REAL, opset=18, axis=-2, onesided=1, torch=transform(RFFT, 2), name="18-onesided"),
    # onesided is given: ONNX's inference takes an absent one for 0
    Case("STFT", (2, 16, 1), np.array(3), (6,), onesided=1, torch=stft(6, 3), name="window"),
    Case("STFT", (2, 16, 1), np.array(4), (6,), np.array(6), opset=20, onesided=1, torch=stft(6, 4), name="20"),
    Case("STFT", (2, 16, 1), np.array(4), None, np.array(5), onesided=1, torch=stft(5, 4), name="length"),
    Case("STFT", (2, 16, 1), np.array(4), (8,), onesided=0, torch=stft(8, 4, onesided=False), name="two-sided"),
    Case("STFT", (2, 16, 2), np.array(4), (8,), onesided=0, torch=stft(8, 4, onesided=False), name="complex"),
]
# fmt: on
