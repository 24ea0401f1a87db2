"""PyTorch's own operator database (OpInfo): every operator with a gradient, every sample, exported and differentiated.

An entry is a differentiable operator of `op_db`, a sample one of its `sample_inputs` in float32. The operator is exported as a
function of its differentiable tensors by the product's own capture, then `build_gradient` with a random cotangent for every
differentiable output, run in float32 on ONNX Runtime. The gradient of each input is compared with autograd's in float64: within
1e-4 of the largest entry, or no farther than a few times PyTorch's own float32 gradient is. What PyTorch says is NaN is not compared.

Dynamo takes 0.15 s for an export and TorchScript 0.005 s: so `DYNAMO` samples of each entry, spread over all of them, are exported
as the trainer does it, dynamo first, then TorchScript; the others in the other order. A sample is not exported only if both fail;
an exporter that has refused `PATIENCE` samples of an entry and taken none is not asked for the others.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Iterator
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from orttrainer.differentiate import build_gradient
from orttrainer.errors import GradientError, ModelError
from orttrainer.export import normalize
from orttrainer.export.capture import capture_dynamo, capture_torchscript
from orttrainer.export.values.conditions import Followed
from orttrainer.graph.optimizers import left_out
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.half_kernels import has_cpu_kernel
from suites.outcome import Outcome, State

TITLE = "PyTorch's operators (OpInfo)"
TARGET = "99 % of the samples that export have PyTorch's gradient"
SLICE = 8
DYNAMO = 12  # samples of an entry that dynamo is asked first
PATIENCE = 5  # samples after which an exporter that has taken none is not asked again
OPSET = 18

TOLERANCE = 1e-4  # of the largest entry of a gradient
ABSOLUTE = 1e-6  # cotangents are about 1, and ONNX Runtime's Sigmoid and Tanh are off by as much as 3e-7
ROUNDING = 10  # times the error of PyTorch's own float32 gradient: another order of summation

EXCEPTIONS: dict[str, str] = {}

# TorchScript's exporter ends the process: it divides an integer by zero, or reads where it must not.
DYNAMO_ONLY = {
    "nn_functional_adaptive_avg_pool3d",
    "nn_functional_fractional_max_pool3d",
    "nn_functional_group_norm",
    "nn_functional_interpolate_area",
    "nn_functional_pixel_unshuffle",
    "nn_functional_unfold",
    "put",
    "take",
    "unfold",
}


def entries() -> list[str]:
    return sorted(_database())


def check(entry: str, limit: int | None = None) -> Iterator[Outcome]:
    op = _database()[entry]
    samples = _samples(op)
    chosen = range(len(samples)) if limit is None else _spread(len(samples), limit)
    dynamo_first = {chosen[i] for i in _spread(len(chosen), DYNAMO)}
    exporters = {"torchscript": _Exporter("torchscript"), "dynamo": _Exporter("dynamo")}
    if entry in DYNAMO_ONLY:
        del exporters["torchscript"]
    # Without elements last: an exporter that refuses these may take all others.
    for index in sorted(chosen, key=lambda index: (_is_empty(samples[index]), index not in dynamo_first)):
        order = list(exporters.values())
        outcome = _outcome(_Function(op, samples[index]), order[::-1] if index in dynamo_first else order)
        if outcome is not None:
            yield Outcome(str(index), *outcome)


@functools.cache
def _database() -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.formatted_name: op for op in op_db if torch.float32 in op.dtypes and op.supports_autograd}


def _samples(op) -> list:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(op.sample_inputs("cpu", torch.float32, requires_grad=True))


def _is_empty(sample) -> bool:
    leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    return any(isinstance(x, torch.Tensor) and not x.numel() for x in leaves)


def _spread(count: int, limit: int) -> list[int]:
    """`limit` of the numbers below `count`, far apart, the first among them."""
    return sorted({i * count // limit for i in range(limit)}) if limit < count else list(range(count))


# ---------------------------------------------------------------- the operator as a function of tensors


class _Function(torch.nn.Module):
    """One sample: the operator as a function of those tensors that require a gradient; its float outputs."""

    # What the product's capture looks for in a module with its loss.
    loss_fn, updated, changed, differentiates, runs = None, (), {}, False, frozenset()

    def __init__(self, op, sample):
        super().__init__()
        self.followed = Followed()
        self._op, self._process = op, sample.output_process_fn_grad
        leaves, self._tree = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        self._places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        self.inputs = [leaves[i].detach().clone() for i in self._places]
        self._leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        self._keep: list[int] | None = None  # the places of the outputs that have a gradient

    def forward(self, *inputs):
        return tuple(y for i, y in enumerate(self._all(inputs, self._leaves)) if self._keep is None or i in self._keep)

    def _all(self, inputs, leaves):
        leaves = list(leaves)
        for place, x in zip(self._places, inputs):
            leaves[place] = x
        first, args, kwargs = tree_unflatten(leaves, self._tree)
        result = self._op.gradcheck_wrapper(self._op.op, first, *args, **kwargs)
        if self._process is not None:
            result = self._process(result)
        outputs = [y for y in tree_flatten(result)[0] if isinstance(y, torch.Tensor)]
        return [
            y.float() if y.dtype in (torch.float16, torch.bfloat16) else y for y in outputs
        ]  # NumPy has no bfloat16

    def differentiated(self, dtype: torch.dtype, seed: int = 0):
        """Outputs, cotangents and gradients in `dtype`, by autograd; ([], [], []) if no output has a gradient."""
        leaves = [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in self._leaves]
        inputs = [x.to(dtype if x.dtype == torch.float32 else x.dtype, copy=True) for x in self.inputs]
        inputs = [x.requires_grad_() for x in inputs]
        torch.manual_seed(seed)
        with mock.patch.object(torch, "manual_seed"):  # with which OpInfo hides that an operator is random
            outputs = self._all([x.clone() for x in inputs], leaves)
        self._keep = [i for i, y in enumerate(outputs) if y.requires_grad]
        outputs = [y for y in outputs if y.requires_grad]
        if not outputs or any(y.is_complex() or y.layout != torch.strided for y in outputs):
            return outputs, [], []
        rng = np.random.default_rng(0)
        cotangents = [
            torch.tensor(rng.standard_normal(y.shape) if y.dim() else 1.0, dtype=torch.float32).to(y.dtype)
            for y in outputs
        ]
        found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None or g._is_zerotensor() else g for x, g in zip(inputs, found)]
        return [y.detach().clone() for y in outputs], cotangents, gradients


# ---------------------------------------------------------------- one sample


def _outcome(function: _Function, exporters: list[_Exporter]) -> tuple[State, str] | None:
    """The state of one sample and why; None where PyTorch has no gradient to compare with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not function.inputs:
            return None
        try:
            outputs, cotangents, gradients = function.differentiated(torch.float32)
        except RuntimeError as error:  # a view of a storage larger than its tensor
            return State.NOT_EXPORTED, f"no function of its tensors: {_line(error)}"
        if not outputs:
            return None
        if not gradients or any(y.layout != torch.strided for y in [*outputs, *gradients]):
            return State.NOT_EXPORTED, "complex or sparse tensors"
        if any(not _equal(a, b) for a, b in zip(outputs, function.differentiated(torch.float32, seed=1)[0])):
            return State.NOT_EXPORTED, "random: two calls in PyTorch differ"
        exact = _in_float64(function, outputs, gradients)
        failures = []
        for exporter in exporters:
            try:
                model = exporter(function, len(outputs))
            except Exception as error:  # exporters raise anything
                failures.append((State.NOT_EXPORTED, f"{exporter.name}: {_line(error)}"))
                continue
            state, detail = _compared(model, function.inputs, outputs, cotangents, gradients, exact)
            if state is State.PASSED:
                return state, exporter.name
            failures.append((state, f"{exporter.name}: {detail}"))
            if state not in (State.NOT_EXPORTED, State.NOT_RUN):  # as the trainer, which runs what it exports
                return failures[-1]
        return failures[-1][0], "; ".join(detail for _, detail in failures)


def _in_float64(function: _Function, outputs: list, gradients: list) -> tuple[list, list]:
    try:
        exact, _, exact_gradients = function.differentiated(torch.float64)
    except Exception:  # the operator is for float32 alone
        return outputs, gradients
    same = [a.shape == b.shape for a, b in zip(exact + exact_gradients, outputs + gradients)]
    if len(exact) != len(outputs) or len(same) != len(outputs) + len(gradients) or not all(same):
        return outputs, gradients
    return exact, exact_gradients


class _Exporter:
    """One of the two for one entry; gives up an operator that it has refused `PATIENCE` times running and never taken."""

    def __init__(self, name: str):
        self.name, self._refusals, self._refusal = name, 0, None

    def __call__(self, function: _Function, outputs: int) -> onnx.ModelProto:
        if self._refusals == PATIENCE:
            raise self._refusal
        try:
            model = _exported(function, self.name, outputs)
        except Exception as error:
            if self._refusals is not None:
                self._refusals, self._refusal = self._refusals + 1, error
            raise
        self._refusals = None
        return model


def _exported(function: _Function, exporter: str, outputs: int) -> onnx.ModelProto:
    capture = {"dynamo": functools.partial(capture_dynamo, by_nodes=[]), "torchscript": capture_torchscript}[exporter]
    symbols = [{} for _ in function.inputs]
    with torch.random.fork_rng(), torch.enable_grad():
        model = capture(function, tuple(function.inputs), symbols, OPSET, decided=set())
    normalize.convert_opset(model, OPSET)
    normalize.name_interface(
        model, *([f"{k}{i}" for i in range(n)] for k, n in (("x", len(symbols)), ("y", outputs))), symbols
    )
    normalize.optimize(model, has_cpu_kernel)
    model.ir_version = 10
    return ir.to_proto(model)


def _compared(model, inputs, outputs, cotangents, gradients, exact) -> tuple[State, str]:
    feeds = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
    names = [f"x{i}" for i in range(len(inputs))]
    try:
        gradient = build_gradient(model, of=[f"y{i}" for i in range(len(outputs))], wrt=names)
    except ModelError as error:  # shapes in it contradict ONNX's inference
        return State.NOT_EXPORTED, _line(error)
    except GradientError as error:
        return _forward_alone(model, feeds, outputs, exact[0]) or (State.NO_GRADIENT, _line(error))
    wanted = {v.name for v in gradient.graph.input}
    seeds = {f"y{i}_cotangent": c.numpy() for i, c in enumerate(cotangents)}
    try:
        found = _run(gradient, {k: v for k, v in (feeds | seeds).items() if k in wanted})
    except Exception as error:  # onnxruntime has many, none of them public
        return _forward_alone(model, feeds, outputs, exact[0]) or (
            State.WRONG,
            f"the gradient does not run: {_line(error)}",
        )
    for i, want in enumerate(outputs):
        if failure := _difference(found[f"y{i}"], want, exact[0][i]):
            return State.NOT_EXPORTED, f"another function: output {i} {failure}"
    for i, want in enumerate(gradients):
        if failure := _difference(found[f"x{i}_grad"], want, exact[1][i]):
            return State.WRONG, f"the gradient of input {i} {failure}"
    return State.PASSED, ""


def _forward_alone(model, feeds, outputs, exact) -> tuple[State, str] | None:
    """What is wrong before any gradient, if something is."""
    forward = ir.from_proto(model)
    RemoveGradientMarksPass()(forward)
    try:
        found = _run(ir.to_proto(forward), feeds)
    except Exception as error:
        return State.NOT_RUN, _line(error)
    for i, want in enumerate(outputs):
        if failure := _difference(found[f"y{i}"], want, exact[i]):
            return State.NOT_EXPORTED, f"another function: output {i} {failure}"
    return None


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=left_out(ir.from_proto(model)),
    )
    names = [output.name for output in session.get_outputs()]
    taken = {value.name for value in session.get_inputs()}
    return dict(
        zip(
            names,
            session.run(names, {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in feeds.items() if k in taken}),
        )
    )


def _difference(found: np.ndarray, single: torch.Tensor, exact: torch.Tensor) -> str:
    """What is wrong with `found`, given PyTorch's result in float32 and in float64; "" if nothing is."""
    if tuple(found.shape) != tuple(single.shape):
        return f"has shape {list(found.shape)} instead of {list(single.shape)}"
    found, single, exact = (np.asarray(a, np.float64).ravel() for a in (found, single.numpy(), exact.numpy()))
    compared = ~(np.isnan(single) | np.isnan(exact))
    found, single, exact = found[compared], single[compared], exact[compared]
    finite = np.isfinite(exact) & np.isfinite(single)
    bad = ~finite & (found != exact) & (found != single)
    scale = np.max(np.abs(exact[finite]), initial=0.0)
    own = np.max(np.abs(single - exact)[finite], initial=0.0)
    allowed = max(TOLERANCE * scale, ABSOLUTE, ROUNDING * own)
    with np.errstate(invalid="ignore"):
        bad |= finite & ~(np.abs(found - exact) <= allowed) & ~(np.abs(found - single) <= TOLERANCE * scale)
    if not bad.any():
        return ""
    at = int(np.flatnonzero(bad)[0])
    return (
        f"is {found[at]:.7g} instead of {exact[at]:.7g} ({single[at]:.7g} in float32) in {int(bad.sum())} of {bad.size} places, "
        f"the largest {scale:.3g}"
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, equal_nan=True)


def _line(error: BaseException) -> str:
    while type(error).__name__ in ("TorchExportError", "ConversionError") and error.__cause__:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
