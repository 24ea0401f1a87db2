"""Why no exporter took a module, in one error of ours."""

from __future__ import annotations

import pathlib
import re
import sysconfig
import traceback

import torch

from orttrainer.errors import ExportError, ExportMismatchError, UnsupportedModelError
from orttrainer.export.caught import CaughtBySize
from orttrainer.export.checks.nan_order import nan_in_order
from orttrainer.export.checks.ties import TiesDiffer
from orttrainer.export.values.told import UNTOLD

__all__ = [
    "condensed",
    "contradicts_itself",
    "decides_by_size",
    "failure",
    "lacks_numbers",
    "refuse_frozen_decision",
    "refuse_lost_write",
]

# What NumPy and torch say.
_ARRAYS_OF_OBJECTS = "loop of ufunc does not support argument", "np.ndarray of type numpy.object_"

_LACKS_FORM = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_UNKNOWN_SIZE = re.compile(r"\bu\d+\b")
_CALLED = re.compile(r"target=torch\.ops\.aten\.(\w+)")
_LOST_WRITES = {
    "internal overlap": "windows of `unfold` that overlap",
    "as_strided() is non-compositional": "a view by `as_strided`",
}


def failure(wrapper, inputs, failures):
    """One error with both exporters' reasons, of the class that says most; the reason alone where it is NaN or ties, or ours and the only one."""
    name = type(wrapper.module).__name__
    mismatch = next((error for error in failures.values() if isinstance(error, ExportMismatchError)), None)
    if mismatch is not None and (ordered := nan_in_order(wrapper, inputs)) is not None:
        error = ExportMismatchError(
            f"{name}.forward compares values among which is NaN ({ordered}). PyTorch takes NaN for the largest number and its sign for 0, ONNX "
            f"Runtime for any, so the graph does not compute what the module does: {str(mismatch).split('. ')[0]}.\n"
            "Put a number for NaN before that line: torch.nan_to_num, or torch.where(x.isnan(), torch.inf, x)."
        )
        error.__cause__ = mismatch
        return error
    ties = [error for error in failures.values() if isinstance(error, TiesDiffer)]
    reason = (ties or list(failures.values()))[0]
    if ties or (isinstance(reason, ExportError) and len({condensed(error) for error in failures.values()}) == 1):
        error = _public(reason)(f"{name} could not be exported to ONNX as it trains: {reason}")
        error.__cause__ = reason
        return error
    if (lacking := _lacks_form(failures["dynamo"])) is not None:
        error = UnsupportedModelError(
            f"{name} could not be exported to ONNX as it trains: {lacking}, which neither torch's exporters nor orttrainer "
            "can write in ONNX.\nCompute it with other functions of torch's, or before the step, and give the model the result as an input."
        )
        error.__cause__ = failures["dynamo"]
        return error
    classes = [_public(error) for error in failures.values() if isinstance(error, ExportError)]
    telling = next((found for found in classes if found is not ExportError), ExportError)
    reasons = "".join(f"\n  {exporter}: {condensed(error)}" for exporter, error in failures.items())
    advice = "Take data-dependent Python (if, int(), .item() on tensors) out of forward, or pass an ONNX model."
    if (unknown := _UNKNOWN_SIZE.search(condensed(failures["dynamo"]))) is not None:
        advice = (
            f"{unknown[0]} is a size that forward takes out of a tensor, of which nothing else is known. Where it follows from other "
            "sizes, let Python compute it of these (-(-x.shape[-1] // 2)), not a tensor; or pass it as an input's size."
        )
    if all(isinstance(error, OSError) for error in failures.values()):
        advice = "The system refused this: see that the working folder and the one of temporary files are there and have room."
    error = telling(f"{name} could not be exported to ONNX as it trains:{reasons}\n{advice}")
    error.__cause__ = failures["dynamo"]
    return error


def _public(error: ExportError) -> type[ExportError]:
    """Its class, or the one of those that callers know from which that is made."""
    return next(base for base in type(error).__mro__ if base.__module__ == ExportError.__module__)


def _lacks_form(error) -> str | None:
    """Which operator of forward's an exporter does not know, and in which layer; None if something else is wrong."""
    node = None
    while error is not None:
        if (lacking := _LACKS_FORM.search(str(error))) and type(error).__name__ == "DispatchError":
            complex_valued = " of complex numbers" if "complex-valued" in str(error) else ""
            return f"forward calls {lacking[1]}{complex_valued}{_layer(node)}"
        for frame, _ in traceback.walk_tb(error.__traceback__):
            node = frame.f_locals.get("node", node)
        error = error.__cause__
    return None


def _layer(node) -> str:
    """Which layer of the model a node of torch's graph is of, if it is of one within."""
    stack = [*getattr(node, "meta", {}).get("nn_module_stack", {}).values()][2:]  # behind our wrapper and the model
    return f" in {str(stack[-1][0]).removeprefix('module.')!r}" if stack else ""


def refuse_frozen_decision(module, error):
    """Stop where forward decides by tensor values, or gives them to NumPy: a trace would freeze the first ones."""
    if isinstance(cause := _root(error), TypeError) and any(text in str(cause) for text in _ARRAYS_OF_OBJECTS):
        raise UnsupportedModelError(
            f"{type(module).__name__}.forward leaves torch for NumPy{_place(cause)}, and the numbers of an array are not known while "
            f"a graph is made: NumPy's operators, sums and sort can do without, this function cannot ({condensed(error)}).\n"
            f"Compute with the tensor itself (x.round(), torch.sign(x)), or give the model the result as an input."
        ) from error
    if _is_data_dependent(cause):
        raise UnsupportedModelError(
            f"{type(module).__name__}.forward makes a number of a tensor's value{_place(cause)}, which Python has to know; a graph would "
            f"repeat the first batch's for ever: {condensed(error)}\n"
            f"Compute with the tensor itself (x.round() for round(x.item())), or use torch.where or masks. If only the first call does "
            f"so, as an initialization by the first batch, run one batch through the module, then make the trainer."
        ) from error


def refuse_lost_write(module, error):
    """Stop where forward writes to a view that exporters cannot write through: TorchScript's trace loses what is written there."""
    text = str(_root(error))
    view = next((view for said, view in _LOST_WRITES.items() if said in text), None)
    if view is not None:
        called = _CALLED.search(text)
        raise UnsupportedModelError(
            f"{type(module).__name__}.forward writes in place{f' (`{called[1]}`)' if called else ''} to {view}, and the tensor that it "
            "shows would not have it in a graph.\n"
            "Write to the tensor itself: to a slice, or at places (y[rows, columns] = ...), or compute it anew, by torch.where or F.fold."
        ) from error


def _is_data_dependent(cause) -> bool:
    return "DataDependent" in type(cause).__name__ or "data-dependent" in str(cause)[:500]


def lacks_numbers(error) -> bool:
    """Whether the exporter would have had to know numbers that only a batch tells: also for a key, or in a name."""
    cause = _root(error)
    return _is_data_dependent(cause) or any(
        text in str(cause)[:500] for text in ("unhashable type: non-nested SymInt", UNTOLD)
    )


def decides_by_size(error) -> bool:
    """Whether the exporter would have made a constant of an axis that may vary, or the trace is right for one size only."""
    cause = _root(error)
    by_axes = "inferred ranges from model tracing" in str(cause)[:500]
    return isinstance(cause, CaughtBySize) or by_axes or contradicts_itself(error)


def contradicts_itself(error) -> bool:
    """Whether the trace asks for sizes that are not those of its batch, whose error forward would have caught, or for numbers only."""
    return any(text in str(_root(error))[:500] for text in ("inconsistencies were found", "Cannot call sizes() on"))


def _place(error):
    """Where the last line stands that led to the error and is neither torch's, ours nor Python's own."""
    paths = sysconfig.get_paths()
    passed = torch.__path__[0], str(pathlib.Path(__file__).parents[2])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(passed)]
    frames = [
        f for f in frames if f.filename.startswith(paths["purelib"]) or not f.filename.startswith(paths["stdlib"])
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _root(error):
    while type(error).__name__ in ("TorchExportError", "ConversionError") and error.__cause__:
        error = error.__cause__
    return error


def condensed(error):
    """Type and first telling line of an exporter's text, which can fill pages."""
    error = _root(error)
    if isinstance(error, ExportError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
