"""The update rules against the legacy kernels' published numbers, PyTorch and NumPy in float64."""

import math

import numpy as np
import pytest
import torch
from one_update import DOUBLE, FLOAT, SHAPES, Update, assert_close, draw, single, torch_train

from orttrainer.optim import OPTIMIZERS, make_optimizer

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
    decay = "lambda" if "lambda" in OPTIMIZERS[name].known else "weight_decay"
    given = {} if name == "SGDOptimizer" else {decay: 0.1}
    update = Update(make_optimizer(name, ["W"], lambda _: given, True), {"W": (3,)})
    weights = np.float32([1, -2, 3])
    new, state = update(0.0, {"W": weights}, {"W": np.float32([1, 0, 3])}, update.initial_state())
    np.testing.assert_array_equal(new["W"], weights)
    for slot in OPTIMIZERS[name].always:
        assert np.any(state[f"{slot}_W"])


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
