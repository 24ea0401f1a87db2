"""Packed sequences: padded ones with their lengths, as ONNX's recurrent operators take them.

A `PackedSequence` holds rows, time by time, of the samples that are as long, and how many these are. Those rows are chosen
from the padded tensor by their places; a recurrent layer, and who pads them again, is given that tensor itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch

from orttrainer.errors import UnsupportedModelError

__all__ = ["REWRITES", "padded_from", "rows", "unchecked", "uncut"]


class Padded(NamedTuple):
    """What rows were packed from.

    Attributes:
        x: [time, batch, ...].
        lengths: int64 [batch], falling.
        places: int64 [rows], of these in time * batch; found once, so that what is made of the rows is known to be as many.
    """

    x: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """bool [time, batch]: within a sample's length."""
        return _inside(self.x, self.lengths)


def _inside(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths


def rows(padded: Padded) -> torch.Tensor:
    """The packed sequence's data."""
    data = padded.x.flatten(0, 1).index_select(0, padded.places)
    data.packed_from = padded, data._version
    return data


def _pack(input, lengths, batch_first):
    if not torch.compiler.is_exporting():
        return torch._VF._pack_padded_sequence(input, lengths, batch_first)
    x, lengths = input.transpose(0, 1) if batch_first else input, lengths.to(input.device)
    padded = Padded(x, lengths, _inside(x, lengths).reshape(-1).nonzero().squeeze(1))
    longest = lengths.max().item()
    torch._check(longest >= 0)  # what PyTorch 2.9 has to know of the end of a slice
    torch._check(longest <= x.shape[0])
    sizes = padded.mask[:longest].sum(1)
    sizes.of = padded
    return rows(padded), sizes


def _pad(data, batch_sizes, batch_first, padding_value, total_length):
    if not torch.compiler.is_exporting():
        return torch._VF._pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length)
    padded = padded_from(data, batch_sizes)
    inside = padded.mask.reshape(*padded.mask.shape, *[1] * (padded.x.dim() - 2))
    x = torch.where(inside, padded.x, torch.as_tensor(padding_value, dtype=padded.x.dtype, device=padded.x.device))
    present = x.shape[0]
    if isinstance(total_length, torch.SymInt) or total_length <= present:
        x = x[:total_length]
        _note_cut(x.shape[0], present)
    if not isinstance(total_length, torch.SymInt) and total_length > present:
        x = torch.cat([x, x.new_full((total_length - present, *x.shape[1:]), padding_value)])
    return x.transpose(0, 1) if batch_first else x, padded.lengths


def _note_cut(size, uncut):
    if isinstance(size, torch.SymInt):
        vars(size.node.shape_env).setdefault("uncut", {})[size.node.expr] = uncut


def uncut(size):
    """Of what was cut to its longest sample, whose `size` values alone tell, the size before; of all else `size`."""
    if not isinstance(size, torch.SymInt):
        return size
    return getattr(size.node.shape_env, "uncut", {}).get(size.node.expr, size)


def padded_from(data, batch_sizes) -> Padded:
    """What rows were packed from; of rows that something was made of since, put back where they were."""
    packed_from, version = getattr(data, "packed_from", (None, None))
    if packed_from is not None and data._version == version:
        return packed_from
    if (padded := getattr(batch_sizes, "of", None)) is None:
        raise UnsupportedModelError("a packed sequence was not packed by torch.nn.utils.rnn within forward")
    steps, batch = padded.x.shape[:2]
    x = data.new_zeros((steps, batch, *data.shape[1:])).masked_scatter(
        padded.mask.reshape(steps, batch, *[1] * (data.dim() - 1)).expand(steps, batch, *data.shape[1:]), data
    )
    return padded._replace(x=x)


def _entry(x, index):
    """`x[index]`; of `batch_sizes[0]`, which a recurrent layer makes its initial state by, the number of samples."""
    padded = getattr(x, "of", None)
    return x[index] if padded is None or type(index) is not int or index != 0 else padded.x.shape[1]


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Recurrent layers do not compare sizes, which the forward that was observed did, by `int` of one that may vary."""
    with contextlib.ExitStack() as stack:
        for layer in (torch.nn.RNNBase, torch.nn.LSTM):
            stack.enter_context(mock.patch.object(layer, "check_forward_args", lambda *args, **kwargs: None))
        yield


REWRITES = {
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _pad,
    torch.Tensor.__getitem__: _entry,
}
