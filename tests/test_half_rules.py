"""Every gradient rule in mixed precision: the uses in `tests/cases/`, with half-precision activations, on the CPU.

The expected gradients are those of float64, which `tests/test_rules.py` proves, at inputs that half precision holds.
"""

from __future__ import annotations

import importlib
import pkgutil

import cases
import numpy as np
import onnx_ir as ir
import pytest
from half import BFLOAT16, FLOAT, FLOAT16, run_model
from onnx_ir.passes import common

from orttrainer.differentiate import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.graph import Builder
from orttrainer.graph.passes.half_precision import HalfPrecisionPass
from orttrainer.testing import Case, evaluate
from orttrainer.testing.check import _gradients, _model

MODULES = [importlib.import_module(f"cases.{module.name}") for module in pkgutil.iter_modules(cases.__path__)]
# What is far from 0 has no digits left in half precision.
CASES = [c for module in MODULES for c in module.CASES if c.runtime and "far-from-0" not in str(c)]
FIRST = list({(case.domain, case.op_type): case for case in reversed(CASES)}.values())  # one use of each operator
SLOW = pytest.mark.slow
NEEDS_OPSET_18 = ("GlobalLpPool",)  # ONNX Runtime has no kernel for the newest version


def differentiated_inputs(case: Case) -> int:
    return sum(isinstance(x, tuple) or (isinstance(x, np.ndarray) and x.dtype.kind == "f") for x in case.inputs)


def check(case: Case, dtype: ir.DataType, activations: int | None, tolerance: float) -> None:
    """Compare the gradients where the first `activations` inputs (by default all) reach the operator in half.

    PRelu(x, 1) makes them half: it is a product to autocast, and the identity.
    """
    proto, feeds = _model(case, np.float32)
    exact, _ = _model(case, np.float64)
    feeds = {name: np.asarray(np.asarray(x.astype(dtype.numpy())).astype(np.float32)) for name, x in feeds.items()}
    exact_feeds = {name: x.astype(np.float64) for name, x in feeds.items()}
    values, rng = evaluate(exact, exact_feeds), np.random.default_rng(7)
    cotangents = {n: np.asarray(rng.standard_normal(v.shape)) for n, v in values.items() if v.dtype == np.float64}
    if len(cotangents) > 1:  # `build_gradient` gives each scalar output the cotangent 1
        cotangents |= {name: np.ones(()) for name in cotangents if values[name].ndim == 0}
    expected = _gradients(exact, exact_feeds, cotangents)

    model = prepare(ir.from_proto(proto))
    graph, op = model.graph, Builder(model.graph, "half")
    inputs = {value.name: value for value in graph.inputs}
    for value in [inputs[name] for name in expected][:activations]:
        uses = list(value.uses())
        half = op.PRelu(value, np.ones((), np.float32))
        for use in uses:
            use.node.replace_input_with(use.idx, half)
    graph.outputs.insert(0, op.ReduceSum(inputs[next(iter(expected))], keepdims=0))  # in place of the loss
    graph.sort()
    HalfPrecisionPass(dtype, ())(model)
    outputs, seeds, op = {value.name: value for value in graph.outputs}, {}, Builder(graph, "grad")
    for name, cotangent in cotangents.items():
        given = ir.Value(name=f"{name}_dy", type=ir.TensorType(FLOAT), shape=ir.Shape(cotangent.shape))
        graph.inputs.append(given)
        seeds[outputs[name]] = op.cast_as(given, outputs[name])
        feeds[given.name] = cotangent.astype(np.float32)
    found = differentiate(op, seeds, [inputs[name] for name in expected])
    graph.outputs.clear()
    for name in expected:
        gradient = op.Identity(op.zeros_like(inputs[name]) if found[inputs[name]] is None else found[inputs[name]])
        gradient.name = f"{name}_grad"
        graph.outputs.append(gradient)
    common.TopologicalSortPass()(model)
    common.RemoveUnusedNodesPass()(model)
    model.ir_version = 10
    results = run_model(model, feeds)
    for name, want in expected.items():
        got, scale = results[f"{name}_grad"].double().numpy(), max(np.max(np.abs(want), initial=0.0), 0.1)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale, err_msg=name)


def uses(several: bool = False) -> list:
    """All uses, of which one of each operator is in the quick suite; `several`: those with several inputs."""
    cases = [case for case in CASES if not several or differentiated_inputs(case) > 1]
    return [
        pytest.param(case, id=str(case), marks=[] if any(case is first for first in FIRST) else [SLOW])
        for case in cases
    ]


@pytest.mark.parametrize("case", uses())
def test_gradients_are_right_where_all_activations_are_float16(case):
    check(case, FLOAT16, None, 2e-2)  # float16 rounds at 5e-4, and each step of the backward pass does so


@pytest.mark.parametrize("case", uses(several=True))
def test_gradients_are_right_where_float16_meets_float32(case):
    check(case, FLOAT16, 1, 2e-2)


# Rounding would take values over the edge of a clip; float16, which has three more bits, tests these.
@SLOW
@pytest.mark.parametrize("case", [case for case in CASES if "clip" not in str(case)], ids=str)
def test_gradients_are_right_where_all_activations_are_bfloat16(case):
    moves = not case.domain and case.op_type not in NEEDS_OPSET_18 and "opset" not in case.name
    if moves and 18 <= case.opset < 22:  # 22 gave bfloat16 to many operators
        case = Case(
            case.op_type, *case.inputs, low=case.low, high=case.high, distinct=case.distinct, outputs=case.outputs,
            opset=22, name=case.name, **case.attributes,
        )  # fmt: skip
    check(case, BFLOAT16, None, 6e-2)  # bfloat16 rounds at 4e-3
