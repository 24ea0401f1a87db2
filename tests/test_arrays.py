"""NumPy's arrays of tensors, in forward: what NumPy computes of their numbers is computed in the graph, as in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fidelity import Loss, assert_trains_as_in_pytorch, described
from marks import usual
from small import make
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from orttrainer.errors import UnsupportedModelError


def packed(m, y, lengths):
    rows = pack_padded_sequence(y, lengths.cpu().numpy(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.rnn(rows)[0], batch_first=True, total_length=y.shape[1])[0]


def periods(m, y, lengths):
    """Folds by the strongest frequencies, as TimesNet (Wu et al. 2023)."""
    frequencies = torch.fft.rfft(y, dim=1).abs().mean((0, 2))
    frequencies[0] = 0
    strongest = torch.topk(frequencies, 2)[1].detach().cpu().numpy()
    time = y.shape[1]
    folds = []
    for period in time // strongest:
        length = (time // period + 1) * period if time % period else time
        padded = F.pad(y, (0, 0, 0, length - time)).reshape(y.shape[0], length // period, period, 6)
        folds.append(padded.mean(1, keepdim=True).expand_as(padded).reshape(y.shape[0], length, 6)[:, :time])
    return sum(folds)


FUNCTIONS = {
    "packed": packed,
    "periods": periods,
    "periods of what has been folded": lambda m, y, n: periods(m, periods(m, y, n).sin(), n),
    "square root": lambda m, y, n: y * torch.from_numpy(np.sqrt(y.detach().abs().mean((0, 1)).numpy())),
    "square root of a tensor": lambda m, y, n: y * torch.as_tensor(np.sqrt(y.detach().abs().mean((0, 1)))),
    "exponential": lambda m, y, n: y * torch.tensor(np.exp(-(y.detach().mean((0, 1)).numpy() ** 2))),
    "deviation": lambda m, y, n: y / y.detach().mean((0, 1)).numpy().std(),
    "the largest": lambda m, y, n: y * y.detach().mean((0, 1)).numpy().max(),
    "place of the largest": lambda m, y, n: y[..., y.sum((0, 1)).detach().numpy().argmax()],
    "in the order of a buffer": lambda m, y, n: y[..., np.argsort(m.order.numpy())],
    "a buffer": lambda m, y, n: y * torch.from_numpy(m.order.numpy() / 7.0).float(),
}


class Arrays(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear, self.rnn = function, nn.Linear(6, 6), nn.GRU(6, 6, batch_first=True)
        self.register_buffer("order", torch.tensor([3, 1, 4, 0, 5, 2]))

    def forward(self, x, lengths):
        return self.function(self, self.linear(x), lengths) + self.rnn.bias_hh_l0.mean()


def sequences(step: int):
    x = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(step))
    return [x, torch.tensor([[8, 5, 2], [3, 8, 8], [4, 6, 8]][step % 3])]


@pytest.mark.parametrize("name", usual(FUNCTIONS, "packed", "periods of what has been folded", "a buffer"))
def test_arrays_of_tensors_train_as_in_pytorch(name):
    assert_trains_as_in_pytorch(lambda: Arrays(FUNCTIONS[name]), sequences, evaluates=False)


def test_an_array_of_many_numbers_is_refused_at_once():
    """Each would be a symbol of the trace."""
    x, lengths = torch.randn(3, 3000, 6), torch.tensor([3, 2, 1])
    module = Loss(Arrays(lambda m, y, n: y * float(y.detach().numpy().mean())))
    with pytest.raises(UnsupportedModelError, match=r"gives Python values of a tensor at .*test_arrays\.py.*numpy"):
        make(module, loss_fn=None, desc=described([x, lengths])).train_step(x, lengths, 0.1)
