"""Recurrent layers: dropout between layers as one of its own, and the projected LSTM, which ONNX's operator is not.

For torch's newer exporter a layer is ONNX's operator, of any length: torch would take a length that may vary for a constant.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan

from orttrainer.export.rewrites import noise, packed
from orttrainer.export.rewrites.triangles import dense

__all__ = ["REWRITES"]


def _rewritten(recurrent):
    """The function as ONNX's operators, or as one call a layer where there is dropout between layers or a projection."""

    def call(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        exporting = torch.compiler.is_exporting()
        if exporting and not _is_projected(recurrent, hx):
            x = input.transpose(0, 1) if batch_first else input
            y, *states = _onnx_layers(
                recurrent, x, None, hx, params, has_biases, num_layers, dropout, train, bidirectional
            )
            return (y.transpose(0, 1) if batch_first else y, *states)
        one, dropped = _projected_layer if exporting else recurrent, num_layers > 1 and train and dropout > 0.0
        if one is recurrent and not dropped:
            return recurrent(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _layer_by_layer(
            one, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )

    def call_packed(data, batch_sizes, hx, *arguments):
        padded = packed.padded_from(data, batch_sizes)
        if _is_projected(recurrent, hx):
            batch = padded.x.shape[1]
            torch._check(hx[0].shape[1] == batch)  # of a batch of known size the layer asks `batch_sizes`
            hx = [state.narrow(1, 0, batch) for state in hx]  # PyTorch 2.9 gives no Scan a size by `batch_sizes`
            one = functools.partial(_projected_layer, inside=padded.mask)
            y, *states = _layer_by_layer(one, padded.x, hx, *arguments, batch_first=False)
        else:
            y, *states = _onnx_layers(recurrent, padded.x, padded.lengths, hx, *arguments)
        return (packed.rows(padded._replace(x=y)), *states)

    def call_either(*args, **kwargs):
        if isinstance(args[3], bool):
            return call(*args, **kwargs)
        if torch.compiler.is_exporting():
            return call_packed(*args, **kwargs)
        return recurrent(*args, **kwargs)

    return call_either


def _layer_by_layer(one, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
    """As many calls of `one` as there are layers, and dropout between them."""
    states, x, last = [], input, num_layers - 1
    for layer in range(num_layers):
        x, *state = one(
            x, _part(hx, layer, num_layers), params[_span(params, layer, num_layers)],
            has_biases, 1, 0.0, train, bidirectional, batch_first,
        )  # fmt: skip
        states.append(state)
        x = noise.dropout(x, dropout, True) if train and dropout > 0.0 and layer != last else x
    return (x, *(torch.cat(parts) for parts in zip(*states)))


def _is_projected(recurrent, hx):
    return recurrent is torch.lstm and hx[0].shape[-1] != hx[1].shape[-1]


def _part(hx, layer, num_layers):
    """One layer's share of the initial state: a tensor, or the pair of an LSTM."""
    if isinstance(hx, torch.Tensor):
        return hx[_span(hx, layer, num_layers)]
    return [h[_span(h, layer, num_layers)] for h in hx]


def _span(sequence, layer, num_layers):
    size = len(sequence) // num_layers
    return slice(layer * size, (layer + 1) * size)


# ---------------------------------------------------------------- ONNX's operators

_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}  # torch's, in ONNX's order


def _onnx_layers(recurrent, x, lengths, hx, params, has_biases, num_layers, dropout, train, bidirectional):
    """torch.lstm and its kin: one ONNX operator a layer.

    Args:
        x: [time, batch, ...].
        lengths: int [batch]; None: all samples are as long.
    """
    name = recurrent.__name__.split("_")[0].upper()
    initial = hx if name == "LSTM" else [hx]
    lengths = None if lengths is None else lengths.to(torch.int32)
    directions = 1 + bidirectional
    attributes = {"hidden_size": initial[0].shape[-1], "direction": "bidirectional" if bidirectional else "forward"}
    if name == "RNN":
        attributes["activations"] = [recurrent.__name__.split("_")[1].capitalize()] * directions
    if name == "GRU":
        attributes["linear_before_reset"] = 1
    states = []
    for layer in range(num_layers):
        weights = _onnx_weights(params[_span(params, layer, num_layers)], directions, has_biases, _GATES[name])
        parts = [_part(state, layer, num_layers) for state in initial]
        shapes = [(x.shape[0], directions, *parts[0].shape[1:]), *(state.shape for state in parts)]
        y, *last = _onnx_layer(name, (x, *weights, lengths, *parts), attributes, shapes)
        states.append(last)
        x = y.transpose(1, 2).flatten(2) if bidirectional else y.squeeze(1)
        x = noise.dropout(x, dropout, True) if train and dropout > 0.0 and layer != num_layers - 1 else x
    return (x, *(torch.cat(parts) for parts in zip(*states)))


def _onnx_layer(name, inputs, attributes, shapes):
    """The outputs of one operator. torch does not see that they have a gradient where an input is None."""
    made = torch.onnx.ops.symbolic_multi_out(
        name, inputs, attributes, dtypes=[inputs[0].dtype] * len(shapes), shapes=shapes, version=14
    )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return [y.requires_grad_().clone() for y in made]  # no leaves, which could not be written to
    return made


def _onnx_weights(params, directions, has_biases, order):
    """W [directions, gates * hidden, in], R [directions, gates * hidden, hidden], B [directions, 2 * gates * hidden]."""
    each = len(params) // directions

    def ordered(weight):
        return torch.cat(
            [weight[_span(weight, gate, len(order))] for gate in order]
        )  # a Slice each, which the rules know

    parts = [[ordered(weight) for weight in params[d * each : (d + 1) * each]] for d in range(directions)]
    w, r = (torch.stack([part[kind] for part in parts]) for kind in (0, 1))
    return w, r, torch.stack([torch.cat(part[2:4]) for part in parts]) if has_biases else None


# ---------------------------------------------------------------- the projected LSTM


def _projected_layer(
    input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, inside=None
):
    """torch.lstm of one layer whose hidden state is a projection of the output of its cell.

    Args:
        inside: bool [time, batch], within a sample's length; None: all samples are as long.
    """
    x = input.transpose(0, 1) if batch_first else input
    directions = 1 + bidirectional
    results = []
    for index in range(directions):
        w_ih, w_hh, *biases, w_hr = params[_span(params, index, directions)]
        gates = F.linear(x, w_ih, sum(biases) if has_biases else None)
        steps = (gates,) if inside is None else (gates, inside)
        results.append(_projected_direction(steps, hx[0][index], hx[1][index], w_hh, w_hr, reverse=index == 1))
    y = torch.cat([y for y, _, _ in results], dim=-1)
    h, c = (torch.stack(parts) for parts in list(zip(*results))[1:])
    return y.transpose(0, 1) if batch_first else y, h, c


def _projected_direction(steps, h, c, w_hh, w_hr, reverse):
    """c <- f c + i g;  h <- W_hr (o tanh(c)); both stay as they are outside of a sample."""
    parts = [w_hr.shape[1]] * 4  # told: in a body PyTorch 2.9 knows of few axes how many a quarter are

    def step(state, now):
        gates, *inside = now
        i, f, g, o = (gates + state[0] @ w_hh.T).split(parts, dim=-1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        new = (torch.sigmoid(o) * torch.tanh(c)) @ w_hr.T, c
        h, c = (torch.where(inside[0].unsqueeze(-1), *pair) for pair in zip(new, state)) if inside else new
        return (h, c), h.clone()

    steps = tuple(x.flip(0) for x in steps) if reverse else steps
    (h, c), y = scan(step, (dense(h), dense(c)), steps, dim=0)
    return y.flip(0) if reverse else y, h, c


REWRITES = {f: _rewritten(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)}
