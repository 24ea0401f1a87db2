"""LSTM, GRU and RNN written out so that what their backward needs is kept: one Scan a direction.

The input's part of the gates is one product over all times; a step of the Scan multiplies by R and applies the
activations. Inside, a value is hidden-major, as in the backward: [time, hidden, batch]. Behind the end of a sequence
a step keeps its states, its output is 0, and its activations are numbers that nobody uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import onnx_ir as ir

from orttrainer.differentiate.rules.recurrent_gates import split_gates
from orttrainer.differentiate.rules.recurrent_layers import scan
from orttrainer.differentiate.rules.tools import join
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.recurrent import FORWARD

# Narrower layers keep the operator: there a step of the Scan takes longer than the products that it spares. Forward and
# backward of an LSTM, 35 times, 16 sequences, gates made again and kept, in ms: 32 wide 0.56 and 0.61, 64 wide 1.04 and
# 0.92, 128 wide 2.65 and 2.13, 256 wide 8.8 and 6.7. (2 threads, ONNX Runtime 1.31.1; a GRU does alike. Of an RNN there
# is nothing to keep, but the operator is slow: 32 wide 0.34 and 0.24, 256 wide 3.3 and 1.8.)
NARROWEST = 64

Kept = tuple[ir.Value, list[ir.Value], list[ir.Value]]  # hidden states of all times, last states, activations


def offer_forward(op: Builder, node: ir.Node, forward: Callable, written: Sequence) -> None:
    """Let `KeepActivationsPass` replace `node` by `forward`.

    Args:
        forward: `forward(op, direction)` returns the hidden states of all times, the last states, and activations.
        written: for each direction of `node` its `Direction`, and the activations that its backward computes again.
    """
    x, _, r = node.inputs[:3]
    narrow = r.shape is not None and isinstance(r.shape[2], int) and r.shape[2] < NARROWEST and node.op_type != "RNN"
    if node.graph is op.graph and x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and not narrow:
        node.meta[FORWARD] = functools.partial(_write, node, forward, written)


def _write(node: ir.Node, forward: Callable, written: Sequence, op: Builder) -> list[tuple[ir.Value, ir.Value]]:
    pairs, parts = [], []
    for direction, again in written:
        y, last, kept = forward(op, direction)
        pairs += zip(again, kept)
        y = op.Unsqueeze(op.Transpose(y, perm=[0, 2, 1]), [1])  # [time, 1, batch, hidden]
        parts.append([y, *(op.Unsqueeze(op.Transpose(state, perm=[1, 0]), [0]) for state in last)])
    for place, (old, values) in enumerate(zip(node.outputs, zip(*parts))):
        if old.name:
            pairs.append((old, values[0] if len(values) == 1 else op.Concat(*values, axis=0 if place else 1)))
    return pairs


def lstm_forward(op: Builder, d) -> Kept:
    """[i o f g] = [sig sig sig tanh](W X + R H' + B),  C = f C' + i g,  H = o tanh(C);  keeps i o f g tanh(C) f C' H."""
    gates = _products(op, d, None if d.w_bias is None else op.Add(d.w_bias, d.r_bias))

    def step(op, states, inputs):
        (h, c), (gates, inside) = states, inputs
        i, o, f, g = split_gates(op, op.Gemm(d.r, h, gates), d.order, axis=0)
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
    w_z, w_r, w_n = split_gates(op, _products(op, d, d.w_bias), d.order, axis=1)

    def step(op, states, inputs):
        (h,), (w_z, w_r, w_n, inside) = states, inputs
        product = op.MatMul(d.r, h) if d.r_bias is None else op.Gemm(d.r, h, d.r_bias)
        r_z, r_r, u = split_gates(op, product, d.order, axis=0)
        z, r = op.Sigmoid(op.Add(w_z, r_z)), op.Sigmoid(op.Add(w_r, r_r))
        n = op.Tanh(op.Add(w_n, op.Mul(r, u)))
        old = op.Mul(z, op.Sub(h, n))
        return _ended(op, inside, [op.Add(n, old)], states), [z, r, n, old, u]

    last, (z, r, n, old, u) = _scan(op, d, step, [d.initial_h], [w_z, w_r, w_n])
    return _zero_behind(op, d, op.Add(n, old)), last, [z, r, n, old, u]


def _gru_reset_before(op: Builder, d) -> Kept:
    gates = _products(op, d, None if d.w_bias is None else op.Add(d.w_bias, d.r_bias))
    r_z, r_r, r_n = op.Split(d.r, axis=0, num_outputs=3, outputs=3)
    w_z, w_r, w_n = op.Split(gates, axis=1, num_outputs=3, outputs=3)

    def step(op, states, inputs):
        (h,), (w_z, w_r, w_n, inside) = states, inputs
        z, r = op.Sigmoid(op.Gemm(r_z, h, w_z)), op.Sigmoid(op.Gemm(r_r, h, w_r))
        n = op.Tanh(op.Gemm(r_n, op.Mul(r, h), w_n))
        old = op.Mul(z, op.Sub(h, n))
        return _ended(op, inside, [op.Add(n, old)], states), [z, r, n, old]

    last, (z, r, n, old) = _scan(op, d, step, [d.initial_h], [w_z, w_r, w_n])
    return _zero_behind(op, d, op.Add(n, old)), last, [z, r, n, old]


def rnn_forward(op: Builder, d) -> Kept:
    """H = f(W X + R H' + B);  the backward needs H only."""
    gates = _products(op, d, None if d.w_bias is None else op.Add(d.w_bias, d.r_bias))

    def step(op, states, inputs):
        (h,), (gates, inside) = states, inputs
        new_h = (op.Relu if d.activations == "relu" else op.Tanh)(op.Gemm(d.r, h, gates))
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
    """W X + b of all times, by one product: [time, gates, batch].

    Its rows are those of X: to exchange gates and batch within a time is several times faster than gates and time.
    """
    rows = op.Reshape(d.x, join(op, -1, op.dim(d.x, 2)))  # [time * batch, input]
    operands = (rows, d.w) if bias is None else (rows, d.w, op.Squeeze(bias, [1]))
    product = op.Gemm(*operands, transB=1)
    by_time = op.Reshape(product, join(op, op.dim(d.x, 0), -1, op.dim(d.w, 0)))
    if d.w.shape is not None and d.x.shape is not None:
        by_time.shape = ir.Shape(
            [*d.x.shape.dims[:2], d.w.shape[0]]
        )  # which inference does not see if these have names
    return op.Transpose(by_time, perm=[0, 2, 1])
