import numpy as np
import torch
from torch import nn

from orttrainer.testing import Case

LENGTHS = np.array([5, 2, 3], np.int32)
TORCH = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
# torch has i f g o and r z n; ONNX has i o f g and z r n
ORDER = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}


def reference(kind, direction="forward", bias=True, lengths=None, **options):
    """torch.nn's layer as a function of the inputs that ONNX has, and with its outputs."""

    def function(x, w, r, *rest):
        rest, both = list(rest), direction == "bidirectional"
        b = rest.pop(0) if bias else None
        layer = TORCH[kind](x.shape[2], r.shape[2], bias=bias, bidirectional=both, **options).double()
        weights = {}
        for d in range(w.shape[0]):
            end = "_reverse" if d else ""
            weights |= {f"weight_ih_l0{end}": gates(w[d]), f"weight_hh_l0{end}": gates(r[d])}
            if bias:
                halves = b[d].chunk(2)
                weights |= {f"bias_ih_l0{end}": gates(halves[0]), f"bias_hh_l0{end}": gates(halves[1])}
        state = (tuple(rest) if kind == "LSTM" else rest[0]) if rest else None
        if direction == "reverse":
            x = x.flip(0)
        if lengths is not None:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
        y, last = torch.func.functional_call(layer, weights, (x, state))
        if lengths is not None:
            y, _ = nn.utils.rnn.pad_packed_sequence(y)
        if direction == "reverse":
            y = y.flip(0)
        y = y.unflatten(2, (w.shape[0], -1)).transpose(1, 2)
        return y, *(last if kind == "LSTM" else (last,))

    def gates(v):
        parts = v.chunk(len(ORDER[kind]))
        return torch.cat([parts[k] for k in ORDER[kind]])

    return function


def case(kind, name, direction="forward", bias=True, states=True, lengths=None, shape=(5, 3, 2), twin=True,
         outputs=None, options=None, opset=18, **attributes):  # fmt: skip
    hidden, gates = 4, {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * 4
    count, (_, batch, size) = 1 + (direction == "bidirectional"), shape
    initial = [(count, batch, hidden)] * (2 if kind == "LSTM" else 1) if states else []
    inputs = [shape, (count, gates, size), (count, gates, hidden)]
    if bias or lengths is not None or states:
        inputs.append((count, 2 * gates) if bias else None)
    if lengths is not None or states:
        inputs.append(lengths)
    function = reference(kind, direction, bias, lengths, **(options or {})) if twin else None
    return Case(
        kind, *inputs, *initial, low=-1.0, high=1.0, outputs=outputs or (3 if kind == "LSTM" else 2), torch=function,
        name=name, opset=opset, hidden_size=hidden, direction=direction, **attributes,
    )  # fmt: skip


RESET = {"LSTM": {}, "RNN": {}, "GRU": {"linear_before_reset": 1}}  # as PyTorch's

# fmt: off
CASES = [
    *(case(kind, direction, direction, **RESET[kind])
      for kind in TORCH for direction in ("forward", "bidirectional", "reverse")),
    *(case(kind, f"bare-{direction}", direction, bias=False, states=False, outputs=1, **RESET[kind])
      for kind in TORCH for direction in ("forward", "bidirectional")),
    *(case(kind, "no-bias", bias=False, **RESET[kind]) for kind in TORCH),
    *(case(kind, "one-time", "bidirectional", shape=(1, 3, 2), **RESET[kind]) for kind in TORCH),
    *(case(kind, "one-sequence", "bidirectional", shape=(4, 1, 2), **RESET[kind]) for kind in TORCH),
    *(case(kind, f"lengths-{direction}", direction, lengths=LENGTHS, twin=direction != "reverse", **RESET[kind])
      for kind in TORCH for direction in ("forward", "bidirectional", "reverse")),
    *(case("GRU", f"reset-before-{direction}", direction, twin=False)
      for direction in ("forward", "bidirectional", "reverse")),
    case("GRU", "reset-before-bare", bias=False, states=False, twin=False),
    case("GRU", "reset-before-lengths", "bidirectional", lengths=LENGTHS, twin=False),
    *(case(kind, f"no-length-{direction}", direction, lengths=np.array([5, 0, 3], np.int32), twin=False)
      for kind in TORCH for direction in ("forward", "reverse")),
    *(case(kind, f"lengths-{opset}", "bidirectional", lengths=LENGTHS, opset=opset, twin=False)
      for kind in TORCH for opset in (14, 22)),
    case("RNN", "relu", activations=["Relu"], options={"nonlinearity": "relu"}),
    case("RNN", "tanh-relu", "bidirectional", activations=["Tanh", "Relu"], twin=False),
    case("LSTM", "activations", activations=["Sigmoid", "Tanh", "Tanh"]),
    Case("LSTM", (5, 3, 2), (1, 16, 2), (1, 16, 4), None, None, None, (1, 3, 4), low=-1.0, high=1.0, outputs=3,
         hidden_size=4, name="only-the-cell"),
    Case("LSTM", (5, 3, 2), (1, 16, 2), (1, 16, 4), None, LENGTHS, (1, 3, 4), low=-1.0, high=1.0, outputs=3,
         hidden_size=4, direction="reverse", name="only-the-hidden-state"),
]
# fmt: on
