"""Packed sequences: padded ones with their lengths, as ONNX's recurrent operators take them.

A `PackedSequence` holds rows, time by time, of the samples that are as long, and how many these are. Those rows are chosen
from the padded tensor by a mask; a recurrent layer, and who pads them again, is given that tensor itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from orttrainer.errors import UnsupportedModelError

__all__ = ["REWRITES", "recurrent", "unchecked"]


class _Padded(NamedTuple):
    """What rows were packed from.

    Attributes:
        x: [time, batch, ...].
        lengths: int64 [batch], falling.
    """

    x: torch.Tensor
    lengths: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """bool [time, batch]: within a sample's length."""
        return torch.arange(self.x.shape[0], device=self.x.device).unsqueeze(1) < self.lengths


def _rows(padded: _Padded) -> torch.Tensor:
    rows = padded.x[padded.mask]
    rows.packed_from = padded, rows._version
    return rows


def _pack(input, lengths, batch_first):
    if not torch.compiler.is_exporting():
        return torch._VF._pack_padded_sequence(input, lengths, batch_first)
    padded = _Padded(input.transpose(0, 1) if batch_first else input, lengths.to(input.device))
    sizes = padded.mask[: lengths.max().item()].sum(1)
    sizes.of = padded
    return _rows(padded), sizes


def _pad(data, batch_sizes, batch_first, padding_value, total_length):
    if not torch.compiler.is_exporting():
        return torch._VF._pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length)
    padded = _padded(data, batch_sizes)
    inside = padded.mask.reshape(*padded.mask.shape, *[1] * (padded.x.dim() - 2))
    x = torch.where(inside, padded.x, torch.as_tensor(padding_value, dtype=padded.x.dtype, device=padded.x.device))
    present = x.shape[0]
    x = x[:total_length] if isinstance(total_length, torch.SymInt) or total_length <= present else x
    if not isinstance(total_length, torch.SymInt) and total_length > present:
        x = torch.cat([x, x.new_full((total_length - present, *x.shape[1:]), padding_value)])
    return x.transpose(0, 1) if batch_first else x, padded.lengths


def _padded(data, batch_sizes) -> _Padded:
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
    return _Padded(x, padded.lengths)


def _entry(x, index):
    """`x[index]`; of `batch_sizes[0]`, which a recurrent layer makes its initial state by, the number of samples."""
    padded = getattr(x, "of", None)
    return x[index] if padded is None or type(index) is not int or index != 0 else padded.x.shape[1]


# ---------------------------------------------------------------- layers


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Recurrent layers do not compare sizes, which the forward that was observed did, by `int` of one that may vary."""
    with contextlib.ExitStack() as stack:
        for layer in (torch.nn.RNNBase, torch.nn.LSTM):
            stack.enter_context(mock.patch.object(layer, "check_forward_args", lambda *args: None))
        yield


_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}  # torch's, in ONNX's order


def recurrent(function, data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):
    """torch.lstm and its kin on a packed sequence: one ONNX operator a layer, with lengths."""
    name = function.__name__.split("_")[0].upper()
    padded, h, c = _padded(data, batch_sizes), hx, None
    if name == "LSTM":
        h, c = hx
        if h.shape[-1] != c.shape[-1]:
            raise UnsupportedModelError("an LSTM with proj_size on a packed sequence is not supported")
    directions, size = 1 + bidirectional, len(params) // num_layers
    attributes = {"hidden_size": h.shape[-1], "direction": "bidirectional" if bidirectional else "forward"}
    if name == "RNN":
        attributes["activations"] = [function.__name__.split("_")[1].capitalize()] * directions
    if name == "GRU":
        attributes["linear_before_reset"] = 1
    x, states = padded.x, []
    for layer in range(num_layers):
        part = slice(layer * directions, (layer + 1) * directions)
        weights = _onnx_weights(params[layer * size : (layer + 1) * size], directions, has_biases, _GATES[name])
        initial = [state[part] for state in (h, c) if state is not None]
        inputs = (x, *weights, padded.lengths.to(torch.int32), *initial)
        shapes = [(x.shape[0], directions, *initial[0].shape[1:]), *(state.shape for state in initial)]
        y, *last = torch.onnx.ops.symbolic_multi_out(
            name, inputs, attributes, dtypes=[x.dtype] * len(shapes), shapes=shapes, version=14
        )
        states.append(last)
        x = y.transpose(1, 2).flatten(2)
        x = F.dropout(x, dropout, training=True) if train and dropout > 0.0 and layer != num_layers - 1 else x
    return (_rows(_Padded(x, padded.lengths)), *(torch.cat(parts) for parts in zip(*states)))


def _onnx_weights(params, directions, has_biases, order):
    """W [directions, gates * hidden, in], R [directions, gates * hidden, hidden], B [directions, 2 * gates * hidden]."""
    each = len(params) // directions

    def ordered(weight):
        gates = weight.chunk(len(order))
        return torch.cat([gates[gate] for gate in order])

    parts = [[ordered(weight) for weight in params[d * each : (d + 1) * each]] for d in range(directions)]
    w, r = (torch.stack([part[kind] for part in parts]) for kind in (0, 1))
    return w, r, torch.stack([torch.cat(part[2:4]) for part in parts]) if has_biases else None


REWRITES = {
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _pad,
    torch.Tensor.__getitem__: _entry,
}
