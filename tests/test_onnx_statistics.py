"""The running statistics of BatchNormalizations in ONNX models: buffers, wherever they stand and whatever shares them."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from bad_input import raises
from onnx_models import assert_norm_trains, make, model
from small import LR
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import ModelError

W = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
NORM = {
    "g": np.array([1, 2, 0.5, 1], np.float32),
    "b": np.array([0, 1, 0, -1], np.float32),
    "m": np.array([0.1, 0.2, -0.3, 0.4], np.float32),
    "v": np.array([0.6, 0.7, 1.5, 0.9], np.float32),
}


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count))


BATCHES = [rows(), rows(2), rows(7)]


def twin_of(mean, var, training=False) -> nn.BatchNorm1d:
    twin = nn.BatchNorm1d(4, eps=1e-5).train(training)
    twin.load_state_dict({
        "weight": torch.tensor(NORM["g"]), "bias": torch.tensor(NORM["b"]), "num_batches_tracked": torch.tensor(0),
        "running_mean": torch.tensor(mean), "running_var": torch.tensor(var),
    })  # fmt: skip
    return twin


@pytest.mark.parametrize("training", [0, 1])
@pytest.mark.parametrize("copies, statistics", [("mean = Identity (b) var = Identity (g)", "mean, var"), ("", "b, g")])
def test_statistics_that_an_exporter_made_one_with_equal_weights_are_statistics(copies, statistics, training, caplog):
    """Of a fresh BatchNorm the bias and the mean, the scale and the variance."""
    outputs = "r, new_mean, new_var" if training else "r"
    call = f"BatchNormalization <epsilon = 0.001, training_mode = {training}> (h, g, b, {statistics})"
    weights = {"W": W, "b": np.zeros(4, np.float32), "g": np.ones(4, np.float32)}
    trainer = make(model(f"{copies} h = MatMul (x, W) {outputs} = {call}", "3", 18, **weights), 3)
    mean, var = ("mean", "var") if copies else ("b_mean", "g_var")
    assert trainer.state_dict().keys() == {*weights, mean, var}
    twin = nn.BatchNorm1d(4, eps=0.001).train(bool(training))
    assert_norm_trains(trainer, twin, W, BATCHES, "W", "g", "b", mean)
    assert not caplog.text


def test_statistics_that_others_read_as_well_stay_one_with_what_those_read():
    body = (
        "h = MatMul (x, W) r, new_m, new_v = BatchNormalization <training_mode = 1> (h, g, b, m, v) seen = Identity (m)"
    )
    weights = {"W": W, "g": np.ones(4), "b": np.zeros(4), "m": np.zeros(4), "v": np.ones(4)}
    proto = model(body, "3", 18, **weights)
    proto.graph.output.append(onnx.helper.make_tensor_value_info("seen", onnx.TensorProto.FLOAT, [4]))
    desc = ModelDescription([IODescription("x", ["rows", 3])], [IODescription("loss", []), IODescription("seen", [4])])
    trainer = ORTTrainer(proto, None, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")
    assert trainer.state_dict().keys() == weights.keys()
    trainer.train_step(BATCHES[0], LR)
    mean = trainer.state_dict()["m"].clone()
    torch.testing.assert_close(trainer.train_step(BATCHES[1], LR)[1], mean)


# -- Where a BatchNormalization may stand, and what may lie before its statistics ------------------------

CALL = "BatchNormalization (h, g, b, m, v)"
TURNS = "n = Constant <value = int64 {1}> () go = Constant <value = bool {1}> ()"
PLACES = {
    "a branch": f"""t = ReduceSum <keepdims = 0> (x) low = Constant <value = float {{-1000}}> () c = Greater (t, low)
        r = If (c) <then_branch = yes () => (float[rows, 4] p) {{ p = {CALL} }}, else_branch = no () => (float[rows, 4] q) {{ q = Neg (h) }}>""",
    "a loop": f"""{TURNS} r = Loop (n, go, h) <body = turn (int64 i, bool k, float[rows, 4] a) => (bool k2, float[rows, 4] y)
        {{ k2 = Identity (k) y = {CALL.replace("(h,", "(a,")} }}>""",
    "a loop in a branch": f"""{TURNS} t = ReduceSum <keepdims = 0> (x) low = Constant <value = float {{-1000}}> () c = Greater (t, low)
        r = If (c) <then_branch = yes () => (float[rows, 4] p) {{
            p = Loop (n, go, h) <body = turn (int64 i, bool k, float[rows, 4] a) => (bool k2, float[rows, 4] y)
            {{ k2 = Identity (k) y = {CALL.replace("(h,", "(a,")} }}> }}, else_branch = no () => (float[rows, 4] q) {{ q = Neg (h) }}>""",
    "a loop that hands them on": f"""{TURNS} r, last = Loop (n, go, h, m)
        <body = turn (int64 i, bool k, float[rows, 4] a, float[4] mean) => (bool k2, float[rows, 4] y, float[4] mean2)
        {{ k2 = Identity (k) mean2 = Identity (mean) y = BatchNormalization (a, g, b, mean, v) }}>""",
}


@pytest.mark.parametrize("place", PLACES)
def test_statistics_within_bodies_are_buffers(place):
    trainer = make(model(f"h = MatMul (x, W) {PLACES[place]}", "3", 18, W=W, **NORM), 3)
    assert_norm_trains(trainer, twin_of(NORM["m"], NORM["v"]), W, BATCHES, "W", "g", "b", "m")
    torch.testing.assert_close(trainer.state_dict()["v"], torch.tensor(NORM["v"]), rtol=0, atol=0)


@pytest.mark.parametrize("place", ["a branch", "a loop", "a loop in a branch"])
def test_statistics_that_would_move_within_a_body_are_refused(place):
    """ONNX Runtime moved them in place, in evaluation as well."""
    trains = PLACES[place].replace("p = B", "p, mm, vv = B").replace("y = B", "y, mm, vv = B")
    trains = trains.replace("BatchNormalization", "BatchNormalization <training_mode = 1>")
    with raises(ModelError, "is in training form within a branch or a loop...export the model in evaluation"):
        make(model(f"h = MatMul (x, W) {trains}", "3", 18, W=W, **NORM), 3)


BETWEEN = {
    "an Identity": ("mean = Identity (m)", [4]),
    "three Identities": ("one = Identity (m) two = Identity (one) mean = Identity (two)", [4]),
    "a Sum of one": ("mean = Sum (m)", [4]),
    "a Reshape": ("flat = Constant <value_ints = [-1]> () mean = Reshape (m, flat)", [1, 4, 1]),
    "a Squeeze": ("a = Constant <value_ints = [0]> () mean = Squeeze (m, a)", [1, 4]),
}


@pytest.mark.parametrize("training", [0, 1])
@pytest.mark.parametrize("between", BETWEEN)
def test_statistics_are_buffers_whatever_lies_between(between, training):
    nodes, shape = BETWEEN[between]
    outputs = "r, new_mean, new_var" if training else "r"
    call = f"BatchNormalization <training_mode = {training}> (h, g, b, mean, v)"
    weights = {"W": W, **NORM, "m": NORM["m"].reshape(shape)}
    trainer = make(model(f"{nodes} h = MatMul (x, W) {outputs} = {call}", "3", 18, **weights), 3)
    assert trainer.state_dict().keys() == weights.keys()
    twin = twin_of(NORM["m"], NORM["v"], bool(training))
    optimized = [torch.nn.Parameter(torch.tensor(W)), *twin.parameters()]
    optimizer = torch.optim.SGD(optimized, LR.item())
    for x in BATCHES:
        optimizer.zero_grad()
        loss = twin(x @ optimized[0]).square().mean()
        torch.testing.assert_close(trainer.train_step(x, LR), loss.detach())
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(trainer.state_dict()["m"], twin.running_mean.reshape(shape))
    twin.running_var = torch.as_tensor(trainer.state_dict()["v"])  # ONNX counts the biased variance
    evaluated = twin.eval()(BATCHES[0] @ optimized[0]).square().mean().detach()
    torch.testing.assert_close(trainer.eval_step(BATCHES[0]), evaluated)


@pytest.mark.parametrize("training", [0, 1])
def test_statistics_in_half_precision_are_buffers_that_move(training):
    outputs = "r, new_mean, new_var" if training else "r"
    call = f"BatchNormalization <training_mode = {training}> (h, g, b, mean, v)"
    proto = model(f"mean = Cast <to = 1> (m) h = MatMul (x, W) {outputs} = {call}", "3", 18, W=W, **NORM)
    halves = NORM["m"].astype(np.float16)
    next(t for t in proto.graph.initializer if t.name == "m").CopyFrom(onnx.numpy_helper.from_array(halves, "m"))
    trainer = make(proto, 3)
    trainer.train_step(BATCHES[0], LR)
    batch_mean = (BATCHES[0].numpy() @ W).mean(0)
    expected = 0.9 * halves + 0.1 * batch_mean if training else halves
    np.testing.assert_allclose(trainer.state_dict()["m"].numpy(), expected.astype(np.float16), rtol=1e-3)
    trainer.eval_step(BATCHES[0])


# -- Statistics that an exporter made one with a weight that acts in other operators -----------------------


class Beside(nn.Module):
    """A layer, and a norm whose mean is zeros and whose variance is ones, as the weights of the layer are."""

    def __init__(self, layer, norm_first):
        super().__init__()
        torch.manual_seed(0)
        norm = ("norm", nn.BatchNorm1d(4, affine=False))
        self.order = dict([norm, ("layer", layer())] if norm_first else [("layer", layer()), norm])
        for name, part in self.order.items():
            self.add_module(name, part)
        self.last = nn.Linear(4, 5)

    def forward(self, x):
        for name, part in self.order.items():
            x = part(x.transpose(1, 2)).transpose(1, 2) if name == "norm" else part(x)
        return self.last(torch.tanh(x).mean(1))


class Shifted(nn.Module):
    """x and a bare parameter."""

    def __init__(self, act):
        super().__init__()
        self.zeros, self.act = nn.Parameter(torch.zeros(4)), act

    def forward(self, x):
        return self.act(x, self.zeros)


def linear():
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.bias)
    return layer


SHARED = {
    "the bias of a Linear of more dimensions": linear,
    "a LayerNorm": lambda: nn.LayerNorm(4),
    "a parameter that is added": lambda: Shifted(torch.add),
    "a parameter that is taken away": lambda: Shifted(torch.sub),
}


@pytest.mark.parametrize("opset, norm_first", [(13, False), (13, True), (17, False)])
@pytest.mark.parametrize("shared", SHARED)
def test_statistics_are_told_apart_from_weights_of_other_layers(shared, opset, norm_first, caplog):
    module = Beside(SHARED[shared], norm_first).eval()
    file = io.BytesIO()
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(
            module, (torch.randn(3, 7, 4),), file, dynamo=False, opset_version=opset, input_names=["x"],
            output_names=["output"], dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    desc = ModelDescription(
        [IODescription("x", ["batch", 7, 4]), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", []), IODescription("output", ["batch", 5])],
    )
    proto = onnx.load_from_string(file.getvalue())
    trainer = ORTTrainer(proto, F.cross_entropy, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")
    optimizer = torch.optim.SGD(module.parameters(), LR.item())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, label = torch.randn(3, 7, 4, generator=generator), torch.randint(0, 5, (3,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), label)
        torch.testing.assert_close(trainer.train_step(x, label, LR)[0], loss.detach())
        loss.backward()
        optimizer.step()
    state = trainer.state_dict()
    for name, value in module.state_dict().items():
        if name in state and name != "layer.weight":  # the exporter transposes it
            torch.testing.assert_close(state[name], value)
    assert {"norm.running_mean", "norm.running_var"} <= state.keys()
    assert "one tensor each" not in caplog.text


def test_statistics_that_forward_reads_for_something_else_stay_one():
    """As in a penalty of the statistics: what reads them there does nothing to the data."""
    body = f"h = MatMul (x, W) k = {CALL} e = Constant <value_floats = [0.1]> () f = Add (v, e) d = Sqrt (f) r = Div (k, d)"
    trainer = make(model(body, "3", 18, W=W, **NORM), 3)
    assert trainer.state_dict().keys() == {"W", *NORM}
    trainer.train_step(BATCHES[0], LR)
    for name in "mv":
        torch.testing.assert_close(trainer.state_dict()[name], torch.tensor(NORM[name]), rtol=0, atol=0)


def test_layers_whose_equal_statistics_an_exporter_made_one_have_each_their_own():
    body = """c = Identity (m) k = MatMul (x, W) h, m2, v2 = BatchNormalization <training_mode = 1> (k, g, b, m, v)
        r, m3, v3 = BatchNormalization <training_mode = 1> (h, g, b, c, u)"""
    trainer = make(model(body, "3", 18, u=NORM["v"], W=W, **NORM), 3)
    trainer.train_step(rows(), LR)
    state = trainer.state_dict()
    for name, mean in {
        "m": (rows().numpy() @ W).mean(0),
        "c": NORM["b"],
    }.items():  # what the second reads has the mean b
        expected = 0.9 * NORM["m"] + 0.1 * mean
        np.testing.assert_allclose(state[name].numpy(), expected, rtol=1e-4, atol=1e-6)
