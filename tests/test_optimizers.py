"""The update rules against the legacy kernels' published numbers, PyTorch and NumPy in float64."""

import functools
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from orttrainer.errors import OptimizerError
from orttrainer.graph import Builder
from orttrainer.optim import OPTIMIZERS, Slot, global_norm, make_optimizer

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64


# -- one update as a graph of its own ---------------------------------------------------------


class Update:
    """The graph of one update of parameters that have these shapes, and a session for it."""

    def __init__(self, optimizer, shapes, dtype=FLOAT):
        self.slots = {s.name: s for n, shape in shapes.items() for s in optimizer.slots(n, shape, dtype)}
        self.slots |= {s.name: s for s in optimizer.shared_slots}
        self.parameters = {n: _value(n, dtype, shape) for n, shape in shapes.items()}
        self.gradients = {n: _value(f"{n}_grad", dtype, shape) for n, shape in shapes.items()}
        self.state = {s.name: _value(s.name, s.dtype, s.shape) for s in self.slots.values()}
        rate, norm = _value("lr", FLOAT, (1,)), _value("norm", FLOAT, ())
        inputs = [rate, norm, *self.parameters.values(), *self.gradients.values(), *self.state.values()]
        self.graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18}, name="update")
        op = Builder(self.graph, "update")
        self.new = optimizer.update(op, rate, norm, self.parameters, self.gradients, self.state)
        self.old = self.parameters | self.state
        for name, value in self.new.items():
            assert (value.dtype, value.shape) == (self.old[name].dtype, self.old[name].shape), name
            self.graph.outputs.append(value)

    @functools.cached_property
    def session(self):
        return _session(self.graph)

    def initial_state(self):
        return {s.name: np.full(s.shape, s.initial, s.dtype.numpy()) for s in self.slots.values()}

    def __call__(self, rate, parameters, gradients, state, norm=None):
        """New parameters and state, both by name."""
        if norm is None:
            norm = math.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in gradients.values()))
        feeds = {"lr": np.float32([rate]), "norm": np.array(norm, np.float32), **parameters, **state}
        feeds |= {f"{n}_grad": g for n, g in gradients.items()}
        used = {i.name for i in self.session.get_inputs()}
        values = self.session.run(None, {n: np.asarray(v) for n, v in feeds.items() if n in used})
        new = dict(zip(self.new, values))
        return {n: new[n] for n in parameters}, {n: new[n] for n in state}

    def train(self, rate, parameters, all_gradients):
        state = self.initial_state()
        for gradients in all_gradients:
            parameters, state = self(rate, parameters, gradients, state)
        return parameters, state


def _value(name, dtype, shape):
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _session(graph):
    proto = ir.to_proto(ir.Model(graph, ir_version=9))
    onnx.checker.check_model(proto, full_check=True)
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def single(name, shape, clip=False, dtype=FLOAT, **attributes):
    return Update(make_optimizer(name, ["W"], lambda _: _keys(attributes), clip), {"W": shape}, dtype)


def _keys(attributes):
    return {key.removesuffix("_"): value for key, value in attributes.items()}  # lambda_ is lambda


# -- the legacy kernels' numbers --------------------------------------------------------------

FIRST = dict(W=[1, 2, 3], g=[4, 5, 6], m=[0.1, 0.2, 0.3], v=[0.4, 0.5, 0.6])
SECOND = dict(W=[-0.4634, 0.3584, -0.2121], g=[0.4171, 0.9485, 1.2289], m=[0, 0, 0], v=[0, 0, 0])


def golden(update, rate, count, case, norm=None):
    f32 = {key: np.array(values, np.float32) for key, values in case.items()}
    state = {"Moment_1_W": f32["m"], "Moment_2_W": f32["v"], "Update_Count": np.array([count])}
    new, state = update(rate, {"W": f32["W"]}, {"W": f32["g"]}, state, norm)
    return new["W"], state["Moment_1_W"], state["Moment_2_W"], state["Update_Count"]


def test_adam_reproduces_the_first_legacy_vector():
    w, m, v, count = golden(single("AdamOptimizer", (3,), do_bias_correction=False), 0.5, 3, FIRST)
    np.testing.assert_allclose(w, [0.6199609, 1.5305318, 2.4542853], rtol=2e-7)
    np.testing.assert_allclose(m, [0.49, 0.68, 0.87], rtol=2e-7)
    np.testing.assert_allclose(v, [0.4156, 0.5245, 0.6354], rtol=2e-7)
    assert count.tolist() == [4]


@pytest.mark.parametrize(
    "attributes, expected",
    [
        (dict(do_bias_correction=True), [-1.4634, -0.6416, -1.2121]),
        (dict(lambda_=0.01, do_bias_correction=False), [-3.6210, -2.8075, -3.3723]),
        (dict(lambda_=0.01), [-1.4587, -0.6452, -1.2099]),
        (dict(lambda_=0.01, weight_decay_mode=1, do_bias_correction=False), [-3.5894, -2.7758, -3.3406]),
        (dict(lambda_=0.01, weight_decay_mode=1), [-1.4488, -0.6352, -1.1999]),
    ],
)
def test_adam_reproduces_the_legacy_vectors_of_both_decay_modes(attributes, expected):
    w, m, v, count = golden(single("AdamOptimizer", (3,), **attributes), 1.0, 1, SECOND)
    np.testing.assert_allclose(w, expected, rtol=0, atol=1e-4)  # 4 digits, some of them cut off
    np.testing.assert_allclose(m, [0.0417, 0.0949, 0.1229], atol=6e-5)
    np.testing.assert_allclose(v, [1.7400e-4, 8.9966e-4, 1.5102e-3], atol=6e-8)
    assert count.tolist() == [2]


@pytest.mark.parametrize(
    "attributes, expected",
    [
        (dict(max_norm_clip=0.001), [0.8972168, 1.8369141, 2.7871094]),
        (dict(), [0.6199609, 1.5305318, 2.4542853]),
    ],
)
def test_adam_reproduces_the_legacy_clipping_vectors(attributes, expected):
    update = single("AdamOptimizer", (3,), clip=True, do_bias_correction=0, **attributes)
    w, *_ = golden(update, 0.5, 3, FIRST, norm=0.01)
    np.testing.assert_allclose(w, expected, rtol=5e-4)  # legacy ran the first one in float16


# -- against PyTorch and NumPy ----------------------------------------------------------------

SHAPES = {"matrix": (4, 3), "bias": (3,), "scalar": (), "empty": (0, 3), "kernel": (2, 2, 3, 3)}


def draw(shapes, steps, seed=0, scale=1.0, dtype=np.float32):
    random = np.random.default_rng(seed)

    def normal(shape):
        return np.asarray(random.normal(size=shape) * scale, dtype)

    return {n: normal(s) for n, s in shapes.items()}, [{n: normal(s) for n, s in shapes.items()} for _ in range(steps)]


def torch_train(optimizer, parameters, all_gradients):
    tensors = {n: torch.from_numpy(w.astype(np.float64)).requires_grad_() for n, w in parameters.items()}
    optimizer = optimizer(tensors)
    for gradients in all_gradients:
        for n, t in tensors.items():
            t.grad = torch.from_numpy(gradients[n].astype(np.float64))
        optimizer.step()
    return {n: t.detach().numpy() for n, t in tensors.items()}


def clipped(all_gradients, max_norm):
    result = []
    for gradients in all_gradients:
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
        result.append({n: g * (max_norm / norm if norm > max_norm else 1.0) for n, g in gradients.items()})
    return result


def assert_close(actual, expected, rtol=2e-6, atol=2e-6):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].shape == expected[name].shape
        np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, atol=atol, err_msg=name)


def test_sgd_equals_torch_over_ten_steps():
    parameters, gradients = draw(SHAPES, 10)
    actual, state = Update(make_optimizer("SGDOptimizer", SHAPES, None, True), SHAPES).train(0.1, parameters, gradients)
    assert_close(actual, torch_train(lambda t: torch.optim.SGD(t.values(), lr=0.1), parameters, gradients))
    assert state == {}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype, tolerance", [(FLOAT, 2e-6), (DOUBLE, 1e-9)])  # the learning rate is float32
def test_adam_equals_torch_adamw_over_ten_steps(decay, dtype, tolerance):
    attributes = {"alpha": 0.8, "beta": 0.99, "epsilon": 1e-6, "lambda": decay}
    parameters, gradients = draw(SHAPES, 10, dtype=dtype.numpy())
    update = Update(make_optimizer("AdamOptimizer", SHAPES, lambda _: attributes, False), SHAPES, dtype)
    rate = float(np.float32(0.05))
    actual, state = update.train(rate, parameters, gradients)

    def adamw(t):
        return torch.optim.AdamW(t.values(), lr=rate, betas=(0.8, 0.99), eps=1e-6, weight_decay=decay)

    assert_close(actual, torch_train(adamw, parameters, gradients), tolerance, tolerance)
    assert state["Update_Count"].tolist() == [11]


def test_adam_has_the_defaults_of_torch_adam():
    parameters, gradients = draw(SHAPES, 10)
    update = Update(make_optimizer("AdamOptimizer", SHAPES, None, False), SHAPES)
    actual, _ = update.train(0.01, parameters, gradients)
    assert_close(actual, torch_train(lambda t: torch.optim.Adam(t.values(), lr=0.01), parameters, gradients))


def hugging_face_adamw(x, gradients, rate, alpha, beta, epsilon, decay, correct=True):
    """transformers.AdamW, as it was until transformers 4: the decay is taken off after the step."""
    m = v = np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m = m * alpha + (1 - alpha) * g
        v = v * beta + (1 - beta) * g * g
        step = rate
        if correct:
            step = rate * math.sqrt(1 - beta**t) / (1 - alpha**t)
        x = x - step * m / (np.sqrt(v) + epsilon)
        x = x - rate * decay * x
    return x


@pytest.mark.parametrize("correct", [True, False])
def test_adam_in_mode_1_equals_hugging_face_adamw(correct):
    attributes = {"epsilon": 1e-3, "lambda": 0.1, "weight_decay_mode": 1, "do_bias_correction": correct}
    parameters, gradients = draw(SHAPES, 10)
    update = Update(make_optimizer("AdamOptimizer", SHAPES, lambda _: attributes, False), SHAPES)
    actual, _ = update.train(0.05, parameters, gradients)
    expected = {
        n: hugging_face_adamw(w.astype(np.float64), [g[n] for g in gradients], 0.05, 0.9, 0.999, 1e-3, 0.1, correct)
        for n, w in parameters.items()
    }
    assert_close(actual, expected)


def paper_lamb(
    x, gradients, rate, alpha=0.9, beta=0.999, epsilon=1e-6, decay=0.0, correct=False, low=-math.inf, high=math.inf
):
    """Algorithm 2 of the LAMB paper, phi the identity between two bounds."""
    m = v = np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m = alpha * m + (1 - alpha) * g
        v = beta * v + (1 - beta) * g**2
        m_hat, v_hat = (m / (1 - alpha**t), v / (1 - beta**t)) if correct else (m, v)
        r = m_hat / (np.sqrt(v_hat) + epsilon)
        u = r + decay * x
        x_norm, u_norm = np.linalg.norm(x.ravel()), np.linalg.norm(u.ravel())
        ratio = 1.0 if x_norm == 0 or u_norm == 0 else min(max(x_norm / u_norm, low), high)
        x = x - rate * ratio * u
    return x


@pytest.mark.parametrize("dtype, tolerance", [(FLOAT, 2e-6), (DOUBLE, 1e-12)])
@pytest.mark.parametrize(
    "attributes",
    [
        dict(),
        dict(decay=0.01),
        dict(correct=True),
        dict(decay=0.1, correct=True, alpha=0.8, beta=0.99, epsilon=1e-4),
        dict(decay=0.01, low=0.9, high=1.1),
        dict(correct=True, low=5.0),
        dict(high=0.01),
    ],
    ids=str,
)
def test_lamb_equals_the_paper_over_ten_steps(attributes, dtype, tolerance):
    legacy = {"decay": "lambda", "correct": "do_bias_correction", "low": "ratio_min", "high": "ratio_max"}
    given = {legacy.get(key, key): value for key, value in attributes.items()}
    parameters, gradients = draw(SHAPES, 10, dtype=dtype.numpy())
    update = Update(make_optimizer("LambOptimizer", SHAPES, lambda _: given, False), SHAPES, dtype)
    rate = float(np.float32(0.05))
    actual, state = update.train(rate, parameters, gradients)
    f64 = {n: w.astype(np.float64) for n, w in parameters.items()}
    expected = {
        n: paper_lamb(w, [g[n].astype(np.float64) for g in gradients], rate, **attributes) for n, w in f64.items()
    }
    assert_close(actual, expected, tolerance, tolerance)
    assert state["Step"].tolist() == [11]


def test_lamb_moves_zero_weights_by_the_plain_learning_rate():
    update = single("LambOptimizer", (3,))
    new, _ = update(0.1, {"W": np.zeros(3, np.float32)}, {"W": np.float32([1, -2, 3])}, update.initial_state())
    direction = 0.1 / math.sqrt(0.001)  # (1 - alpha) / sqrt(1 - beta), without bias correction
    np.testing.assert_allclose(new["W"], -0.1 * direction * np.array([1, -1, 1]), rtol=1e-4)  # epsilon


@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer"])
def test_zero_gradients_leave_weights_as_they_are(name):
    update = single(name, (3,), clip=True)
    weights = np.float32([1, -2, 3])
    new, _ = update(0.1, {"W": weights}, {"W": np.zeros(3, np.float32)}, update.initial_state())
    np.testing.assert_array_equal(new["W"], weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_of_zero_leaves_weights_as_they_are(name):
    given = {} if name == "SGDOptimizer" else {"lambda": 0.1}
    update = Update(make_optimizer(name, ["W"], lambda _: given, True), {"W": (3,)})
    weights = np.float32([1, -2, 3])
    new, state = update(0.0, {"W": weights}, {"W": np.float32([1, 0, 3])}, update.initial_state())
    np.testing.assert_array_equal(new["W"], weights)
    if state:
        assert np.any(state["Moment_1_W"])


@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer"])
def test_a_count_of_zero_is_not_corrected(name):
    """Legacy's correction is 1 for t = 0."""
    plain, corrected = (single(name, (3,), do_bias_correction=flag) for flag in (0, 1))
    weights, gradients = {"W": np.float32([1, 2, 3])}, {"W": np.float32([3, 2, 1])}
    state = {name: np.zeros_like(value) for name, value in plain.initial_state().items()}
    results = [update(0.1, weights, gradients, state) for update in (plain, corrected)]
    np.testing.assert_array_equal(results[0][0]["W"], results[1][0]["W"])


def test_each_parameter_has_its_own_attributes():
    shapes = {"a": (3,), "b": (3,), "c": (3,)}
    given = {"a": {"lambda": 0.1, "alpha": 0.7}, "b": {}, "c": {"weight_decay_mode": 1, "lambda": 0.2}}
    parameters, gradients = draw(shapes, 10)
    together = Update(make_optimizer("AdamOptimizer", shapes, given.get, False), shapes)
    actual, _ = together.train(0.1, parameters, gradients)
    for n in shapes:
        alone = Update(make_optimizer("AdamOptimizer", [n], given.get, False), {n: (3,)})
        expected, _ = alone.train(0.1, {n: parameters[n]}, [{n: g[n]} for g in gradients])
        np.testing.assert_array_equal(actual[n], expected[n])


# -- clipping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0], ids=["below", "above", "far above"])
@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer"])
def test_gradients_are_clipped_to_the_global_norm(name, scale):
    attributes = {"max_norm_clip": 1.5, "lambda": 0.01, "epsilon": 1e-3}  # a large epsilon makes the scale matter
    parameters, gradients = draw(SHAPES, 5, scale=scale)
    on, off = (Update(make_optimizer(name, SHAPES, lambda _: attributes, clip), SHAPES) for clip in (True, False))
    actual, state = on.train(0.05, parameters, gradients)
    expected, expected_state = off.train(0.05, parameters, clipped(gradients, 1.5))
    assert_close(actual, expected)
    assert_close(state, expected_state)
    unclipped, _ = off.train(0.05, parameters, gradients)
    assert np.allclose(unclipped["matrix"], actual["matrix"], atol=1e-6) == (scale == 0.01)


def test_sgd_never_clips():
    update = Update(make_optimizer("SGDOptimizer", ["W"], None, True), {"W": (1,)})
    new, _ = update(1.0, {"W": np.float32([0])}, {"W": np.float32([100])}, {})
    assert new["W"] == [-100]


@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer"])
def test_a_gradient_that_is_not_a_number_is_not_hidden(name):
    update = single(name, (2,), clip=True)
    new, state = update(0.1, {"W": np.float32([1, 2])}, {"W": np.float32([np.nan, 1])}, update.initial_state())
    assert np.isnan(new["W"][0]) and np.isnan(state["Moment_1_W"][0])
    assert state["Moment_1_W"][1] == np.float32(0.1)  # as legacy: a NaN norm does not clip


@pytest.mark.parametrize("shapes", [SHAPES, {"scalar": ()}, {"empty": (0,)}, {"rows": (4097, 2049)}], ids=str)
def test_global_norm_is_the_norm_of_all_gradients(shapes):
    gradients, _ = draw(shapes, 0)
    values = {n: _value(n, FLOAT, s) for n, s in shapes.items()}
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": 18}, name="norm")
    norm = global_norm(Builder(graph, "norm"), values)
    assert (norm.dtype, norm.shape) == (FLOAT, ())
    graph.outputs.append(norm)
    (actual,) = _session(graph).run(None, gradients)
    expected = torch.linalg.vector_norm(torch.cat([torch.from_numpy(g).double().ravel() for g in gradients.values()]))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_global_norm_takes_float32_and_float64_together():
    values = [_value("a", FLOAT, (2,)), _value("b", DOUBLE, (2,))]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name="norm")
    graph.outputs.append(global_norm(Builder(graph, "norm"), values))
    (norm,) = _session(graph).run(None, {"a": np.float32([1, 2]), "b": np.array([2.0, 4.0])})
    assert (norm, norm.dtype) == (5.0, np.float32)


def test_global_norm_of_nothing_is_zero():
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="norm")
    graph.outputs.append(global_norm(Builder(graph, "norm"), {}))
    assert _session(graph).run(None, {})[0] == 0


# -- state, in-place updates, size of the graph -----------------------------------------------


def test_slots_have_the_legacy_names():
    adam, lamb, sgd = (
        make_optimizer(name, ["w"], None, True) for name in ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")
    )
    moments = (Slot("Moment_1_w", (2, 3), FLOAT, 0.0, "w"), Slot("Moment_2_w", (2, 3), FLOAT, 0.0, "w"))
    assert adam.slots("w", (2, 3), FLOAT) == lamb.slots("w", (2, 3), FLOAT) == moments
    assert adam.shared_slots == (Slot("Update_Count", (1,), INT64, 1.0, None),)
    assert lamb.shared_slots == (Slot("Step", (1,), INT64, 1.0, None),)
    assert sgd.slots("w", (2, 3), FLOAT) == sgd.shared_slots == ()


def late_readers(old, new):
    """Nodes that read `old` and are neither the producer of `new` nor before it."""
    before, pending = set(), [new.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in before:
            before.add(node)
            pending += [value.producer() for value in node.inputs if value is not None]
    return [node.name for node, _ in old.uses() if node not in before]


ATTRIBUTES = {
    "SGDOptimizer": [{}],
    "AdamOptimizer": [{}, {"lambda": 0.1}, {"lambda": 0.1, "weight_decay_mode": 1}, {"do_bias_correction": 0}],
    "LambOptimizer": [
        {},
        {"lambda": 0.1},
        {"lambda": 0.1, "do_bias_correction": 1, "ratio_min": 0.1, "ratio_max": 2.0},
    ],
}
VARIANTS = [(name, given) for name, variants in ATTRIBUTES.items() for given in variants]


@pytest.mark.parametrize("name, given", VARIANTS)
def test_no_old_value_is_read_after_its_new_value_is_made(name, given):
    update = Update(make_optimizer(name, SHAPES, lambda _: given, True), SHAPES)
    assert {n: late_readers(update.old[n], update.new[n]) for n in update.old} == {n: [] for n in update.old}


@pytest.mark.parametrize("name, given", VARIANTS)
def test_an_update_in_place_equals_one_that_is_not(name, given):
    shapes = {"a": (300, 200), "b": (200,), "c": ()}
    parameters, gradients = draw(shapes, 5)
    update = Update(make_optimizer(name, shapes, lambda _: given, True), shapes)
    expected, expected_state = update.train(0.05, parameters, gradients)
    buffers = {
        n: onnxruntime.OrtValue.ortvalue_from_numpy(v.copy()) for n, v in (parameters | update.initial_state()).items()
    }
    used = {i.name for i in update.session.get_inputs()}
    for step in gradients:
        binding = update.session.io_binding()
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in step.values()))
        feeds = {"lr": np.float32([0.05]), "norm": np.array(norm, np.float32)} | {
            f"{n}_grad": g for n, g in step.items()
        }
        for n in feeds.keys() & used:
            binding.bind_cpu_input(n, feeds[n])
        for n, buffer in buffers.items():
            binding.bind_ortvalue_input(n, buffer)
            binding.bind_ortvalue_output(update.new[n].name, buffer)
        update.session.run_with_iobinding(binding)
    for n, value in (expected | expected_state).items():
        np.testing.assert_array_equal(buffers[n].numpy(), value)


@pytest.mark.parametrize(
    "name, given, passes",
    [
        ("SGDOptimizer", {}, 2),
        ("AdamOptimizer", {}, 12),
        ("AdamOptimizer", {"lambda": 0.1}, 13),
        ("AdamOptimizer", {"lambda": 0.1, "weight_decay_mode": 1}, 13),
        ("LambOptimizer", {}, 14),
        ("LambOptimizer", {"lambda": 0.1}, 16),
    ],
)
def test_an_update_takes_few_passes_over_a_tensor(name, given, passes):
    update = Update(make_optimizer(name, ["W"], lambda _: given, True), {"W": (3, 5)})
    big = [node for node in update.graph if any(v.shape == (3, 5) for v in (*node.inputs, *node.outputs))]
    assert len(big) == passes


def test_scalars_are_shared_by_parameters_with_equal_attributes():
    def size(count):
        return len(Update(make_optimizer("AdamOptimizer", [f"w{i}" for i in range(count)], None, True),
                                        {f"w{i}": (2,) for i in range(count)}).graph)  # fmt: skip

    assert size(3) - size(2) == size(2) - size(1) == 12


def test_equal_optimizers_make_equal_files():
    files = {
        ir.to_proto(Update(make_optimizer("LambOptimizer", SHAPES, None, True), SHAPES).graph).SerializeToString()
        for _ in range(2)
    }
    assert len(files) == 1


# -- errors -----------------------------------------------------------------------------------


def test_an_unknown_optimizer_is_named_with_those_there_are():
    text = "unknown optimizer 'Adam'; there are: 'SGDOptimizer', 'AdamOptimizer', 'LambOptimizer'."
    with pytest.raises(OptimizerError, match=f"^{text}$"):
        make_optimizer("Adam", ["w"], None, True)


@pytest.mark.parametrize(
    "name, given, text",
    [
        ("SGDOptimizer", {"momentum": 0.9}, "SGDOptimizer has no attribute 'momentum' (given for parameter 'w'); it has: none."),
        ("AdamOptimizer", {"lr": 0.1}, "AdamOptimizer has no attribute 'lr' (given for parameter 'w'); it has: 'alpha', 'beta', 'lambda', "
         "'epsilon', 'max_norm_clip', 'do_bias_correction', 'weight_decay_mode'."),
        ("AdamOptimizer", {"alpha": "0.9"}, "AdamOptimizer: attribute 'alpha' of parameter 'w' is '0.9'; it must be a float, not a str."),
        ("AdamOptimizer", {"beta": True}, "attribute 'beta' of parameter 'w' is True; it must be a float, not a bool."),
        ("AdamOptimizer", {"do_bias_correction": 1.0}, "attribute 'do_bias_correction' of parameter 'w' is 1.0; it must be an int or a bool, not a float."),
        ("AdamOptimizer", {"do_bias_correction": 2}, "attribute 'do_bias_correction' of parameter 'w' is 2; it must be 0 or 1."),
        ("AdamOptimizer", {"weight_decay_mode": 2}, "attribute 'weight_decay_mode' of parameter 'w' is 2; it must be 0 or 1."),
        ("AdamOptimizer", {"alpha": math.nan}, "attribute 'alpha' of parameter 'w' is nan; it must be between 0 and 1."),
        ("AdamOptimizer", {"alpha": -0.1}, "attribute 'alpha' of parameter 'w' is -0.1; it must be between 0 and 1."),
        ("LambOptimizer", {"beta": 1.1}, "LambOptimizer: attribute 'beta' of parameter 'w' is 1.1; it must be between 0 and 1."),
        ("AdamOptimizer", {"beta": 1.0}, "attribute 'beta' of parameter 'w' is 1, which leaves its moment at 0, and bias correction divides by "
         "1 - beta; it must be below 1, or 'do_bias_correction' 0."),
        ("AdamOptimizer", {"lambda": -1}, "attribute 'lambda' of parameter 'w' is -1; it must be finite and not negative."),
        ("AdamOptimizer", {"lambda": math.inf}, "attribute 'lambda' of parameter 'w' is inf; it must be finite and not negative."),
        ("AdamOptimizer", {"epsilon": -1e-8}, "attribute 'epsilon' of parameter 'w' is -1e-08; it must be finite and not negative."),
        ("AdamOptimizer", {"max_norm_clip": 0}, "attribute 'max_norm_clip' of parameter 'w' is 0; it must be finite and above 0."),
        ("LambOptimizer", {"max_norm_clip": math.inf}, "attribute 'max_norm_clip' of parameter 'w' is inf; it must be finite and above 0."),
        ("LambOptimizer", {"ratio_max": math.nan}, "attribute 'ratio_max' of parameter 'w' is nan; it must be a number."),
        ("LambOptimizer", {"ratio_min": 2.0, "ratio_max": 1.0}, "attribute 'ratio_min' of parameter 'w' is 2.0; it must be at most 'ratio_max', which is 1.0."),
        ("AdamOptimizer", None, "AdamOptimizer: map_optimizer_attributes('w') returned None; it must return a dict of attributes, {} for the defaults."),
    ],
)  # fmt: skip
def test_attributes_that_cannot_be_used_are_named(name, given, text):
    with pytest.raises(OptimizerError) as caught:
        make_optimizer(name, ["w"], lambda _: given, True)
    assert text in str(caught.value)


@pytest.mark.parametrize("key, a, b", [("ratio_min", 0.1, 0.2), ("ratio_max", 1.0, 2.0), ("do_bias_correction", 0, 1)])
def test_lamb_attributes_that_must_be_equal_are_checked(key, a, b):
    with pytest.raises(OptimizerError) as caught:
        make_optimizer("LambOptimizer", ["v", "w"], {"v": {key: a}, "w": {key: b}}.get, True)
    assert str(caught.value) == (
        f"LambOptimizer: attribute {key!r} must be equal for all parameters, but it is {a!r} for 'v' and {b!r} for 'w'."
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_are_not_float32_or_float64_are_refused(name):
    text = f"{name} cannot update parameter 'w' of dtype FLOAT16; it needs float32 or float64."
    with pytest.raises(OptimizerError, match=f"^{text}$"):
        make_optimizer(name, ["w"], None, True).slots("w", (2,), ir.DataType.FLOAT16)
