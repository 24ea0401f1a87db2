"""The gradient of a gradient: rules are made of operators that have rules, so the graph can be differentiated twice."""

import numpy as np
import pytest
from cases import activation, elementwise, reduction

from orttrainer import build_gradient
from orttrainer.testing import check_gradient, evaluate
from orttrainer.testing.check import _model

# The product of the others is another formula at each zero: right there, but not differentiable from there.
NOT_SMOOTH = {"ReduceProd-zeros", "ReduceProd-one-zero", "ReduceProd-many-zeros"}


def suits(case):
    """Not what the check itself cannot do: an old opset, Celu in float64, 0-d inputs beside others."""
    floats = [x for x in case.inputs if isinstance(x, tuple) or (isinstance(x, np.ndarray) and x.dtype.kind == "f")]
    mixed = len(floats) > 1 and any(x == () if isinstance(x, tuple) else x.ndim == 0 for x in floats)
    return case.opset >= 18 and case.op_type != "Celu" and str(case) not in NOT_SMOOTH and not mixed


CASES = [case for module in (elementwise, activation, reduction) for case in module.CASES if suits(case)]


def with_gradients_as_outputs(model, feeds):
    """The gradient model of `model`, its only outputs the gradients, as slope_<input>."""
    gradient = build_gradient(model, of="y0", wrt=list(feeds))
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_of_the_gradient_matches_central_differences(case):
    model, feeds = _model(case, np.float64)
    gradient = with_gradients_as_outputs(model, feeds)
    rng = np.random.default_rng(11)
    if any(value.name == "y0_cotangent" for value in gradient.graph.input):
        feeds["y0_cotangent"] = rng.standard_normal(evaluate(model, feeds)["y0"].shape)
    check_gradient(gradient, feeds, rtol=1e-6, what=f"gradient of {case}")
