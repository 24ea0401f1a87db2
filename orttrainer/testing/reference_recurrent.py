"""LSTM, GRU and RNN with `sequence_lens` and every activation that has a gradient, and Scan in both directions."""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_scan import Scan as OnnxScan


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class _Recurrent(OpRun):
    """One sequence of the batch and one time after the other; states are tuples of [hidden] vectors."""

    op_domain = ""
    states = 1

    def _run(self, x, w, r, b=None, sequence_lens=None, *initial, direction=None, activations=None, **attributes):
        count, hidden = w.shape[0], r.shape[-1]
        time, batch = x.shape[:2]
        b = np.zeros((count, 2 * w.shape[1]), x.dtype) if b is None else b
        initial = [None if k >= len(initial) else initial[k] for k in range(self.states)]
        initial = [np.zeros((count, batch, hidden), x.dtype) if s is None else s for s in initial]
        y, last = np.zeros((time, count, batch, hidden), x.dtype), [np.zeros_like(s) for s in initial]
        for d, n in np.ndindex(count, batch):
            state = tuple(s[d, n] for s in initial)
            times = range(time if sequence_lens is None else int(sequence_lens[n]))
            reverse = direction == "reverse" or d == 1
            for t in reversed(times) if reverse else times:
                w_bias, r_bias = np.split(b[d], 2)
                state = self._step(w[d] @ x[t, n] + w_bias, r[d], r_bias, *state, d, activations, attributes)
                y[t, d, n] = state[0]
            for s, value in zip(last, state if times else ()):  # ONNX Runtime's last states of no time are 0
                s[d, n] = value
        return tuple([y, *last][: len(self.onnx_node.output)])


class LSTM(_Recurrent):
    """Gates i, o, f, c."""

    states = 2

    def _step(self, wx, r, r_bias, h, c, d, activations, attributes):
        i, o, f, g = np.split(wx + r @ h + r_bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c


class GRU(_Recurrent):
    """Gates z, r, h."""

    def _step(self, wx, r, r_bias, h, d, activations, attributes):
        size = len(h)
        z, reset = np.split(sigmoid(wx[: 2 * size] + r[: 2 * size] @ h + r_bias[: 2 * size]), 2)
        rows, bias = r[2 * size :], r_bias[2 * size :]
        inner = reset * (rows @ h + bias) if attributes["linear_before_reset"] else rows @ (reset * h) + bias
        return ((1 - z) * np.tanh(wx[2 * size :] + inner) + z * h,)


class RNN(_Recurrent):
    """Tanh or Relu."""

    def _step(self, wx, r, r_bias, h, d, activations, attributes):
        z = wx + r @ h + r_bias
        return (np.maximum(z, 0) if activations and activations[d] == "Relu" else np.tanh(z),)


class Scan(OnnxScan):
    """Scan along axis 0 in either direction; ONNX's reference evaluator knows the first only."""

    op_domain = ""

    def __init__(self, onnx_node, run_params):
        OpRun.__init__(self, onnx_node, run_params)
        self.input_names, self.output_names = self.body.input_names, self.body.output_names

    def _run(self, *args, context=None, num_scan_inputs=None, bindings=None, **attributes):
        count = len(args) - num_scan_inputs
        state, scanned = list(args[:count]), args[count:]
        reverse_inputs, reverse_outputs = (
            attributes.get(f"scan_{kind}_directions") or [0] * 99 for kind in ("input", "output")
        )
        assert not any(sum(attributes.get(f"scan_{kind}_axes") or [0]) for kind in ("input", "output"))
        scanned = [x[::-1] if flip else x for x, flip in zip(scanned, reverse_inputs)]
        steps = []
        for slices in zip(*scanned):
            values = self._run_body((context or {}) | dict(zip(self.input_names, [*state, *slices])), bindings=bindings)
            state, results = list(values[:count]), values[count:]
            steps.append(results)
        outputs = [np.stack(results) for results in zip(*steps)]
        return tuple(state + [y[::-1] if flip else y for y, flip in zip(outputs, reverse_outputs)])


OPS = (GRU, LSTM, RNN, Scan)
