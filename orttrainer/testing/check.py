"""`check_vjp`: prove a gradient rule against finite differences, ONNX Runtime and PyTorch.

For whoever writes a rule: describe one use of the operator with `Case`, then call
`check_vjp(Case("Mul", (2, 3), (3,)))`. Everything is computed in float64 by ONNX's reference
evaluator first, because float32 differences are too coarse to prove anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from orttrainer.differentiate.build import gradient_of
from orttrainer.errors import InvalidArgumentError
from orttrainer.testing import (
    reference_arrays,
    reference_control_flow,
    reference_functions,
    reference_microsoft,
    reference_recurrent,
    reference_sampling,
    reference_windows,
)

__all__ = ["Case", "Fixed", "check_gradient", "check_vjp", "evaluate"]


@dataclass(frozen=True)
class Fixed:
    """A float input that the case does not differentiate; `dtype` where it is not the dtype of the others."""

    value: np.ndarray
    dtype: type | None = None


@dataclass(frozen=True, init=False)
class Case:
    """One use of an operator.

    Args:
        op_type: the operator.
        inputs: one entry per node input: a tuple is the shape of a random float input, drawn
            from [low, high); a float array is a float input with these values; an integer or
            bool array, or `Fixed`, is not differentiated; None leaves an optional input out.
        low, high: range of the random inputs; keep it away from kinks and poles.
        distinct: make all values of one random input differ by at least 1e-2 (for Max, TopK, ...).
        outputs: number of node outputs to ask for.
        domain, opset: of the operator (the model imports version 1 of a foreign domain).
        torch: the same function in PyTorch on the differentiated inputs, for a second opinion.
        runtime: also run in float32 on ONNX Runtime; False where it has no kernel.
        reference: the operator in NumPy, a class derived from `onnx.reference.op_run.OpRun`, where ONNX's own evaluator
            does not know it, as one of a domain of your own.
        symbolic: also check with every dimension symbolic.
        name: what tells this case from its neighbours in a test report.
        attributes: the node's attributes.
    """

    op_type: str
    inputs: tuple
    low: float = -2.0
    high: float = 2.0
    distinct: bool = False
    outputs: int = 1
    domain: str = ""
    opset: int = 18
    torch: Callable | None = None
    runtime: bool = True
    reference: type[OpRun] | None = None
    symbolic: bool = True
    name: str = ""
    attributes: dict = field(default_factory=dict)

    def __init__(self, op_type: str, *inputs, low=-2.0, high=2.0, distinct=False, outputs=1, domain="", opset=18,
                 torch=None, runtime=True, reference=None, symbolic=True, name="", **attributes):  # fmt: skip
        for key, value in dict(
            op_type=op_type, inputs=inputs, low=low, high=high, distinct=distinct, outputs=outputs, domain=domain,
            opset=opset, torch=torch, runtime=runtime, reference=reference, symbolic=symbolic, name=name,
            attributes=attributes,
        ).items():  # fmt: skip
            object.__setattr__(self, key, value)

    def __str__(self) -> str:
        shapes = "x".join(
            str(list(np.shape(x))) if isinstance(x, np.ndarray) else str(x) for x in self.inputs if x is not None
        )
        attributes = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return (self.name and f"{self.op_type}-{self.name}") or f"{self.op_type}({shapes[:60]})[{attributes[:60]}]"


def check_vjp(case: Case, rtol: float = 1e-7, runtime_rtol: float = 2e-4) -> None:
    """Check the rule of `case.op_type`.

    1. float64 on the reference evaluator against central differences along random directions;
    2. with every dimension symbolic, against 1;
    3. float32 on ONNX Runtime against 1;
    4. against `case.torch`, if given;
    5. the sum of the gradients of each of several outputs alone against 1: the rule is given no cotangents of the others then.

    Args:
        rtol: allowed error of 1, relative to the largest term; finite differences reach 1e-9.
        runtime_rtol: allowed error of 3, relative to the largest entry of each gradient (float32
            rounds at 6e-8; sums and differences of larger terms lose the rest).

    Raises:
        AssertionError: naming the input whose gradient is wrong.
        InvalidArgumentError: the operator is of a domain that is not ONNX's, and the case has no `reference`.
    """
    known = {(operator.op_domain, operator.__name__) for operator in REFERENCE_OPS}
    if case.reference is None and case.domain and (case.domain, case.op_type) not in known:
        raise InvalidArgumentError(
            f"nobody has told what {case.op_type!r} of {case.domain!r} computes: give the case the operator in NumPy, "
            f"Case({case.op_type!r}, ..., reference=...), a class derived from onnx.reference.op_run.OpRun"
        )
    model, feeds = _model(case, np.float64)
    own = () if case.reference is None else (case.reference,)
    gradients, cotangents = check_gradient(model, feeds, rtol=rtol, what=str(case), new_ops=own)
    if case.symbolic:
        symbolic, _ = _model(case, np.float64, symbolic=True)
        run = functools.partial(evaluate, new_ops=own)
        _compare(_gradients(symbolic, feeds, cotangents, run), gradients, 1e-12, f"{case}: symbolic dimensions")
    if case.runtime:
        single, single_feeds = _model(case, np.float32)
        single_cotangents = {k: v.astype(np.float32) for k, v in cotangents.items()}
        run = _gradients(single, single_feeds, single_cotangents, run=_run_onnxruntime)
        _compare(run, gradients, runtime_rtol, f"{case}: float32 on ONNX Runtime")
    if case.torch is not None:
        _compare(_torch_gradients(case, model, feeds, cotangents), gradients, 1e-9, f"{case}: PyTorch")
    if len(cotangents) > 1:
        of_each = [_of_one(model, feeds, name, cotangents, own) for name in cotangents]
        _compare(
            {x: sum(part[x] for part in of_each) for x in gradients}, gradients, 1e-12, f"{case}: each output alone"
        )


def check_gradient(
    model: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    rtol: float = 1e-7,
    what: str = "model",
    new_ops: Sequence[type[OpRun]] = (),
) -> tuple[dict, dict]:
    """Check `build_gradient` of a float64 model with respect to all its float64 inputs.

    Args:
        new_ops: operators in NumPy that ONNX's evaluator does not know.

    Returns:
        The gradients by input name, and the random cotangents by output name, for further checks.
    """
    rng = np.random.default_rng(7)
    wrt = [v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.DOUBLE]
    run = functools.partial(evaluate, new_ops=new_ops)
    values = run(model, feeds)
    outputs = [name for name, value in values.items() if value.dtype == np.float64]
    cotangents = {name: np.asarray(rng.standard_normal(values[name].shape)) for name in outputs}
    if len(outputs) > 1:  # `build_gradient` gives each scalar output the cotangent 1
        cotangents |= {name: np.ones(()) for name in outputs if values[name].ndim == 0}
    gradients = _gradients(model, feeds, cotangents, run)

    def projection(shifted: dict[str, np.ndarray]) -> float:
        result = run(model, shifted)
        return sum(float(np.vdot(result[name], cotangents[name])) for name in outputs)

    for name in wrt:
        direction = np.asarray(rng.standard_normal(feeds[name].shape))
        expected = _directional_derivative(projection, feeds, name, direction)
        actual = float(np.vdot(gradients[name], direction))
        scale = max(abs(expected), float(np.sum(np.abs(gradients[name] * direction))), 1e-3)
        assert gradients[name].shape == feeds[name].shape, (
            f"{what}: {name} has a gradient of shape {gradients[name].shape}"
        )
        assert abs(actual - expected) <= rtol * scale, (
            f"{what}: gradient of {name} along a random direction is {actual!r}, finite differences give {expected!r}"
        )
    return gradients, cotangents


def evaluate(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], new_ops: Sequence[type[OpRun]] = ()
) -> dict[str, np.ndarray]:
    """Run a model on ONNX's reference evaluator, with `REFERENCE_OPS` where that is wrong, and with `new_ops`."""
    session = ReferenceEvaluator(model, new_ops=[*REFERENCE_OPS, *new_ops])
    return dict(zip(session.output_names, map(np.asarray, session.run(None, feeds))))


REFERENCE_OPS = (
    *reference_arrays.OPS,
    *reference_control_flow.OPS,
    *reference_functions.OPS,
    *reference_microsoft.OPS,
    *reference_recurrent.OPS,
    *reference_sampling.OPS,
    *reference_windows.OPS,
)

# -- inside ---------------------------------------------------------------------------------


def _directional_derivative(f: Callable, feeds: dict, name: str, direction: np.ndarray, h: float = 1e-3) -> float:
    """(f(x+h d) - f(x-h d)) / 2h, extrapolated twice (Richardson): the error is O(h^6)."""

    def central(step: float) -> float:
        up, down = (f(feeds | {name: feeds[name] + sign * step * direction}) for sign in (1, -1))
        return (up - down) / (2 * step)

    coarse, middle, fine = central(h), central(h / 2), central(h / 4)
    return (64 * fine - 20 * middle + coarse) / 45


def _gradients(model, feeds, cotangents, run=evaluate) -> dict[str, np.ndarray]:
    of_dtype = {
        dtype: [v.name for v in model.graph.input if v.type.tensor_type.elem_type == dtype]
        for dtype in (TensorProto.DOUBLE, TensorProto.FLOAT)
    }
    wrt = of_dtype[TensorProto.DOUBLE] or of_dtype[TensorProto.FLOAT]  # beside float64, float32 is a setting
    gradient = gradient_of(ir.from_proto(model), of=list(cotangents), wrt=wrt)  # ONNX refuses some operators in float64
    wanted = {v.name for v in gradient.graph.input}
    given = feeds | {f"{name}_cotangent": value for name, value in cotangents.items()}
    scalars = {n: v for n, v in cotangents.items() if f"{n}_cotangent" not in wanted}
    assert len(cotangents) == 1 or all(v.ndim == 0 and v == 1 for v in scalars.values()), "several scalar outputs"
    results = run(gradient, {k: v for k, v in given.items() if k in wanted})
    factor = next(iter(scalars.values())) if scalars else 1.0  # one scalar output, or 1
    return {name: results[f"{name}_grad"] * factor for name in wrt}


def _of_one(model, feeds, output: str, cotangents, new_ops) -> dict[str, np.ndarray]:
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    alone.graph.ClearField("output")
    alone.graph.output.extend(y for y in model.graph.output if y.name == output)
    run = functools.partial(evaluate, new_ops=new_ops)
    gradients = _gradients(alone, feeds, {output: cotangents[output]}, run)
    for name, gradient in gradients.items():
        assert gradient.shape == feeds[name].shape, f"{output} alone gives {name} a gradient of shape {gradient.shape}"
    return gradients


def _run_onnxruntime(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], disabled: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def _torch_gradients(case: Case, model, feeds, cotangents) -> dict[str, np.ndarray]:
    import torch

    wrt = [v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.DOUBLE]
    inputs = [torch.tensor(feeds[name], requires_grad=True) for name in wrt]
    results = case.torch(*inputs)
    results = results if isinstance(results, (tuple, list)) else [results]
    seeds = [torch.tensor(c) for c in cotangents.values()]
    grads = torch.autograd.grad(list(results)[: len(seeds)], inputs, seeds[: len(results)], allow_unused=True)
    return {n: np.zeros_like(feeds[n]) if g is None else g.numpy() for n, g in zip(wrt, grads)}


def _compare(actual: dict, expected: dict, rtol: float, what: str) -> None:
    for name, want in expected.items():
        got = np.asarray(actual[name], np.float64)
        assert got.shape == want.shape, f"{what}: gradient of {name} has shape {got.shape}, expected {want.shape}"
        error, scale = np.max(np.abs(got - want), initial=0.0), max(np.max(np.abs(want), initial=0.0), 1e-3)
        assert error <= rtol * scale, f"{what}: gradient of {name} is off by {error} where its largest entry is {scale}"


def _model(case: Case, dtype: type, symbolic: bool = False) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, and values for its float inputs; fixed inputs are initializers."""
    rng = np.random.default_rng(3)
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names, inputs, initializers, feeds = [], [], [], {}
    for index, entry in enumerate(case.inputs):
        name = "" if entry is None else f"x{index}"
        names.append(name)
        if entry is None:
            continue
        if isinstance(entry, Fixed) or (isinstance(entry, np.ndarray) and entry.dtype.kind in "iub"):
            value = np.asarray(entry.value, entry.dtype or dtype) if isinstance(entry, Fixed) else entry
            initializers.append(onnx.numpy_helper.from_array(value, name))
            continue
        value = np.asarray(entry, np.float64) if isinstance(entry, np.ndarray) else _random(case, entry, rng)
        shape = [f"{name}_d{axis}" for axis in range(value.ndim)] if symbolic else value.shape
        inputs.append(helper.make_tensor_value_info(name, elem, shape))
        feeds[name] = value.astype(dtype)
    outputs = [f"y{index}" for index in range(case.outputs)]
    node = helper.make_node(case.op_type, names, outputs, domain=case.domain, name=case.op_type, **case.attributes)
    opsets = [helper.make_opsetid("", case.opset)] + ([helper.make_opsetid(case.domain, 1)] if case.domain else [])
    infos = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([node], "case", inputs, infos, initializers)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    _type_outputs(model, feeds, symbolic, () if case.reference is None else (case.reference,))
    return model, feeds


def _type_outputs(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], symbolic: bool, new_ops: Sequence[type[OpRun]] = ()
) -> None:
    """Declare the outputs that ONNX does not infer, as a model must, by what they are when run."""
    if all(output.type.tensor_type.HasField("shape") for output in model.graph.output):
        return
    values = evaluate(model, feeds, new_ops)
    for output in model.graph.output:
        if not output.type.tensor_type.HasField("shape"):
            value, name = values[output.name], output.name
            shape = [f"{name}_d{axis}" for axis in range(value.ndim)] if symbolic else value.shape
            elem = helper.np_dtype_to_tensor_dtype(value.dtype)
            output.CopyFrom(helper.make_tensor_value_info(name, elem, shape))


def _random(case: Case, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    if not case.distinct:
        return rng.uniform(case.low, case.high, shape)
    count = int(np.prod(shape))
    steps = np.linspace(case.low, case.high, count) if count > 1 else np.zeros(1)
    return rng.permutation(steps).reshape(shape)
