"""ONNX's own node tests, differentiated: every operator in the forms that its authors thought of.

Each test with a float input and a float output is taken as it is, its floats made float64. Its inputs are moved off
kinks where they lie on one. Then `float64` compares the gradient of a random projection of the outputs, on ONNX's
reference evaluator, with central differences; `runtime` runs the gradient on ONNX Runtime in the test's own dtype, and
`float32` in that, and compare with the former.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes import common

from orttrainer.differentiate.build import gradient_of
from orttrainer.differentiate.prepare.opsets import NEWEST_OPSET
from orttrainer.errors import GradientError, ModelError
from orttrainer.testing import evaluate
from suites.node_models import NodeTest, in_supported_opset, node_tests, varies, with_floats
from suites.outcome import Outcome, State

TITLE = "ONNX's node tests"
TARGET = "every test case in which a float output varies with a float input"
SLICE = 12
OPTIMIZER = "an optimizer's update (ai.onnx.preview.training): nothing is differentiated through it, nor does ONNX Runtime run it"
CLASSICAL = "ai.onnx.ml: models that are trained by other means"
GENERATOR = "each runtime draws its own mask"
ROUNDED = (
    "ONNX computes with the size before it is rounded, ONNX Runtime with the size after; the gradient is the latter's"
)
EXCEPTIONS = {
    "test_adagrad*": OPTIMIZER,
    "test_adam*": OPTIMIZER,
    "test_*momentum*": OPTIMIZER,
    "test_ai_onnx_ml_*": CLASSICAL,
    "test_scan_sum": "Scan of opset 8, which was another operator; the oldest opset that is read is 12",
    "test_spacetodepth_crd_mode_example": "an attribute that is new in opset 28, which no runtime reads",
    "test_training_dropout*/runtime": GENERATOR,
    "test_resize_downsample_scales_*_align_corners/runtime": ROUNDED,
    "test_maxunpool_export_with_output_shape/runtime": "ONNX Runtime counts the indices in another shape than ONNX",
}

DIFFERENCE_RTOL = 1e-6  # of the sum of the terms; finite differences in float64 reach 1e-9
FORWARD_RTOL = 2e-2  # tells whether it is the same function: some tests are in half precision
# Of the largest entry of a gradient; each is some hundred roundings of its dtype.
RUNTIME_RTOL = {"float64": 1e-9, "float32": 2e-4, "float16": 3e-2, "bfloat16": 2e-1}

SMALL = {TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1, TensorProto.INT2, TensorProto.UINT2}


@functools.cache
def _tests() -> dict[str, NodeTest]:
    return {test.name: test for test in node_tests()}


@functools.cache
def entries() -> list[str]:
    """The tests in which a float output varies with a float input; `without_gradient` are the others with floats."""
    return [test.name for test in _tests().values() if test.wrt and test.of and varies(test)]


def without_gradient() -> list[str]:
    """The tests that have float inputs and outputs, none of which varies with the former by definition."""
    return [test.name for test in _tests().values() if test.wrt and test.of and not varies(test)]


def check(entry: str, limit: int | None = None) -> Iterator[Outcome]:
    """Check one test: `float64`, `runtime` and, if that is another dtype, `float32`; the first `limit` of these."""
    yield from itertools.islice(_outcomes(entry), limit)


def _outcomes(entry: str) -> Iterator[Outcome]:
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)  # where an operator has no float64 form, inference says so
    warnings.simplefilter("ignore")  # NumPy warns where a test divides by zero on purpose
    test = _tests()[entry]
    try:
        model = in_supported_opset(test.model)
        double = with_floats(model, TensorProto.DOUBLE)
        builder = _gradient_in_float64(model, double, test)
    except GradientError as error:  # MissingGradientError too
        yield Outcome("float64", State.NO_GRADIENT, _line(error))
        return
    except ModelError as error:
        yield Outcome("float64", State.NOT_EXPORTED, _line(error))
        return
    outcome, feeds = _check_float64(test, double, builder)
    yield outcome
    if outcome.state is not State.PASSED:
        return
    expected = builder.run(evaluate, feeds, dict.fromkeys(test.of, np.dtype(np.float64)))
    yield _check_runtime("runtime", test, model, feeds, builder, expected)
    if test.dtype != TensorProto.FLOAT:
        yield _check_runtime("float32", test, with_floats(model, TensorProto.FLOAT), feeds, builder, expected)


class Gradient:
    """The gradient of a random projection of all float outputs of a test, by its float inputs."""

    def __init__(self, model: onnx.ModelProto, test: NodeTest, cotangents: dict[str, np.ndarray] | None = None):
        self.test = test
        self.model = gradient_of(
            ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString())), test.of, test.wrt
        )
        self.given = {v.name for v in self.model.graph.input}
        rng = np.random.default_rng(11)
        self.cotangents = cotangents or {
            # A scalar output is differentiated with cotangent 1, and has no input for it.
            name: rng.standard_normal(test.outputs[name].shape) if f"{name}_cotangent" in self.given else np.ones(())
            for name in test.of
        }

    def project(self, values: dict[str, np.ndarray]) -> float:
        """The function whose gradient this is, of the outputs of the model; what is not finite has cotangent 0."""
        total = 0.0
        for name, cotangent in self.cotangents.items():
            if values[name].shape != cotangent.shape:
                raise _Moved(f"{name} has another shape there")
            total += float(np.vdot(np.where(cotangent == 0, 0, values[name]), cotangent))
        return total

    def forward(self) -> onnx.ModelProto:
        """The model as it was prepared: in another opset, or with function bodies in the place of operators."""
        model = ir.from_proto(onnx.ModelProto.FromString(self.model.SerializeToString()))
        del model.graph.outputs[-len(self.test.wrt) :]
        common.RemoveUnusedNodesPass()(model)
        model = ir.to_proto(model)
        seeds = [v for v in model.graph.input if v.name in {f"{name}_cotangent" for name in self.test.of}]
        for seed in seeds:
            model.graph.input.remove(seed)
        return model

    def run(self, runner: Callable, feeds: dict[str, object], dtypes: dict[str, np.dtype]) -> dict[str, np.ndarray]:
        """The gradients by input."""
        seeds = {f"{name}_cotangent": c.astype(dtypes[name]) for name, c in self.cotangents.items()}
        values = runner(self.model, feeds | {name: seed for name, seed in seeds.items() if name in self.given})
        return {name: np.asarray(values[f"{name}_grad"]).astype(np.float64) for name in self.test.wrt}


def _gradient_in_float64(model: onnx.ModelProto, double: onnx.ModelProto, test: NodeTest) -> Gradient:
    """Built in float64, or in float32 where ONNX's inference refuses to mix that with a function body's constants."""
    try:
        return Gradient(double, test)
    except GradientError:
        gradient = Gradient(with_floats(model, TensorProto.FLOAT), test)
        gradient.model = with_floats(gradient.model, TensorProto.DOUBLE)
        return gradient


class _Moved(Exception):
    """A step changed what it must not: the shape of an output."""


# -- float64, against finite differences -------------------------------------------------------


def _check_float64(test: NodeTest, model: onnx.ModelProto, gradient: Gradient) -> tuple[Outcome, dict | None]:
    given = _as(test.inputs, np.float64)
    try:
        values = evaluate(model, given)
    except Exception as error:
        return Outcome("float64", State.NOT_RUN, f"the reference evaluator: {_line(error)}"), None
    if (different := _differences(values, test.outputs)) is not None:
        return Outcome("float64", State.NOT_RUN, f"the reference evaluator gives other outputs: {different}"), None
    for name, cotangent in gradient.cotangents.items():
        if f"{name}_cotangent" in gradient.given:
            gradient.cotangents[name] = np.where(np.isfinite(values[name]), cotangent, 0.0)
    found, finite = None, all(np.isfinite(values[name]).all() for name in test.of)
    for forward in (model, None):
        if forward is None:
            # The reference evaluator and function bodies compute some operators in float32: then by a body in float64.
            gradient.model = with_floats(gradient.model, TensorProto.DOUBLE)
            forward = gradient.forward()
            if _differences(evaluate(forward, given), test.outputs) is not None:
                break
        for feeds, ties in _points(test, given, finite):
            smooth, found = _compare_at(test, forward, gradient, feeds, ties)
            if smooth and found is None:
                return Outcome("float64", State.PASSED), feeds
            if smooth:
                return Outcome("float64", State.WRONG, found), None
    return Outcome("float64", State.WRONG, found), None


def _compare_at(test: NodeTest, model: onnx.ModelProto, gradient: Gradient, feeds: dict, ties: bool):
    """Whether the function is smooth at a point, and what is wrong with the gradient there (None: nothing)."""

    def projection(at: dict) -> float:
        return gradient.project(evaluate(model, at))

    try:
        projection(feeds)
        gradients = gradient.run(evaluate, feeds, dict.fromkeys(test.of, np.dtype(np.float64)))
        for name in test.wrt:
            got = gradients[name]
            if got.shape != feeds[name].shape:
                return True, f"{name} has a gradient of shape {got.shape}"
            direction = _directions(feeds[name], ties)
            actual, terms = float(np.vdot(got, direction)), float(np.sum(np.abs(got * direction)))
            expected, error = _derivative(projection, feeds, name, direction)
            scale = max(abs(expected), terms, 1e-3)
            told = f"the gradient of {name} gives {actual:.9g}, differences {expected:.9g} +- {error:.1g}"
            if not error <= DIFFERENCE_RTOL / 5 * scale:
                return False, f"no smooth point: {told}"
            if not abs(actual - expected) <= DIFFERENCE_RTOL * scale:
                return np.isfinite(feeds[name]).all() or not np.isnan(
                    actual
                ), told  # 0 times an infinity proves nothing
    except _Moved as error:
        return False, str(error)
    return True, None


def _points(test: NodeTest, given: dict, finite: bool) -> Iterator[tuple[dict, bool]]:
    """The test's own inputs, then inputs near them and farther off, each a number of its dtype.

    Every other one keeps equal what is equal (of Unique no other point has outputs of the same shape): the second value
    says so. Infinities stay where the outputs are `finite` all the same, as those of a mask.
    """
    yield given, False
    rng = np.random.default_rng(1)
    for size, sign in ((1e-2, 0), (1e-2, 1), (1e-2, -1), (1e-1, 0), (1e-1, 1), (1e-1, -1), (5e-1, 0)):
        for ties in (False, True):
            feeds = dict(given)
            for name in test.wrt:
                x = given[name] if finite else np.where(np.isfinite(given[name]), given[name], 0.7)
                step = rng.uniform(0.3, 1, x.shape) * (sign or rng.choice([-1, 1], x.shape))
                step = _tied(step, x) if ties else step
                moved = np.asarray(x + size * step * np.clip(np.abs(x), 1e-1, 1))
                feeds[name] = moved.astype(test.inputs[name].dtype).astype(np.float64)
            yield feeds, ties


def _directions(x: np.ndarray, ties: bool) -> np.ndarray:
    direction = np.asarray(np.random.default_rng(x.size).standard_normal(x.shape))
    return _tied(direction, x) if ties else direction


def _tied(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The value of the first of those places where `x` has the same number."""
    _, first, place = np.unique(x, return_index=True, return_inverse=True)
    return values.reshape(-1)[first][place].reshape(x.shape)


def _derivative(f: Callable, feeds: dict, name: str, direction: np.ndarray) -> tuple[float, float]:
    """The derivative of `f` along a direction of one input, by Richardson's extrapolation, and a bound of its error."""
    here, best = f(feeds), (np.nan, np.inf)
    for h in (1e-3, 1e-4, 1e-5):
        slopes, bends = [], []
        for step in (h, h / 2, h / 4):
            up, down = (f(feeds | {name: feeds[name] + s * direction}) for s in (step, -step))
            slopes.append((up - down) / (2 * step))
            bends.append(abs(up - 2 * here + down) / step)  # of order h where smooth, of order 1 at a kink
        coarse, middle, fine = slopes
        value, less = (64 * fine - 20 * middle + coarse) / 45, (4 * fine - middle) / 3
        error = (
            abs(value - less) if bends[2] <= 0.35 * bends[0] + 1e-9 * max(abs(value), abs(here), 1e-3) / h else np.inf
        )
        if not error >= best[1]:
            best = (value, error)
        if best[1] <= 1e-9 * max(abs(value), 1e-3):
            break
    return best


# -- ONNX Runtime, against float64 ---------------------------------------------------------------


def _check_runtime(
    sample: str, test: NodeTest, model: onnx.ModelProto, feeds: dict, exact: Gradient, expected: dict
) -> Outcome:
    like = test.inputs if sample == "runtime" else _as(test.inputs, np.float32)
    feeds = _as(feeds, like=like)
    newer = any(o.version > NEWEST_OPSET for o in model.opset_import if not o.domain)  # no runtime reads it as it is
    try:
        values = _run(Gradient(model, test).forward() if newer else model, feeds)
    except Exception as error:  # ONNX Runtime has many types of them
        return Outcome(sample, State.NOT_RUN, _line(error))
    gradient = Gradient(model, test, exact.cotangents)
    try:
        got = gradient.run(_run, feeds, {name: values[name].dtype for name in test.of})
    except Exception as error:
        return Outcome(sample, State.CRASHED, f"the gradient on ONNX Runtime: {_line(error)}")
    rtol = max(RUNTIME_RTOL[values[name].dtype.name] for name in test.of)
    for name, want in expected.items():
        if got[name].shape != want.shape:
            return Outcome(sample, State.WRONG, f"gradient of {name} has shape {got[name].shape}")
        error = float(np.max(np.abs(got[name] - want), initial=0.0))
        # Cotangents are of order 1: a gradient far smaller than that is a difference of such terms.
        largest = max(float(np.max(np.abs(want), initial=0.0)), 3e-2)
        if not error <= max(rtol, RUNTIME_RTOL[feeds[name].dtype.name]) * largest:
            double = evaluate(with_floats(model, TensorProto.DOUBLE), _as(feeds, np.float64))
            if (different := _differences(values, double)) is not None:
                return Outcome(sample, State.NOT_RUN, f"ONNX Runtime gives other outputs: {different}")
            return Outcome(
                sample, State.WRONG, f"gradient of {name} is off by {error:.3g}, its largest entry is {largest:.3g}"
            )
    return Outcome(sample, State.PASSED)


def _run(model: onnx.ModelProto, feeds: dict) -> dict[str, np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    model, feeds = _with_small_numbers_inside(model, feeds)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    names = [output.name for output in session.get_outputs()]
    if any(isinstance(x, list) for x in feeds.values()):
        return dict(zip(names, session.run(names, feeds)))
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.asarray(x, order="C"), kinds[name])
        for name, x in feeds.items()
    }
    return dict(zip(names, map(_numpy, session.run_with_ort_values(names, values))))


def _with_small_numbers_inside(model: onnx.ModelProto, feeds: dict) -> tuple[onnx.ModelProto, dict]:
    """Inputs of 4 bits and less as initializers: ONNX Runtime packs them, and takes none from NumPy."""
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    if not (small := [name for name in feeds if kinds[name] in SMALL]):
        return model, feeds
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for value in [v for v in model.graph.input if v.name in small]:
        model.graph.input.remove(value)
        model.graph.initializer.append(numpy_helper.from_array(feeds[value.name], value.name))
    return model, {name: x for name, x in feeds.items() if name not in small}


def _numpy(value) -> np.ndarray:
    """The array in an OrtValue; ONNX Runtime itself gives none of bfloat16."""
    if not value.is_tensor() or value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(raw, helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)).reshape(value.shape())


# -- arrays ----------------------------------------------------------------------------------------


def _as(feeds: dict, dtype: type | None = None, like: dict | None = None) -> dict:
    """The feeds with their floats as `dtype`, or as those of `like`."""

    def convert(x, model):
        if isinstance(x, list):
            return [convert(a, b) for a, b in zip(x, model)]
        return x if x is None or x.dtype.name not in RUNTIME_RTOL else x.astype(dtype or model.dtype)

    return {name: convert(x, (like or feeds)[name]) for name, x in feeds.items()}


def _differences(values: dict, expected: dict) -> str | None:
    """What tells the float outputs of two runs apart."""
    for name, want in expected.items():
        if isinstance(want, np.ndarray) and want.dtype.name in RUNTIME_RTOL:
            got, want = np.asarray(values[name]).astype(np.float64), want.astype(np.float64)
            if got.shape != want.shape:
                return f"{name} has shape {got.shape}, not {want.shape}"
            if not np.allclose(
                got,
                want,
                FORWARD_RTOL,
                FORWARD_RTOL * np.max(np.abs(want), initial=0.0, where=np.isfinite(want)),
                equal_nan=True,
            ):
                return f"{name} is off by {np.nanmax(np.abs(got - want)):.3g}"
    return None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
