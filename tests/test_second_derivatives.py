"""The gradient of a gradient: rules are made of operators that have rules, so the graph can be differentiated twice."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cases import (
    activation,
    attention,
    cumulative,
    elementwise,
    indexing,
    microsoft,
    microsoft_attention,
    microsoft_linear_attention,
    quantization,
    recurrent,
    reduction,
    sampling,
    signal,
)
from marks import of_each_operator

from orttrainer import build_gradient
from orttrainer.differentiate.build import gradient_of
from orttrainer.testing import check_gradient, evaluate
from orttrainer.testing.check import _model, _run_onnxruntime


def suits(case):
    """Not what the check itself cannot do: an old opset, Celu in float64, 0-d inputs beside others."""
    floats = [x for x in case.inputs if isinstance(x, tuple) or (isinstance(x, np.ndarray) and x.dtype.kind == "f")]
    mixed = len(floats) > 1 and any(x == () if isinstance(x, tuple) else x.ndim == 0 for x in floats)
    return case.opset >= 18 and case.op_type != "Celu" and not mixed


def one_of_each(*modules):
    """One use of each operator; of recurrent layers one with what only their definitions have."""
    found = {}
    for case in (case for module in modules for case in module.CASES if suits(case)):
        if case.op_type not in recurrent.TORCH or case.name == "special-activations":
            found.setdefault((case.domain, case.op_type), case)
    return list(found.values())


CASES = [case for module in (elementwise, activation, reduction) for case in module.CASES if suits(case)]
CASES += one_of_each(
    attention, cumulative, microsoft, microsoft_attention, microsoft_linear_attention, quantization, recurrent, sampling,
    signal,
)  # fmt: skip
CASES += [case for case in indexing.CASES if case.attributes.get("reduction") == "mul"]


def with_gradients_as_outputs(model, feeds):
    """The gradient model of `model`, its only outputs the gradients, as slope_<input>."""
    gradient = gradient_of(ir.from_proto(model), of="y0", wrt=list(feeds))  # unchecked: ONNX has not all in float64
    graph = gradient.graph
    names = {f"{name}_grad": f"slope_{name}" for name in feeds}
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
    slopes = [value for value in graph.output if value.name in names]
    del graph.output[:]
    for value in slopes:
        value.name = names[value.name]
    graph.output.extend(slopes)
    return gradient


@pytest.mark.parametrize("case", of_each_operator(CASES), ids=str)
def test_gradient_of_the_gradient_matches_central_differences(case):
    model, feeds = _model(case, np.float64)
    gradient = with_gradients_as_outputs(model, feeds)
    rng = np.random.default_rng(11)
    if any(value.name == "y0_cotangent" for value in gradient.graph.input):
        feeds["y0_cotangent"] = rng.standard_normal(evaluate(model, feeds)["y0"].shape)
    check_gradient(gradient, feeds, rtol=1e-6, what=f"gradient of {case}")


def test_onnxruntime_loads_the_gradient_of_the_gradient_of_one_exponential():
    """Whose gradient is one node: its result is an output of the graph, and its own name all that is called grad/."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) { y = Exp(x) }'
    )
    twice = build_gradient(build_gradient(model, of="y", wrt="x"), of="x_grad", wrt="x")
    x, dy, ddx = np.float32([[0, 1, 2], [1, -2, 3], [2, 3, 5]])
    found = _run_onnxruntime(twice, {"x": x, "y_cotangent": dy, "x_grad_cotangent": ddx})
    np.testing.assert_allclose(found["x_grad_2"], ddx * dy * np.exp(x), rtol=1e-6)
