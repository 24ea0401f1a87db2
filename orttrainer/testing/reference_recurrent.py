"""LSTM, GRU and RNN with `sequence_lens` and every option."""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun

from orttrainer.testing.reference_functions import named_activation

PARAMETERS = {"affine": 2, "elu": 1, "hardsigmoid": 2, "leakyrelu": 1, "scaledtanh": 2, "thresholdedrelu": 1}
DEFAULTS = {"leakyrelu": [0.01], "elu": [1.0], "hardsigmoid": [0.2, 0.5]}


class _Recurrent(OpRun):
    """One sequence of the batch and one time after the other; states are tuples of [hidden] vectors."""

    op_domain = ""
    states = 1
    defaults: tuple = ()

    def _run(self, x, w, r, b=None, sequence_lens=None, h=None, c=None, p=None, direction=None, layout=0, **attributes):
        initial = [h, c][: self.states]
        if layout:
            x, *initial = (v if v is None else v.swapaxes(0, 1) for v in (x, *initial))
        count, hidden = w.shape[0], r.shape[-1]
        time, batch = x.shape[:2]
        b = np.zeros((count, 2 * w.shape[1]), x.dtype) if b is None else b
        initial = [np.zeros((count, batch, hidden), x.dtype) if s is None else s for s in initial]
        y, last = np.zeros((time, count, batch, hidden), x.dtype), [np.zeros_like(s) for s in initial]
        functions = self._functions(count, attributes)
        for d, n in np.ndindex(count, batch):
            state = tuple(s[d, n] for s in initial)
            times = range(time if sequence_lens is None else int(sequence_lens[n]))
            reverse = direction == "reverse" or d == 1
            for t in reversed(times) if reverse else times:
                w_bias, r_bias = np.split(b[d], 2)
                more = attributes | {"p": np.zeros(3 * hidden) if p is None else p[d]}
                state = self._step(w[d] @ x[t, n] + w_bias, r[d], r_bias, *state, functions[d], more)
                y[t, d, n] = state[0]
            for s, value in zip(last, state if times else ()):  # ONNX Runtime's last states of no time are 0
                s[d, n] = value
        if layout:
            y, last = y.transpose(2, 0, 1, 3), [s.swapaxes(0, 1) for s in last]
        return tuple([y, *last][: len(self.onnx_node.output)])

    def _functions(self, count, attributes):
        """The activations of each direction; those of gates clip what they are given."""
        names = attributes.get("activations") or self.defaults * count
        alphas, betas = (list(attributes.get(f"activation_{k}") or ()) for k in ("alpha", "beta"))
        clip, size, functions = attributes.get("clip"), len(self.defaults), []
        for place, name in enumerate(names):
            given = list(DEFAULTS.get(name.lower(), [None, None]))
            for k, values in enumerate([alphas, betas][: PARAMETERS.get(name.lower(), 0)]):
                if values:
                    given[k] = values.pop(0)
            bound = np.inf if clip is None or place % size == 2 else clip
            functions.append(lambda x, n=name, g=given, b=bound: named_activation(n, np.clip(x, -b, b), *g))
        return [functions[k * size : (k + 1) * size] for k in range(count)]


class LSTM(_Recurrent):
    """Gates i, o, f, c."""

    states = 2
    defaults = ("Sigmoid", "Tanh", "Tanh")

    def _step(self, wx, r, r_bias, h, c, functions, attributes):
        sigmoid, tanh, tanh_c = functions
        p_i, p_o, p_f = np.split(attributes["p"], 3)
        i, o, f, g = np.split(wx + r @ h + r_bias, 4)
        i = sigmoid(i + p_i * c)
        f = 1 - i if attributes.get("input_forget") else sigmoid(f + p_f * c)
        c = f * c + i * tanh(g)
        return sigmoid(o + p_o * c) * tanh_c(c), c


class GRU(_Recurrent):
    """Gates z, r, h."""

    defaults = ("Sigmoid", "Tanh")

    def _step(self, wx, r, r_bias, h, functions, attributes):
        size, (sigmoid, tanh) = len(h), functions
        z, reset = np.split(sigmoid(wx[: 2 * size] + r[: 2 * size] @ h + r_bias[: 2 * size]), 2)
        rows, bias = r[2 * size :], r_bias[2 * size :]
        inner = reset * (rows @ h + bias) if attributes["linear_before_reset"] else rows @ (reset * h) + bias
        return ((1 - z) * tanh(wx[2 * size :] + inner) + z * h,)


class RNN(_Recurrent):
    defaults = ("Tanh",)

    def _step(self, wx, r, r_bias, h, functions, attributes):
        return (functions[0](wx + r @ h + r_bias),)


OPS = (GRU, LSTM, RNN)
