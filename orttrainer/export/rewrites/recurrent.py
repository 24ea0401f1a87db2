"""Recurrent layers: dropout between layers as one of its own, and the projected LSTM, which ONNX's operator is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan

from orttrainer.export.rewrites import packed

__all__ = ["REWRITES"]


def _rewritten(recurrent):
    """The function as one call a layer where there is dropout between layers or a projection."""

    def call(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        projected = recurrent is torch.lstm and hx[0].shape[-1] != hx[1].shape[-1] and torch.compiler.is_exporting()
        dropped = num_layers > 1 and train and dropout > 0.0
        if not projected and not dropped:
            return recurrent(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        one = _projected_layer if projected else recurrent
        states, x, last = [], input, num_layers - 1
        for layer in range(num_layers):
            x, *state = one(
                x, _part(hx, layer, num_layers), params[_span(params, layer, num_layers)],
                has_biases, 1, 0.0, train, bidirectional, batch_first,
            )  # fmt: skip
            states.append(state)
            x = F.dropout(x, dropout, training=True) if dropped and layer != last else x
        return (x, *(torch.cat(parts) for parts in zip(*states)))

    def call_unless_packed(*args, **kwargs):
        if isinstance(args[3], bool):
            return call(*args, **kwargs)
        if torch.compiler.is_exporting():
            return packed.recurrent(recurrent, *args, **kwargs)
        return recurrent(*args, **kwargs)

    return call_unless_packed


def _part(hx, layer, num_layers):
    """One layer's share of the initial state: a tensor, or the pair of an LSTM."""
    if isinstance(hx, torch.Tensor):
        return hx[_span(hx, layer, num_layers)]
    return [h[_span(h, layer, num_layers)] for h in hx]


def _span(sequence, layer, num_layers):
    size = len(sequence) // num_layers
    return slice(layer * size, (layer + 1) * size)


# ---------------------------------------------------------------- the projected LSTM


def _projected_layer(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
    """torch.lstm of one layer whose hidden state is a projection of the output of its cell."""
    x = input.transpose(0, 1) if batch_first else input
    directions = 1 + bidirectional
    results = []
    for index in range(directions):
        w_ih, w_hh, *biases, w_hr = params[_span(params, index, directions)]
        gates = F.linear(x, w_ih, sum(biases) if has_biases else None)
        results.append(_projected_direction(gates, hx[0][index], hx[1][index], w_hh, w_hr, reverse=index == 1))
    y = torch.cat([y for y, _, _ in results], dim=-1)
    h, c = (torch.stack(parts) for parts in list(zip(*results))[1:])
    return y.transpose(0, 1) if batch_first else y, h, c


def _projected_direction(gates, h, c, w_hh, w_hr, reverse):
    """c <- f c + i g;  h <- W_hr (o tanh(c))."""

    def step(state, gates):
        h, c = state
        i, f, g, o = (gates + h @ w_hh.T).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = (torch.sigmoid(o) * torch.tanh(c)) @ w_hr.T
        return (h, c), h.clone()

    (h, c), y = scan(step, (h.clone(), c.clone()), gates.flip(0) if reverse else gates, dim=0)
    return y.flip(0) if reverse else y, h, c


REWRITES = {f: _rewritten(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)}
