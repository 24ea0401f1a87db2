"""Gradients on their way into an update: their global norm, clipping, scaling."""

import math

import numpy as np
import onnx_ir as ir
import pytest
import torch
from one_update import DOUBLE, FLOAT, SHAPES, Update, assert_close, clipped, draw, session, single, tensor

from orttrainer.graph import Builder
from orttrainer.optim import global_norm, make_optimizer


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


@pytest.mark.parametrize("given", [{}, {"momentum": 0.9, "nesterov": 1, "weight_decay": 0.1}], ids=str)
def test_sgd_clips_where_a_bound_is_given(given):
    parameters, gradients = draw(SHAPES, 10)
    on = Update(make_optimizer("SGDOptimizer", SHAPES, lambda _: {**given, "max_norm_clip": 1.5}), SHAPES)
    off = Update(make_optimizer("SGDOptimizer", SHAPES, lambda _: given), SHAPES)
    actual, state = on.train(0.05, parameters, gradients)
    expected, expected_state = off.train(0.05, parameters, clipped(gradients, 1.5))
    assert_close(actual, expected)
    assert_close(state, expected_state)


# scaling is exact for powers of two, so that these results agree to the last bit
SCALED = [
    ("SGDOptimizer", {}),
    ("SGDOptimizer", {"weight_decay": 0.1}),
    ("SGDOptimizer", {"momentum": 0.9, "weight_decay": 0.1, "max_norm_clip": 2.0}),
    ("SGDOptimizer", {"momentum": 0.9, "nesterov": 1}),
    ("SGDOptimizer", {"momentum": 0.9, "dampening": 0.25}),
    ("AdamOptimizer", {}),
    ("AdamOptimizer", {"weight_decay": 0.1}),
    ("AdamOptimizer", {"weight_decay": 0.1, "lambda": 0.1, "max_norm_clip": math.inf}),
    ("AdamWOptimizer", {}),
    ("AdamWOptimizer", {"amsgrad": 1}),
    ("LambOptimizer", {"lambda": 0.1, "do_bias_correction": 1}),
]


@pytest.mark.parametrize("factor, tolerance", [(2.0**16, 0.0), (4.0, 0.0), (3.0, 2e-6)])
@pytest.mark.parametrize("name, given", SCALED, ids=str)
def test_gradients_times_k_with_a_scale_of_one_kth_make_the_same_update(name, given, factor, tolerance):
    parameters, gradients = draw(SHAPES, 10)
    plain, scaled = (
        Update(make_optimizer(name, SHAPES, lambda _: given, True), SHAPES, scaled=flag) for flag in (False, True)
    )
    expected, expected_state = plain.train(0.05, parameters, gradients)
    larger = [{n: g * np.float32(factor) for n, g in step.items()} for step in gradients]
    actual, state = scaled.train(0.05, parameters, larger, scale=1 / factor)
    assert_close(actual, expected, tolerance, tolerance)
    assert_close(state, expected_state, tolerance, tolerance)


def test_sgd_never_clips_by_default():
    update = Update(make_optimizer("SGDOptimizer", ["W"], None, True), {"W": (1,)})
    new, _ = update(1.0, {"W": np.float32([0])}, {"W": np.float32([100])}, {})
    assert new["W"] == [-100]


@pytest.mark.parametrize(
    "name, given",
    [
        ("SGDOptimizer", {"momentum": 0.9, "weight_decay": 0.1, "max_norm_clip": 1.0}),
        ("AdamOptimizer", {"weight_decay": 0.1}),
        ("AdamOptimizer", {"lambda": 0.1}),
        ("LambOptimizer", {"lambda": 0.1}),
    ],
)
def test_a_norm_that_overflows_clips_to_nothing_instead_of_spoiling_the_weights(name, given):
    update = Update(make_optimizer(name, ["W"], lambda _: given, True), {"W": (2,)})
    huge = {"W": np.float32([1e18, -3e18])}  # of a thousand such elements the sum of squares is not finite
    new, state = update(0.1, {"W": np.float32([1, 2])}, huge, update.initial_state(), norm=np.inf)
    if name == "SGDOptimizer":
        np.testing.assert_allclose(new["W"], [0.99, 1.98], rtol=1e-6)  # the decay alone
        np.testing.assert_allclose(state["Momentum_W"], [0.1, 0.2], rtol=1e-6)
    else:
        np.testing.assert_array_equal([state["Moment_1_W"], state["Moment_2_W"]], np.zeros((2, 2)))
        assert np.isfinite(new["W"]).all()


@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer"])
def test_a_gradient_that_is_not_a_number_is_not_hidden(name):
    update = single(name, (2,), clip=True)
    new, state = update(0.1, {"W": np.float32([1, 2])}, {"W": np.float32([np.nan, 1])}, update.initial_state())
    assert np.isnan(new["W"][0]) and np.isnan(state["Moment_1_W"][0])
    assert state["Moment_1_W"][1] == np.float32(0.1)  # as legacy: a NaN norm does not clip


@pytest.mark.parametrize("shapes", [SHAPES, {"scalar": ()}, {"empty": (0,)}, {"rows": (4097, 2049)}], ids=str)
def test_global_norm_is_the_norm_of_all_gradients(shapes):
    gradients, _ = draw(shapes, 0)
    values = {n: tensor(n, FLOAT, s) for n, s in shapes.items()}
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": 18}, name="norm")
    norm = global_norm(Builder(graph, "norm"), values)
    assert (norm.dtype, norm.shape) == (FLOAT, ())
    graph.outputs.append(norm)
    (actual,) = session(graph).run(None, gradients)
    expected = torch.linalg.vector_norm(torch.cat([torch.from_numpy(g).double().ravel() for g in gradients.values()]))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_global_norm_takes_float32_and_float64_together():
    values = [tensor("a", FLOAT, (2,)), tensor("b", DOUBLE, (2,))]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name="norm")
    graph.outputs.append(global_norm(Builder(graph, "norm"), values))
    (norm,) = session(graph).run(None, {"a": np.float32([1, 2]), "b": np.array([2.0, 4.0])})
    assert (norm, norm.dtype) == (5.0, np.float64)


def test_global_norm_of_nothing_is_zero():
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="norm")
    graph.outputs.append(global_norm(Builder(graph, "norm"), {}))
    assert session(graph).run(None, {})[0] == 0
