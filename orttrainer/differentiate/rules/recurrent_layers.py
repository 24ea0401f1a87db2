"""LSTM, GRU and RNN with everything that ONNX gives them, by their definitions: a Scan a direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from orttrainer.differentiate.rules.named_activation import ACTIVATIONS, activated
from orttrainer.differentiate.rules.tools import attribute, join, operand, positions, zeros
from orttrainer.graph.builder import Builder

INITIAL_H, INITIAL_C, PEEPHOLES = 5, 6, 7  # inputs

# What ONNX and ONNX Runtime agree on; of others (ThresholdedRelu, Affine, ScaledTanh) the parameters have to be given.
DEFAULT_PARAMETERS = {"leakyrelu": (0.01, None), "elu": (1.0, None), "hardsigmoid": (0.2, 0.5)}


def is_special(node: ir.Node, common: set[str]) -> bool:
    """Whether a node has more than weights, biases, lengths, states and one of the `common` sets of activations."""
    if any(names and names not in common for _, names in directions_of(node)) or operand(node, PEEPHOLES) is not None:
        return True
    return attribute(node, "clip", None) is not None or any(attribute(node, k, 0) for k in ("layout", "input_forget"))


def directions_of(node: ir.Node) -> list[tuple[bool, str]]:
    """For each direction, whether it goes from the last time to the first, and its activations in lower case."""
    reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[
        attribute(node, "direction", "forward")
    ]
    names = attribute(node, "activations", ())
    size = len(names) // len(reverse)
    return [(way, " ".join(names[k * size : (k + 1) * size]).lower()) for k, way in enumerate(reverse)]


def lstm_layer(op: Builder, node: ir.Node):
    """[i o f g] = [s s s a](W X + R H' + B + P C),  C = f C' + i g,  H = o b(C), where i, f see C' and o sees C."""

    def step(op, states, gates, p, activations):
        (_, c), (sigmoid, tanh, tanh_c) = states, activations
        i, o, f, g = op.Split(gates, axis=1, num_outputs=4, outputs=4)
        p_i, p_o, p_f = (None,) * 3 if p is None else op.Split(p, axis=0, num_outputs=3, outputs=3)
        i = sigmoid(op, _plus_product(op, i, p_i, c))
        coupled = attribute(node, "input_forget", 0)
        f = op.Sub(op.scalar(1.0, i), i) if coupled else sigmoid(op, _plus_product(op, f, p_f, c))
        c = op.Add(op.Mul(f, c), op.Mul(i, tanh(op, g)))
        return op.Mul(sigmoid(op, _plus_product(op, o, p_o, c)), tanh_c(op, c)), c

    return _layer(op, node, step, "Sigmoid Tanh Tanh", states=2)


def gru_layer(op: Builder, node: ir.Node):
    """[z r] = s(W X + R H' + B),  n = a(Wn X + U + b),  H = (1 - z) n + z H',  U = r (Rn H' + c) or Rn (r H') + c."""
    linear_before_reset = attribute(node, "linear_before_reset", 0)

    def step(op, states, gates, r, activations):
        (h,), (sigmoid, tanh) = states, activations
        w_gates, (r_t, r_bias) = gates, r
        w_z, w_r, w_n = op.Split(w_gates, axis=1, num_outputs=3, outputs=3)
        rows = op.Split(r_t, axis=1, num_outputs=3, outputs=3)
        biases = op.Split(r_bias, axis=0, num_outputs=3, outputs=3)
        z, reset = (
            sigmoid(op, op.Add(w, op.Add(op.MatMul(h, row), bias))) for w, row, bias in zip((w_z, w_r), rows, biases)
        )
        if linear_before_reset:
            u = op.Mul(reset, op.Add(op.MatMul(h, rows[2]), biases[2]))
        else:
            u = op.Add(op.MatMul(op.Mul(reset, h), rows[2]), biases[2])
        n = tanh(op, op.Add(w_n, u))
        return (op.Add(op.Mul(op.Sub(op.scalar(1.0, z), z), n), op.Mul(z, h)),)

    return _layer(op, node, step, "Sigmoid Tanh", states=1, gates_apart=True)


def rnn_layer(op: Builder, node: ir.Node):
    """H = f(W X + R H' + B) at each time."""
    return _layer(op, node, lambda op, states, gates, p, f: (f[0](op, gates),), "Tanh", states=1)


def _layer(op: Builder, node: ir.Node, step: Callable, defaults: str, states: int, gates_apart: bool = False):
    """All outputs of a node, of `step(op, states, gates, more, activations)` for one time of one direction.

    `gates` is W X + R H' + B and `more` are the peepholes; or, with `gates_apart`, W X + B and R^T with its bias.
    """
    x, w, r = node.inputs[:3]
    bias, lengths, *initial, p = (operand(node, k) for k in (3, 4, INITIAL_H, INITIAL_C, PEEPHOLES))
    by_batch = attribute(node, "layout", 0)
    if by_batch:
        x, *initial = (v if v is None else op.Transpose(v, perm=[1, 0, 2]) for v in (x, *initial))
    ways = directions_of(node)
    inside = filled = None
    if lengths is not None:
        ends = op.Cast(lengths, to=int(ir.DataType.INT64))
        inside = op.Less(op.Unsqueeze(positions(op, op.dim(x, 0)), [1]), ends)
        inside = op.Unsqueeze(inside, [2])  # [time, batch, 1]
        filled = op.Unsqueeze(op.Greater(lengths, 0), [1])  # ONNX Runtime's last states of no time are 0
    functions = _activations(node, defaults)
    found = []
    for k, (reverse, _) in enumerate(ways):
        w_k, r_k, bias_k, p_k = (None if v is None else _share(op, v, k, len(ways)) for v in (w, r, bias, p))
        hidden = op.dim(r_k, 1)
        first = [
            zeros(op, join(op, op.dim(x, 1), hidden), x.dtype) if v is None else _share(op, v, k, len(ways))
            for v in initial[:states]
        ]
        if bias_k is None:
            bias_k = zeros(op, op.Mul(op.dim(w_k, 0), [2]), x.dtype)
        w_bias, r_bias = op.Split(bias_k, axis=0, num_outputs=2, outputs=2)
        gates = op.Add(op.MatMul(x, op.Transpose(w_k, perm=[1, 0])), w_bias)  # [time, batch, gates]
        r_t = op.Transpose(r_k, perm=[1, 0])

        def body(op, states, inputs, r_t=r_t, r_bias=r_bias, p_k=p_k, k=k):
            gates, valid = inputs
            if gates_apart:
                more = (r_t, r_bias)
            else:
                gates, more = op.Add(gates, op.Add(op.MatMul(states[0], r_t), r_bias)), p_k
            new = step(op, states, gates, more, functions[k])
            y = new[0]
            if valid is not None:
                y = op.Where(valid, y, op.scalar(0.0, y))
                new = [op.Where(valid, after, before) for after, before in zip(new, states)]
            return list(new), [y]

        last, (y,) = scan(op, body, first, [gates, inside], reverse)
        if filled is not None:
            last = [op.Where(filled, value, op.scalar(0.0, value)) for value in last]
        found.append([op.Unsqueeze(y, [1]), *(op.Unsqueeze(value, [0]) for value in last)])
    outputs = [
        parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0 if place else 1)
        for place, parts in enumerate(zip(*found))
    ]
    if by_batch:
        perms = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
        outputs = [op.Transpose(y, perm=perm) for y, perm in zip(outputs, perms)]
    return outputs


def _activations(node: ir.Node, defaults: str) -> list[list[Callable]]:
    """For each direction its functions of (op, x). Parameters go to those that have some, in order."""
    clip = attribute(node, "clip", None)
    alphas, betas = (iter(attribute(node, f"activation_{name}", ())) for name in ("alpha", "beta"))

    def function(name: str, clipped: bool) -> Callable:
        count, _ = ACTIVATIONS.get(name, (0, None))
        given = zip(DEFAULT_PARAMETERS.get(name, (None, None)), (alphas, betas)[:count])
        parameters = [next(values, default) for default, values in given]
        return lambda op, x: activated(op, node, op.Clip(x, -clip, clip) if clipped else x, name, parameters)

    # That of the cell, the third, is not clipped.
    return [
        [
            function(name, clip is not None and place < 2)
            for place, name in enumerate((names or defaults.lower()).split())
        ]
        for _, names in directions_of(node)
    ]


def _plus_product(op, x: ir.Value, p: ir.Value | None, c: ir.Value) -> ir.Value:
    return x if p is None else op.Add(x, op.Mul(p, c))


def _share(op, value: ir.Value, k: int, count: int) -> ir.Value:
    """The part of direction `k`, without the axis of directions."""
    part = value if count == 1 else op.Slice(value, [k], [k + 1], [0])
    return op.Squeeze(part, [0])


def scan(
    op: Builder,
    step: Callable,
    states: Sequence[ir.Value],
    inputs: Sequence[ir.Value | None],
    reverse: bool,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Append a Scan along axis 0.

    Args:
        step: `step(op, states, inputs)` emits one step on a builder of the body, and returns the new states and the
            outputs of the step; it may use values from outside.
        states: the first states.
        inputs: what the steps read one slice each of; None stays None, and the first is not.
        reverse: go from the last slice to the first; outputs are in the order of the inputs all the same.

    Returns:
        The last states, and the outputs of all steps.
    """
    given = [x for x in inputs if x is not None]
    name = f"{given[0].name}/scan"
    body = ir.Graph([], [], nodes=[], opset_imports=op.graph.opset_imports, name=name)
    inner = Builder(body, name)
    inner.const = op.const  # constants are captured, so that they are there once
    for k, state in enumerate(states):
        body.inputs.append(ir.Value(name=f"{name}/state_{k}", type=state.type, shape=state.shape))
    for k, x in enumerate(given):
        shape = None if x.shape is None else ir.Shape(x.shape.dims[1:])
        body.inputs.append(ir.Value(name=f"{name}/input_{k}", type=x.type, shape=shape))
    slices = iter(body.inputs[len(states) :])
    slots = [None if x is None else next(slices) for x in inputs]
    new, results = step(inner, list(body.inputs[: len(states)]), slots)
    for value in (*new, *results):
        if value.producer() is None or value in body.outputs:  # an output is made by a node of its own
            value = inner.Identity(value)
        body.outputs.append(value)
    attributes = [
        ir.AttrGraph("body", body),
        ir.AttrInt64("num_scan_inputs", len(given)),
        ir.AttrInt64s("scan_input_directions", [int(reverse)] * len(given)),
        ir.AttrInt64s("scan_output_directions", [int(reverse)] * len(results)),
    ]
    node = ir.Node("", "Scan", [*states, *given], attributes, num_outputs=len(new) + len(results), name=name)
    op.graph.append(node)
    time = None if given[0].shape is None else given[0].shape.dims[0]
    for k, (value, inside) in enumerate(zip(node.outputs, body.outputs)):
        value.name, value.type, value.shape = f"{name}:{k}", inside.type, None
        if k < len(states):
            value.shape = states[k].shape
        elif inside.shape is not None:
            value.shape = ir.Shape([time, *inside.shape.dims])
    return list(node.outputs[: len(new)]), list(node.outputs[len(new) :])
