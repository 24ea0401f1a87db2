"""LSTM, GRU and RNN written out so that what their backward needs is kept: one Scan a direction.

The input's part of the gates is one product over all times; a step of the Scan multiplies by R and applies the
activations. Inside, a value is hidden-major, as in the backward: [time, hidden, batch]. Behind the end of a sequence
a step keeps its states, its output is 0, and its activations are numbers that nobody uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from orttrainer.differentiate.rules.recurrent_gates import split_gates
from orttrainer.differentiate.rules.recurrent_layers import scan
from orttrainer.differentiate.rules.recurrent_layouts import BATCH_MAJOR
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.recurrent import BATCH_MAJOR_FORM, FORWARD
from orttrainer.graph.sizes import size_at_hand

WIDEST = 64  # layer that is batch-major for any number of sequences
FEW = 8  # sequences, for which all are: hidden-major the products take as long as those of 16
# Numbers in a hidden state up to which the operator stays, batch-major, and the gates are made again: a step of the Scan
# takes longer than the products that it spares. A whole step with an LSTM, 50 times, one thread (ONNX Runtime 1.31.1, Zen 4),
# gates made again and kept, in ms: 16 wide, 8 sequences 0.62 and 0.72; 32 and 8 0.82 and 0.88; 48 and 8 1.13 both; 32 and 16
# 1.22 and 1.20; 48 and 16 1.75 and 1.55. A GRU does alike; of an RNN there is nothing to keep, but the operator is slow.
SMALLEST = 384
USUAL = 16  # sequences, where that is not known

Kept = tuple[ir.Value, list[ir.Value], list[ir.Value]]  # hidden states of all times, last states, activations
Pairs = list[tuple[ir.Value, ir.Value]]


def offer_forms(
    op: Builder, node: ir.Node, forward: Callable, written: Sequence, cotangents: Sequence, again: Callable
) -> None:
    """Let `BatchMajorPass` and `KeepActivationsPass` write `node`, or its gradient, in another form.

    Args:
        forward: `forward(op, direction)` returns the hidden states of all times, the last states, and activations.
        written: for each direction of `node` its `Direction`, and the activations that its backward computes again.
        cotangents: of the inputs.
        again: `again(op, layout=layout)` writes the backward out in another layout, and returns such cotangents and
            directions.
    """
    if node.graph is op.graph and node.inputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        node.meta[FORWARD] = functools.partial(_write, node, forward, written)
        node.meta[BATCH_MAJOR_FORM] = functools.partial(_batch_major, node, forward, cotangents, again)


def _batch_major(
    node: ir.Node, forward: Callable, cotangents: Sequence, again: Callable, op: Builder, sizes: Mapping[str, int]
) -> Pairs:
    """The backward batch-major, and the forward where it keeps what that reads; nothing where another form is faster."""
    x, _, r = node.inputs[:3]
    batch = None if x.shape is None else size_at_hand(x.shape[1], sizes)
    hidden = None if r.shape is None else size_at_hand(r.shape[2], sizes)
    if hidden is None or (hidden > WIDEST and (batch is None or batch > FEW)):
        return []
    new, directions = again(op, layout=BATCH_MAJOR)
    pairs = [(old, value) for old, value in zip(cotangents, new) if old is not None]
    keeps = hidden * (USUAL if batch is None else batch) > SMALLEST or node.op_type == "RNN"
    return pairs + _write(node, forward, directions, op) if keeps else pairs


def _write(node: ir.Node, forward: Callable, written: Sequence, op: Builder) -> Pairs:
    pairs, parts = [], []
    for direction, again in written:
        layout = direction.layout
        y, last, kept = forward(op, direction)
        pairs += zip(again, kept)
        y = op.Unsqueeze(layout.of_times(op, y), [1])  # [time, 1, batch, hidden]
        parts.append([y, *(op.Unsqueeze(layout.of_state(op, state), [0]) for state in last)])
    for place, (old, values) in enumerate(zip(node.outputs, zip(*parts))):
        if old.name:
            pairs.append((old, values[0] if len(values) == 1 else op.Concat(*values, axis=0 if place else 1)))
    return pairs


def lstm_forward(op: Builder, d) -> Kept:
    """[i o f g] = [sig sig sig tanh](W X + R H' + B),  C = f C' + i g,  H = o tanh(C);  keeps i o f g tanh(C) f C' H."""
    gates = _products(op, d, None if d.w_bias is None else op.Add(d.w_bias, d.r_bias))

    def step(op, states, inputs):
        (h, c), (gates, inside) = states, inputs
        i, o, f, g = split_gates(op, d.layout.product(op, d.r, h, gates), d.order, d.layout.axis)
        i, o, f, g = op.Sigmoid(i), op.Sigmoid(o), op.Sigmoid(f), op.Tanh(g)
        old = op.Mul(f, c)
        new_c = op.Add(old, op.Mul(i, g))
        tanh_c = op.Tanh(new_c)
        return _ended(op, inside, [op.Mul(o, tanh_c), new_c], states), [i, o, f, g, tanh_c, old]

    last, (i, o, f, g, tanh_c, old) = _scan(op, d, step, [d.initial_h, d.initial_c], [gates])
    y = op.Mul(o, tanh_c)  # of all times at once: a step would have to copy its state to keep it
    return _zero_behind(op, d, y), last, [i, o, f, g, tanh_c, old, y]


def gru_forward(op: Builder, d, linear_before_reset: bool) -> Kept:
    """[z r] = sig(W X + R H' + B),  n = tanh(Wn X + U + b),  H = n + z (H' - n);  keeps z r n z(H'-n), and Rn H' + c."""
    if not linear_before_reset:
        return _gru_reset_before(op, d)
    w_z, w_r, w_n = split_gates(op, _products(op, d, d.w_bias), d.order, d.layout.axis)

    def step(op, states, inputs):
        (h,), (w_z, w_r, w_n, inside) = states, inputs
        r_z, r_r, u = split_gates(op, d.layout.product(op, d.r, h, d.r_bias), d.order, d.layout.axis)
        z, r = op.Sigmoid(op.Add(w_z, r_z)), op.Sigmoid(op.Add(w_r, r_r))
        n = op.Tanh(op.Add(w_n, op.Mul(r, u)))
        old = op.Mul(z, op.Sub(h, n))
        return _ended(op, inside, [op.Add(n, old)], states), [z, r, n, old, u]

    last, (z, r, n, old, u) = _scan(op, d, step, [d.initial_h], [w_z, w_r, w_n])
    return _zero_behind(op, d, op.Add(n, old)), last, [z, r, n, old, u]


def _gru_reset_before(op: Builder, d) -> Kept:
    gates = _products(op, d, None if d.w_bias is None else op.Add(d.w_bias, d.r_bias))
    r_z, r_r, r_n = op.Split(d.r, axis=0, num_outputs=3, outputs=3)
    w_z, w_r, w_n = op.Split(gates, axis=d.layout.axis, num_outputs=3, outputs=3)
    product = d.layout.product

    def step(op, states, inputs):
        (h,), (w_z, w_r, w_n, inside) = states, inputs
        z, r = op.Sigmoid(product(op, r_z, h, w_z)), op.Sigmoid(product(op, r_r, h, w_r))
        n = op.Tanh(product(op, r_n, op.Mul(r, h), w_n))
        old = op.Mul(z, op.Sub(h, n))
        return _ended(op, inside, [op.Add(n, old)], states), [z, r, n, old]

    last, (z, r, n, old) = _scan(op, d, step, [d.initial_h], [w_z, w_r, w_n])
    return _zero_behind(op, d, op.Add(n, old)), last, [z, r, n, old]


def rnn_forward(op: Builder, d) -> Kept:
    """H = f(W X + R H' + B);  the backward needs H only."""
    gates = _products(op, d, None if d.w_bias is None else op.Add(d.w_bias, d.r_bias))

    def step(op, states, inputs):
        (h,), (gates, inside) = states, inputs
        new_h = (op.Relu if d.activations == "relu" else op.Tanh)(d.layout.product(op, d.r, h, gates))
        return _ended(op, inside, [new_h], states), [new_h]

    last, (y,) = _scan(op, d, step, [d.initial_h], [gates])
    return _zero_behind(op, d, y), last, []


def _scan(op: Builder, d, step: Callable, first: list[ir.Value], inputs: list[ir.Value]) -> tuple[list, list]:
    """The last states, and what the steps keep."""
    last, kept = scan(op, step, first, [*inputs, _inside(op, d)], d.reverse)
    if d.filled is not None:
        last = [op.Mul(state, d.filled) for state in last]
    return last, kept


def _inside(op: Builder, d) -> ir.Value | None:
    return None if d.valid is None else op.Cast(d.valid, to=int(ir.DataType.BOOL))


def _ended(op: Builder, inside: ir.Value | None, new: list[ir.Value], old: Sequence[ir.Value]) -> list[ir.Value]:
    """The states after a step, where some sequences may have ended."""
    return new if inside is None else [op.Where(inside, after, before) for after, before in zip(new, old)]


def _zero_behind(op: Builder, d, y: ir.Value) -> ir.Value:
    """The hidden states of all times, 0 behind the end of a sequence."""
    return y if d.valid is None else op.Where(_inside(op, d), y, op.scalar(0.0, y))


def _products(op: Builder, d, bias: ir.Value | None) -> ir.Value:
    """W X + b of all times, by one product of the rows of X.

    Hidden-major, to exchange gates and batch within a time is several times faster than gates and time.
    """
    if bias is not None and d.layout is not BATCH_MAJOR:
        bias = op.Squeeze(bias, [1])
    return d.layout.of_times(op, BATCH_MAJOR.products(op, [(d.w, d.x)], bias))
