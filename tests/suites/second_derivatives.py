"""The gradient of a gradient, against PyTorch's double backward.

Every operator of `tests/cases/` that has a PyTorch twin there: the gradient of a random projection of the gradients of the first
output, by the inputs and by the first cotangent, in float64.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import cases
import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto

from orttrainer.differentiate.build import gradient_of
from orttrainer.errors import GradientError
from orttrainer.testing import Case, evaluate
from orttrainer.testing.check import _model
from suites.outcome import Outcome, State

TITLE = "Gradients of gradients"
TARGET = "40 operators, all that are smooth"
SLICE = 12
EXCEPTIONS = {"MeanVarianceNormalization": "ONNX's shape inference refuses its function body in float64"}
RTOL = 1e-7  # attributes such as alpha=0.4 are float32

_CASES: dict[str, list[Case]] = {}
for _module in pkgutil.iter_modules(cases.__path__):
    for _case in importlib.import_module(f"cases.{_module.name}").CASES:
        if _case.torch is not None:
            _CASES.setdefault(_case.op_type, []).append(_case)


def entries() -> list[str]:
    """Operators, in alphabetical order."""
    return sorted(_CASES)


def check(entry: str, limit: int | None = None) -> Iterator[Outcome]:
    """One outcome for each use of the operator."""
    for case in _CASES[entry][:limit]:
        if _float32_only(case):
            yield Outcome(str(case), State.NOT_RUN, "ONNX defines the operator for float32 only")
            continue
        model, feeds = _model(case, np.float64)
        try:
            expected, cotangent, directions = _by_torch(case, model, feeds)
        except RuntimeError as error:  # PyTorch has no second derivative of all that it has a first one of
            yield Outcome(str(case), State.NOT_EXPORTED, f"PyTorch: {str(error).splitlines()[0]}")
            continue
        try:
            found = _by_graph(model, feeds, cotangent, directions)
        except GradientError as error:
            yield Outcome(str(case), State.NO_GRADIENT, str(error))
            continue
        worst = max(
            float(np.max(np.abs(found[k] - v), initial=0.0) / max(np.max(np.abs(v), initial=0.0), 1e-3))
            for k, v in expected.items()
        )
        state = State.PASSED if worst <= RTOL else State.WRONG
        yield Outcome(str(case), state, f"relative error {worst:.1e}")


def _float32_only(case: Case) -> bool:
    known = not case.domain and onnx.defs.has(case.op_type, case.opset)
    return known and "tensor(double)" not in onnx.defs.get_schema(case.op_type, case.opset).inputs[0].types


def _by_torch(case: Case, model: onnx.ModelProto, feeds: dict) -> tuple[dict, np.ndarray, dict]:
    """The second derivatives, and the random numbers that they are taken with."""
    rng = np.random.default_rng(17)
    inputs = {name: torch.tensor(value, requires_grad=True) for name, value in feeds.items()}
    result = case.torch(*inputs.values())
    y = result[0] if isinstance(result, (tuple, list)) else result
    cotangent = np.ones(()) if y.ndim == 0 else rng.standard_normal(y.shape)
    seed = torch.tensor(cotangent, requires_grad=True)
    slopes = torch.autograd.grad(y, list(inputs.values()), seed, create_graph=True, allow_unused=True)
    directions = {name: rng.standard_normal(value.shape) for name, value in feeds.items()}
    total = sum((g * torch.tensor(v)).sum() for g, v in zip(slopes, directions.values()) if g is not None)
    wrt = inputs if y.ndim == 0 else inputs | {"y0_cotangent": seed}
    if not (isinstance(total, torch.Tensor) and total.requires_grad):  # the slopes are constant
        return {name: np.zeros(value.shape) for name, value in wrt.items()}, cotangent, directions
    found = torch.autograd.grad(total, list(wrt.values()), allow_unused=True)
    zeros = (np.zeros(value.shape) for value in wrt.values())
    return {n: z if g is None else g.numpy() for n, z, g in zip(wrt, zeros, found)}, cotangent, directions


def _by_graph(model: onnx.ModelProto, feeds: dict, cotangent: np.ndarray, directions: dict) -> dict:
    """The same through two calls of `gradient_of`."""
    first = gradient_of(ir.from_proto(model), of="y0", wrt=list(feeds))
    slopes = {f"{name}_grad": f"slope_{name}" for name in feeds}
    for node in first.graph.node:
        for names in (node.input, node.output):
            names[:] = [slopes.get(name, name) for name in names]
    outputs = [value for value in first.graph.output if value.name in slopes]
    del first.graph.output[:]
    for value in outputs:
        value.name = slopes[value.name]
    first.graph.output.extend(outputs)
    wrt = [value.name for value in first.graph.input if value.type.tensor_type.elem_type == TensorProto.DOUBLE]
    result: dict[str, np.ndarray] = {}
    for name in feeds:  # each alone: several scalar outputs would each have cotangent 1
        second = gradient_of(ir.from_proto(first), of=f"slope_{name}", wrt=wrt)
        direction, given = directions[name], {value.name for value in second.graph.input}
        values = feeds | {"y0_cotangent": cotangent, f"slope_{name}_cotangent": direction}
        found = evaluate(second, {k: v for k, v in values.items() if k in given})
        scale = direction if direction.ndim == 0 else 1.0
        for k in wrt:
            result[k] = result.get(k, 0.0) + found[f"{k}_grad"] * scale
    return result
