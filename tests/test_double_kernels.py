"""Operators that ONNX Runtime's CPU provider has no float64 kernels for, as they are written out for it, and their gradients."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from cases import (
    activation,
    convolution,
    convolution_transposed,
    elementwise,
    indexing,
    normalization,
    pooling,
    resize,
    shape,
    signal,
)
from double import written_out
from marks import of_each_operator

from orttrainer.differentiate.double.kernels import lacks_kernels
from orttrainer.differentiate.rules import convolution_weights
from orttrainer.testing import Case, Fixed, check_vjp
from orttrainer.testing.check import _gradients, _model, evaluate

FAMILIES = (
    activation, convolution, convolution_transposed, elementwise, indexing, normalization, pooling, resize, shape, signal,
)  # fmt: skip
# ONNX's evaluator has the scales in float32; of a kernel of unknown size there are no taps to write out.
LESS_EXACT = {"cubic_down", "cubic_align_corners", "cubic_exclude_outside", "cubic_antialias"}


def lacking(case) -> bool:
    known = case.opset >= 18 and not case.domain and not (case.op_type == "Resize" and case.name == "crop")
    return known and lacks_kernels(ir.from_proto(_model(case, np.float64)[0]))


CASES = [case for family in FAMILIES for case in family.CASES if lacking(case)]
NEED_SIZES = "Conv", "ConvTranspose", "Col2Im", "DFT"
OF_ANY_SIZE = [case for case in CASES if case.symbolic and case.op_type not in NEED_SIZES]


@pytest.mark.parametrize("case", of_each_operator(CASES), ids=str)
def test_outputs_and_gradients_are_exact_in_float64(case):
    assert_exact(case, symbolic=False)


@pytest.mark.parametrize("case", of_each_operator(OF_ANY_SIZE), ids=str)
def test_they_are_where_sizes_are_not_known(case):
    assert_exact(case, symbolic=True)


def assert_exact(case, symbolic):
    model, feeds = _model(case, np.float64, symbolic=symbolic)
    expected = evaluate(model, feeds)
    rng = np.random.default_rng(0)
    cotangents = {name: np.asarray(rng.standard_normal(y.shape)) for name, y in expected.items()}
    found = written_out(model, feeds)
    close(found, expected, 1e-6 if case.name in LESS_EXACT else 1e-14)
    close(_gradients(model, feeds, cotangents, run=written_out), _gradients(model, feeds, cotangents), 1e-13)


def close(found, expected, tolerance):
    for name, y in expected.items():
        assert found[name].shape == y.shape
        np.testing.assert_allclose(found[name], y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max(initial=0.0)))


def test_the_largest_of_the_first_axis_is_chosen_the_first_of_two():
    case = Case("Hardmax", np.array([[1.0, 5.0, -1.0], [1.0, 2.0, 1e-300]]), axis=0)
    found = written_out(*_model(case, np.float64))["y0"]
    np.testing.assert_array_equal(found, [[1, 1, 0], [0, 0, 1]])


def test_what_differs_from_0_is_found_be_it_smaller_than_float32_or_no_number():
    x = np.array([[0.0, 1e-300, -0.0], [math.nan, 5e-324, -math.inf]])
    found = written_out(*_model(Case("NonZero", x), np.float64))["y0"]
    np.testing.assert_array_equal(found, np.nonzero(x))


def test_numbers_are_chosen_by_indices_of_other_types():
    values = Fixed(np.array([0.1, 1e300]))
    found = written_out(
        *_model(Case("OneHot", Fixed(np.array([2.0, -1.0])), np.array(3, np.int32), values), np.float64)
    )
    np.testing.assert_array_equal(found["y0"], np.where(np.eye(3)[[2, 2]] == 1, 1e300, 0.1))


def test_a_maximum_is_put_back_into_a_shape_that_is_given():
    case = Case(
        "MaxUnpool", np.array([[[[0.1, 1e300], [-2.0, 0.0]]]]), np.array([[[[5, 7], [13, 15]]]]), np.array([1, 1, 5, 5]),
        kernel_shape=[2, 2], strides=[2, 2],
    )  # fmt: skip
    expected = np.zeros(25)
    expected[[5, 7, 13, 15]] = 0.1, 1e300, -2.0, 0.0
    model, feeds = _model(case, np.float64)
    found = written_out(model, feeds)["y0"]
    np.testing.assert_array_equal(found, expected.reshape(1, 1, 5, 5))
    dy = np.arange(25.0).reshape(found.shape)
    (gradient,) = _gradients(model, feeds, {"y0": dy}, run=written_out).values()
    np.testing.assert_array_equal(gradient.reshape(-1), [5, 7, 13, 15])


@pytest.mark.parametrize("case", convolution.CASES + convolution_transposed.CASES, ids=str)
def test_the_forms_of_weight_gradients_of_float32_are_exact_as_well(case, monkeypatch):
    monkeypatch.setattr(convolution_weights, "in_products", lambda w: False)
    check_vjp(case)


def numbers() -> np.ndarray:
    """Of all magnitudes, around the bounds of series, near where functions are 0 or infinite, and what is no number."""
    rng = np.random.default_rng(0)
    sizes = [10.0 ** rng.uniform(-300, 308, 2000), 10.0 ** rng.uniform(-3, 3, 4000), rng.uniform(0, 2, 4000)]
    sizes += [1 - 10.0 ** rng.uniform(-16, 0, 1000), 1 + 10.0 ** rng.uniform(-16, 0, 1000)]
    sizes += [np.nextafter(np.arange(400) * np.pi / 2, end) for end in (0, np.inf)]
    sizes += [[0.5, 0.66, 1.0, 1.5, 2.0**19, 2.0**28, 709.0, 709.78, 5e-324, 0.0, np.inf, np.nan]]
    return np.concatenate([*sizes, *(-np.asarray(size) for size in sizes)])


FUNCTIONS = {
    "Acos": np.arccos, "Acosh": np.arccosh, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan,
    "Atanh": np.arctanh, "Cosh": np.cosh, "Sinh": np.sinh, "Tan": np.tan,
}  # fmt: skip


@pytest.mark.parametrize("op_type, function", FUNCTIONS.items(), ids=FUNCTIONS)
def test_functions_are_exact_at_all_magnitudes(op_type, function):
    x = numbers()
    with np.errstate(all="ignore"):
        expected = function(x)
    found = written_out(*_model(Case(op_type, x), np.float64))["y0"]
    np.testing.assert_allclose(found, expected, rtol=1e-15, atol=1e-307)


def test_a_cosine_is_exact_to_the_last_digits_of_one_at_all_magnitudes():
    x = numbers()
    with np.errstate(all="ignore"):
        expected = np.cos(x)
    found = written_out(*_model(Case("Cos", x), np.float64))["y0"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-15)
