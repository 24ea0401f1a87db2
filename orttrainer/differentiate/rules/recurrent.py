"""Recurrent layers: LSTM, GRU, RNN, by one backward Scan a direction.

The hidden states are in Y, so all gates are computed again in one product over all times. Whatever
does not depend on the recurrence is a factor that is computed for all times at once; what is left in
the body of the Scan is the chain itself. Then W, R, B and X get one product each. `recurrent_forward` has the
forward that keeps the gates, which a training graph may run instead of computing them again.

Inside, a value is hidden-major, [time, hidden, batch], so that the weight is the left operand of the
product of a step; or batch-major, where a training graph is faster so (`recurrent_layouts`). A Scan goes through time in
either direction, so nothing is reversed.

Where `sequence_lens` ends a sequence, its factors are such that a step hands the cotangents on as they are.
What is not common (peepholes, clip, other activations, ...) is differentiated by its definition in `recurrent_layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.definition import gradient_through
from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.recurrent_forward import gru_forward, lstm_forward, offer_forms, rnn_forward
from orttrainer.differentiate.rules.recurrent_gates import Stored, as_stored, from_order, join_gates, split_gates
from orttrainer.differentiate.rules.recurrent_layers import (
    directions_of,
    gru_layer,
    is_special,
    lstm_layer,
    rnn_layer,
    scan,
)
from orttrainer.differentiate.rules.recurrent_layouts import HIDDEN_MAJOR, Layout, rows_of
from orttrainer.differentiate.rules.tools import attribute, join, operand, output, positions, shaped, zeros
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.gradient_marks import DOMAIN as MARKS

INITIAL_H, INITIAL_C = 5, 6  # inputs


@vjp("LSTM")
def lstm(op, node, dy, dy_h=None, dy_c=None):
    """[i o f g] = [sig sig sig tanh](W X + R H' + B),  C = f C' + i g,  H = o tanh(C), at each time, from H' and C'.

    dC = dH o (1 - tanh(C)^2) + dC f (of the next time),  dH = dY + R^T dZ (of the next time),
    dZ = [dC g i(1-i); dH tanh(C) o(1-o); dC C' f(1-f); dC i (1-g^2)],  where i g, o tanh(C) and f C' are at hand,
    dW = dZ X^T,  dR = dZ H'^T,  dB = sum dZ,  dX = W^T dZ.
    """
    if is_special(node, {"sigmoid tanh tanh"}):
        return gradient_through(op, node, (dy, dy_h, dy_c), lstm_layer)
    return _per_direction(op, node, _lstm_direction, lstm_forward, dy, dy_h, dy_c)


@vjp("GRU")
def gru(op, node, dy, dy_h=None):
    """[z r] = sig(W X + R H' + B),  n = tanh(Wn X + U + b),  H = n + z (H' - n), at each time, from H'.

    U = r (Rn H' + c) with linear_before_reset, else Rn (r H') + c. With N = dH (1-z)(1-n^2), Z = dH (H'-n) z(1-z):
    linear_before_reset:  S = N (Rn H' + c) r(1-r),  dH' = dH z + [Rz; Rr; Rn]^T [Z; S; N r]
    else, with q = Rn^T N:  S = q H' r(1-r),         dH' = dH z + q r + [Rz; Rr]^T [Z; S]
    dW = [Z; S; N] X^T,  dX = W^T [Z; S; N], and dR likewise from what R is multiplied by.
    """
    if is_special(node, {"sigmoid tanh"}):
        return gradient_through(op, node, (dy, dy_h), gru_layer)
    reset = {"linear_before_reset": attribute(node, "linear_before_reset", 0) == 1}
    rule, forward = (functools.partial(function, **reset) for function in (_gru_direction, gru_forward))
    return _per_direction(op, node, rule, forward, dy, dy_h)


@vjp("RNN")
def rnn(op, node, dy, dy_h=None):
    """H = f(W X + R H' + B) at each time  ->  dZ = dH f'(H),  dH' = R^T dZ,  dW = dZ X^T,  dR = dZ H'^T,  dX = W^T dZ."""
    if is_special(node, {"tanh", "relu"}):
        return gradient_through(op, node, (dy, dy_h), rnn_layer)
    return _per_direction(op, node, _rnn_direction, rnn_forward, dy, dy_h)


# -- one direction of each --------------------------------------------------------------------


@dataclass
class Direction:
    """One direction of a node: its share of the inputs and cotangents, without the axis of directions.

    `x`, `y`, `before` (the hidden state that each time starts from): [time, batch, features]. The others lie as `layout`
    says, of all times (`dy`, `x_here`, `before_here`) or of one. `valid` is 1 inside a sequence, 0 behind its end.
    """

    layout: Layout
    x: ir.Value
    y: ir.Value
    before: ir.Value
    x_here: ir.Value
    before_here: ir.Value
    w: ir.Value  # [gates, input]
    r: ir.Value  # [gates, hidden]
    w_bias: ir.Value | None
    r_bias: ir.Value | None
    initial_h: ir.Value
    initial_c: ir.Value
    dy: ir.Value | None
    dh: ir.Value
    dc: ir.Value | None
    valid: ir.Value | None  # of all times
    filled: ir.Value | None  # 0 where the length is 0
    order: tuple[int, ...]  # of the gates in `w`, `r` and what comes of them: order[k] is ONNX's number of the k-th
    reverse: bool
    activations: str


@dataclass
class Cotangents:
    """`w_gates` and `r_gates`: cotangents of W X + b and of R H' + c, of all times; `dh`, `dc`: of the states.

    `reset`: what the last third of R was multiplied by, where that is not the hidden state, [time, batch, hidden].
    `again`: what the forward computed too, in the order in which `recurrent_forward` keeps it.
    """

    w_gates: ir.Value
    r_gates: ir.Value
    dh: ir.Value
    dc: ir.Value | None = None
    reset: ir.Value | None = None
    again: tuple[ir.Value, ...] = ()


def _lstm_direction(op, d: Direction) -> Cotangents:
    bias, axis = None if d.w_bias is None else op.Add(d.w_bias, d.r_bias), d.layout.axis
    gates = d.layout.products(op, [(d.w, d.x_here), (d.r, d.before_here)], bias)
    i, o, f, g = split_gates(op, gates, d.order, axis)
    i, o, f, g = op.Sigmoid(i), op.Sigmoid(o), op.Sigmoid(f), op.Tanh(g)
    new = op.Mul(i, g)
    keep, added = (f, new) if d.valid is None else (_or_one(op, f, d.valid), op.Mul(new, d.valid))

    def cell(op, states, inputs):
        (c,), (keep, added) = states, inputs
        old = op.Mul(keep, c)
        return [op.Add(old, added)], [old]

    _, (old,) = scan(op, cell, [d.initial_c], [keep, added], d.reverse)  # f C', and what nobody uses behind the end
    tanh_c = op.Tanh(op.Add(old, added))
    h = op.Mul(o, tanh_c)
    into_c = op.Sub(o, op.Mul(h, tanh_c))
    factors = (
        op.Mul(new, op.Sub(1.0, i)), op.Mul(h, op.Sub(1.0, o)), op.Mul(old, op.Sub(1.0, f)), op.Sub(i, op.Mul(new, g)),
    )  # fmt: skip
    factors = join_gates(op, factors, d.order, axis)
    if d.valid is not None:
        into_c, factors = op.Mul(into_c, d.valid), op.Mul(factors, d.valid)
    r_t = d.layout.turned(op, d.r)

    def step(op, states, inputs):
        dh, dc, (into_c, factors, keep, past, dy) = *states, inputs
        dh = dh if dy is None else op.Add(dh, dy)
        dc = op.Add(op.Mul(dh, into_c), dc)
        dz = op.Mul(join_gates(op, (dc, dh, dc, dc), d.order, axis), factors)
        past = None if past is None else op.Mul(dh, past)
        return [d.layout.product_of_turned(op, r_t, dz, past), op.Mul(dc, keep)], [dz]

    inputs = [into_c, factors, keep, _past(op, d), d.dy]
    (dh, dc), (dz,) = scan(op, step, [d.dh, d.dc], inputs, not d.reverse)
    return Cotangents(dz, dz, dh, dc, again=(i, o, f, g, tanh_c, old, h))


def _gru_direction(op, d: Direction, linear_before_reset: bool) -> Cotangents:
    layout, axis, reset = d.layout, d.layout.axis, None
    w_z, w_r, w_n = split_gates(op, layout.products(op, [(d.w, d.x_here)], d.w_bias), d.order, axis)
    if linear_before_reset:
        r_z, r_r, u = split_gates(op, layout.products(op, [(d.r, d.before_here)], d.r_bias), d.order, axis)
        z, r = op.Sigmoid(op.Add(w_z, r_z)), op.Sigmoid(op.Add(w_r, r_r))
        n = op.Tanh(op.Add(w_n, op.Mul(r, u)))
    else:
        rows = op.Split(d.r, axis=0, num_outputs=3, outputs=3)
        biases = [None] * 3 if d.r_bias is None else op.Split(d.r_bias, axis=0, num_outputs=3, outputs=3)
        z, r = (
            op.Sigmoid(op.Add(w, layout.products(op, [(row, d.before_here)], bias)))
            for w, row, bias in zip((w_z, w_r), rows, biases)
        )  # fmt: skip
        reset_here = op.Mul(r, d.before_here)
        reset = layout.of_times(op, reset_here)
        n = op.Tanh(op.Add(w_n, layout.products(op, [(rows[2], reset_here)], biases[2])))
    old, rest_of_z = op.Mul(z, op.Sub(d.before_here, n)), op.Sub(1.0, z)
    into_n, into_z = op.Mul(rest_of_z, _one_minus_square(op, n)), op.Mul(old, rest_of_z)
    keep, slope_r = z, _slope(op, r)
    if d.valid is not None:
        keep, into_n, into_z = _or_one(op, z, d.valid), op.Mul(into_n, d.valid), op.Mul(into_z, d.valid)
    if linear_before_reset:
        into_r = op.Mul(into_n, op.Mul(u, slope_r))
        factors = join_gates(op, (into_z, into_r, op.Mul(into_n, r)), d.order, axis)
        r_t = layout.turned(op, d.r)

        def step(op, states, inputs):
            (dh,), (factors, keep, dy) = states, inputs
            dh = dh if dy is None else op.Add(dh, dy)
            gates = op.Mul(op.Concat(dh, dh, dh, axis=axis), factors)
            return [layout.product_of_turned(op, r_t, gates, op.Mul(dh, keep))], [gates, dh]

        (dh,), (gates, dh_all) = scan(op, step, [d.dh], [factors, keep, d.dy], not d.reverse)
        dz, dr, _ = split_gates(op, gates, d.order, axis)
        w_gates = join_gates(op, (dz, dr, op.Mul(dh_all, into_n)), d.order, axis)
        return Cotangents(w_gates, gates, dh, again=(z, r, n, old, u))

    into_r = op.Mul(d.before_here, slope_r)
    two, r_n_t = layout.turned(op, op.Concat(*rows[:2], axis=0)), layout.turned(op, rows[2])

    def step_of_reset(op, states, inputs):
        (dh,), (into_z, into_r, into_n, r, keep, dy) = states, inputs
        dh = dh if dy is None else op.Add(dh, dy)
        dn = op.Mul(dh, into_n)
        q = layout.product_of_turned(op, r_n_t, dn)
        dz, dr = op.Mul(dh, into_z), op.Mul(q, into_r)
        rest = op.Add(op.Mul(dh, keep), op.Mul(q, r))
        dh = layout.product_of_turned(op, two, op.Concat(dz, dr, axis=axis), rest)
        return [dh], [op.Concat(dz, dr, dn, axis=axis)]

    (dh,), (gates,) = scan(op, step_of_reset, [d.dh], [into_z, into_r, into_n, r, keep, d.dy], not d.reverse)
    return Cotangents(gates, gates, dh, reset=reset, again=(z, r, n, old))


def _rnn_direction(op, d: Direction) -> Cotangents:
    h = d.layout.of_times(op, d.y)
    if d.activations == "relu":
        slope = op.cast_as(op.Greater(h, 0.0), h)  # 0 at 0
    else:
        slope = _one_minus_square(op, h)
    slope = _times(op, slope, d.valid)
    r_t = d.layout.turned(op, d.r)

    def step(op, states, inputs):
        (dh,), (slope, past, dy) = states, inputs
        dh = dh if dy is None else op.Add(dh, dy)
        dz = op.Mul(dh, slope)
        return [d.layout.product_of_turned(op, r_t, dz, None if past is None else op.Mul(dh, past))], [dz]

    (dh,), (dz,) = scan(op, step, [d.dh], [slope, _past(op, d), d.dy], not d.reverse)
    return Cotangents(dz, dz, dh)


# -- what is common ---------------------------------------------------------------------------


@dataclass
class _Layer:
    """A node and the cotangents of its outputs.

    `shares`: by name, of each direction, without the axis of directions; last its weights as they are `Stored`, whose gates
    are in `order`. `mask`: whether a time is inside a sequence, [time, batch]; `filled`: whether there is any, [batch].
    """

    node: ir.Node
    shares: dict[str, list[ir.Value | None]]
    order: tuple[int, ...]
    mask: ir.Value | None
    filled: ir.Value | None

    def cotangents(self, op: Builder, rule: Callable, layout: Layout) -> tuple[list[ir.Value | None], list]:
        """Those of all inputs, of `rule` for each direction; and each `Direction` with what was computed again for it."""
        node, order, found, written, dx = self.node, self.order, [], [], None
        x, w, r, bias, _, h0, c0 = [*node.inputs, *[None] * 4][:7]
        x = _lasting(op, x)
        valid, filled = (
            None if each is None else op.cast_as(layout.of_batch(op, each), x) for each in (self.mask, self.filled)
        )
        x_here, x_rows, no_state = layout.of_times(op, x), rows_of(op, x), _no_state(op, node, layout)
        for k, (reverse, activations) in enumerate(directions_of(node)):
            y, dy, h0_k, c0_k, dy_h_k, dy_c_k, (w_k, r_k, biases) = (share[k] for share in self.shares.values())
            before = _before(op, y, h0_k, reverse, self.mask)
            biases = [None, None] if biases is None else [layout.of_bias(op, b) for b in biases]
            dy = None if dy is None else _times(op, layout.of_times(op, dy), valid)
            initial_h, initial_c, dh, dc = (
                no_state if s is None else layout.of_state(op, s) for s in (h0_k, c0_k, dy_h_k, dy_c_k)
            )
            dh, dc = _times(op, dh, filled), _times(op, dc, filled)
            d = Direction(
                layout, x, y, before, x_here, layout.of_times(op, before), w_k, r_k, *biases, initial_h, initial_c,
                dy, dh, dc, valid, filled, order, reverse, activations,
            )  # fmt: skip
            result = rule(op, d)
            written.append((d, result.again))
            w_gates = layout.matrix(op, result.w_gates)
            r_gates = w_gates if result.r_gates is result.w_gates else layout.matrix(op, result.r_gates)
            dx_k = layout.into_input(op, w_k, w_gates, x)
            dx = dx_k if dx is None else op.Add(dx, dx_k)
            dw = layout.into_weight(op, w_gates, x_rows)
            w_sum = layout.sums(op, w_gates)
            r_sum = w_sum if r_gates is w_gates else layout.sums(op, r_gates)
            found.append(
                {
                    "w": from_order(op, shaped(dw, w_k), order),
                    "r": from_order(op, shaped(_dr(op, layout, r_gates, before, result.reset), r_k), order),
                    "bias": op.Concat(from_order(op, w_sum, order), from_order(op, r_sum, order), axis=0),
                    "h": layout.of_state(op, result.dh),
                    "c": None if result.dc is None else layout.of_state(op, result.dc),
                }
            )

        def stacked(name: str, like: ir.Value | None) -> ir.Value | None:
            if like is None:
                return None
            parts = [op.Unsqueeze(part[name], [0]) for part in found]
            return shaped(parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0), like)

        states = stacked("h", h0), stacked("c", c0)
        cotangents = [shaped(dx, x), stacked("w", w), stacked("r", r), stacked("bias", bias), None, *states]
        return cotangents[: len(node.inputs)], written


def _per_direction(op, node, rule, forward, dy, dy_h, dy_c=None) -> list[ir.Value | None]:
    """The cotangents of all inputs, of `rule` for each direction; `forward` keeps what `rule` computes again."""
    x, w, r = node.inputs[:3]
    bias, lengths, h0, c0 = (operand(node, index) for index in (3, 4, INITIAL_H, INITIAL_C))
    count = len(directions_of(node))
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[node.op_type]
    stored, order = None, tuple(range(gates))
    if node.op_type == "LSTM" or attribute(node, "linear_before_reset", 0):
        stored, order = as_stored(w, r, bias, gates, count) or (stored, order)
    mask = filled = None
    if lengths is not None:
        filled = op.Greater(lengths, 0)  # ORT's last states of no time are 0
        mask = op.Less(op.Unsqueeze(positions(op, op.dim(x, 0)), [1]), op.Cast(lengths, to=int(ir.DataType.INT64)))
    shares = {
        name: [None] * count if value is None else _shares(op, value, count, axis)
        for name, value, axis in (
            ("y", output(op, node, 0), 1), ("dy", dy, 1), ("h0", h0, 0), ("c0", c0, 0), ("dy_h", dy_h, 0), ("dy_c", dy_c, 0),
        )
    }  # fmt: skip
    if stored is None:
        biases = [None] * count if bias is None else _shares(op, bias, count, 0)
        biases = [b if b is None else op.Split(b, axis=0, num_outputs=2, outputs=2) for b in biases]
        stored = map(Stored, _shares(op, w, count, 0), _shares(op, r, count, 0), biases)
    shares["weights"] = [_all_lasting(op, weights) for weights in stored]
    layer = _Layer(node, shares, order, mask, filled)
    cotangents, written = layer.cotangents(op, rule, HIDDEN_MAJOR)
    offer_forms(op, node, forward, written, cotangents, functools.partial(layer.cotangents, rule=rule))
    return cotangents


def _lasting(op, value: ir.Value) -> ir.Value:
    """By a node that is there when a form that is offered is written: marks of gradients are gone by then."""
    made_by = value.producer()
    return op.Identity(value) if made_by is not None and made_by.domain == MARKS else value


def _all_lasting(op, weights: Stored) -> Stored:
    biases = None if weights.biases is None else tuple(_lasting(op, bias) for bias in weights.biases)
    return Stored(_lasting(op, weights.w), _lasting(op, weights.r), biases)


def _no_state(op, node: ir.Node, layout: Layout) -> ir.Value:
    """Zeros, for a state that is not given."""
    x, r = node.inputs[0], node.inputs[2]
    hidden = attribute(node, "hidden_size", None) or op.dim(r, 2)
    none = zeros(op, join(op, *layout.of_sizes(hidden, op.dim(x, 1))), x.dtype)
    if isinstance(hidden, int) and x.shape is not None:
        none.shape = ir.Shape(layout.of_sizes(hidden, x.shape[1]))
    return none


def _shares(op, value: ir.Value, count: int, axis: int) -> list[ir.Value]:
    """One value for each direction, without the axis of directions."""
    parts = [value] if count == 1 else op.Split(value, axis=axis, num_outputs=count, outputs=count)
    return [op.Squeeze(part, [axis]) for part in parts]


def _before(op, y: ir.Value, initial: ir.Value | None, reverse: bool, mask: ir.Value | None) -> ir.Value:
    """The hidden state that each time starts from, [time, batch, hidden]."""
    if initial is None:
        initial = zeros(op, join(op, 1, op.dim(y, 1), op.dim(y, 2)), y.dtype)
    else:
        initial = op.Unsqueeze(initial, [0])
    if not reverse:
        return shaped(op.Concat(initial, op.Slice(y, [0], [-1], [0]), axis=0), y)
    after = op.Slice(y, [1], [np.iinfo(np.int64).max], [0])
    before = shaped(op.Concat(after, initial, axis=0), y)
    if mask is None:
        return before
    last = op.Expand(np.zeros(1, bool), join(op, 1, op.dim(y, 1)))
    goes_on = op.Concat(op.Slice(mask, [1], [np.iinfo(np.int64).max], [0]), last, axis=0)
    return shaped(op.Where(op.Unsqueeze(goes_on, [2]), before, initial), y)


def _dr(op, layout: Layout, gates: ir.Value, before: ir.Value, reset: ir.Value | None) -> ir.Value:
    """dZ H'^T, where the last third of the gates may have had another operand than H'."""
    if reset is None:
        return layout.into_weight(op, gates, rows_of(op, before))
    z, r, n = op.Split(gates, axis=layout.gates, num_outputs=3, outputs=3)
    first = layout.into_weight(op, op.Concat(z, r, axis=layout.gates), rows_of(op, before))
    return op.Concat(first, layout.into_weight(op, n, rows_of(op, reset)), axis=0)


def _times(op, value: ir.Value, factor: ir.Value | None) -> ir.Value | None:
    return value if factor is None else op.Mul(value, factor)


def _past(op, d: Direction) -> ir.Value | None:
    """1 behind the end of a sequence, 0 inside."""
    return None if d.valid is None else op.Sub(1.0, d.valid)


def _or_one(op, value: ir.Value, valid: ir.Value) -> ir.Value:
    """`value` inside a sequence, 1 behind its end."""
    return op.Add(op.Mul(value, valid), op.Sub(1.0, valid))


def _slope(op, s: ir.Value) -> ir.Value:
    return op.Mul(s, op.Sub(1.0, s))


def _one_minus_square(op, t: ir.Value) -> ir.Value:
    return op.Sub(1.0, op.Mul(t, t))
