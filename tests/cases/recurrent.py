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
         outputs=None, options=None, opset=18, hidden=4, **attributes):  # fmt: skip
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * hidden
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


def special(kind, name, direction="forward", shape=(4, 3, 2), extra=(), lengths=None, **attributes):
    """With biases and initial states, and `extra` inputs; compared with no other layer than the reference."""
    hidden, gates = 3, {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * 3
    count = 1 + (direction == "bidirectional")
    by_batch = attributes.get("layout")
    batch = shape[0] if by_batch else shape[1]
    states = [(batch, count, hidden) if by_batch else (count, batch, hidden)] * (2 if kind == "LSTM" else 1)
    return Case(
        kind, shape, (count, gates, 2), (count, gates, hidden), (count, 2 * gates), lengths, *states, *extra,
        low=-1.0, high=1.0, outputs=1 + len(states), name=f"special-{name}", hidden_size=hidden, direction=direction,
        runtime=not by_batch, **attributes,
    )  # fmt: skip


def activation_cases():
    for name, alpha, beta in [
        ("Affine", 0.5, 0.25), ("LeakyRelu", 0.25, None), ("ThresholdedRelu", 0.25, None), ("ScaledTanh", 0.75, 0.5),
        ("HardSigmoid", 0.25, 0.5), ("Elu", 0.5, None), ("Softsign", None, None), ("Softplus", None, None),
    ]:  # fmt: skip
        given = {"activation_alpha": [alpha]} if alpha else {}
        given |= {"activation_beta": [beta]} if beta else {}
        yield special("RNN", name, activations=[name], **given)


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
    *activation_cases(),
    *(special(kind, f"clip-{direction}", direction, clip=0.625, **RESET[kind])
      for kind in TORCH for direction in ("forward", "reverse", "bidirectional")),
    *(special(kind, "clip-lengths", "bidirectional", clip=0.5, lengths=np.array([4, 0, 2], np.int32)) for kind in TORCH),
    *(special(kind, "by-batch", "bidirectional", layout=1, **RESET[kind]) for kind in TORCH),
    special("LSTM", "by-batch-peepholes", layout=1, extra=[(1, 9)]),
    *(special("LSTM", f"peepholes-{direction}", direction, extra=[(count, 9)])
      for direction, count in (("forward", 1), ("reverse", 1), ("bidirectional", 2))),
    special("LSTM", "peepholes-lengths", extra=[(1, 9)], lengths=np.array([4, 1, 2], np.int32)),
    special("LSTM", "coupled", input_forget=1),
    special("LSTM", "coupled-peepholes-clip", "reverse", extra=[(1, 9)], input_forget=1, clip=0.5),
    special("LSTM", "activations", activations=["HardSigmoid", "LeakyRelu", "ScaledTanh"],
            activation_alpha=[0.25, 0.375, 0.5], activation_beta=[0.5, 0.75]),
    special("LSTM", "activations-of-two", "bidirectional", activation_alpha=[0.25],
            activations=["Sigmoid", "Tanh", "Tanh", "Sigmoid", "Elu", "Softsign"]),
    special("GRU", "activations", activations=["HardSigmoid", "Softsign"], activation_alpha=[0.25],
            activation_beta=[0.375]),
    special("GRU", "activations-of-two", "bidirectional", activations=["Sigmoid", "Tanh", "Sigmoid", "Softsign"],
            linear_before_reset=1),
    Case("LSTM", (4, 3, 2), (1, 12, 2), (1, 12, 3), None, None, None, None, (1, 9), low=-1.0, high=1.0, hidden_size=3,
         name="special-bare"),
    Case("GRU", (4, 3, 2), (1, 9, 2), (1, 9, 3), low=-1.0, high=1.0, hidden_size=3, clip=0.875, name="special-bare"),
]
# fmt: on
