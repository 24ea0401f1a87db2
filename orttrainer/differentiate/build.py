"""`build_gradient`: an ONNX model in, the same model with its gradients as outputs out."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from orttrainer.differentiate.driver import FLOATS, differentiate
from orttrainer.differentiate.limits import only_instructs
from orttrainer.differentiate.prepare import prepare
from orttrainer.differentiate.prepare.bodies import without_shadowed_functions
from orttrainer.errors import InvalidArgumentError, ModelError
from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.declared import inline_functions
from orttrainer.graph.names import free_name
from orttrainer.graph.notes import Notes
from orttrainer.graph.passes.axes import AllAxesPass
from orttrainer.graph.passes.empty_products import EmptyProductsPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.padded_pools import PaddedPoolsPass
from orttrainer.graph.passes.random import ShareSubexpressionsPass
from orttrainer.graph.passes.scatter import ScatterReductionPass
from orttrainer.graph.passes.stock import RangesApartPass
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.read import read_model
from orttrainer.graph.subgraphs import lift_initializers


def build_gradient(
    model: onnx.ModelProto | str | os.PathLike,
    of: str | Sequence[str] | None = None,
    wrt: str | Sequence[str] | None = None,
) -> onnx.ModelProto:
    """Add the gradient of an ONNX model to it.

    Args:
        model: an ONNX model (opset 12 to 28), or the path of one.
        of: name or names of the float outputs to differentiate; by default the first output.
            A scalar output is differentiated with cotangent 1; for any other the new model
            has one more input, `<output>_cotangent`, of the output's dtype and shape.
        wrt: names of float inputs or initializers to differentiate with respect to; by
            default all float initializers (but those that are only scales or roi of a Resize or
            ratio of a Dropout), or all float inputs if there are none.

    Returns:
        A model with the same inputs and outputs, but for outputs that are maps, and one more output `<name>_grad` for each
        name in `wrt`: the sum over `of` of (cotangent * d output / d name), in the dtype and
        shape of `name`; zeros where nothing depends on it. Standard operators only.

    Raises:
        ModelError: a name that the model does not have, or that is not a float tensor.
        MissingGradientError: an operator between `wrt` and `of` has no gradient rule.

    Example: `onnx.save(build_gradient("model.onnx", of="loss"), "gradient.onnx")`
    """
    proto = model if isinstance(model, onnx.ModelProto) else load_model(model)
    return gradient_of(read_model(without_shadowed_functions(proto)), of, wrt)


def gradient_of(
    original: ir.Model, of: str | Sequence[str] | None = None, wrt: str | Sequence[str] | None = None
) -> onnx.ModelProto:
    """`build_gradient` of a model that is not checked, as `check_vjp` needs it for operators without a float64 form."""
    inline_functions(original)
    lift_initializers(original)
    Notes.of(original).mark(original)
    wrt = _default_sources(original.graph) if wrt is None else _names("wrt", wrt)
    forward = prepare(original)
    graph = forward.graph
    outputs = _outputs(graph, of)
    sources = _sources(graph, wrt)
    op = Builder(graph, "grad")
    seeds = {value: _cotangent(op, value) for value in outputs}
    gradients = differentiate(op, seeds, sources)
    for source in sources:
        gradient = gradients[source] if gradients[source] is not None else op.zeros_like(source)
        graph.outputs.append(named_output(op, gradient, f"{source.name}_grad", source))
    RemoveGradientMarksPass()(forward)
    RemoveUnusedNodesPass()(forward)
    AllAxesPass()(forward)
    EmptyProductsPass()(forward)
    PaddedPoolsPass()(forward)
    ScatterReductionPass()(forward)
    RangesApartPass()(forward)
    ShareSubexpressionsPass()(forward)
    return ir.to_proto(forward)


def load_model(path: str | os.PathLike) -> onnx.ModelProto:
    """Read a file, in the format that its name ends with.

    Raises:
        ModelError: it, or a file with data that it names, cannot be read as an ONNX model.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgumentError(f"model must be an onnx.ModelProto or the path of one, got {type(path).__name__}")
    try:
        return onnx.load(os.fspath(path))
    except OSError:
        raise
    except Exception as error:  # each format has classes of its own
        raise ModelError(f"{os.fspath(path)!r} cannot be read as an ONNX model: {error}") from error


def _names(role: str, given: str | Sequence[str]) -> list[str]:
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, (list, tuple)) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"{role} must be a name or a list of names, got {given!r}")
    return names


def named_output(op: Builder, value: ir.Value, name: str, like: ir.Value) -> ir.Value:
    """`value` under the name `name` (or name_2, ... if that is taken), with the type of `like`."""
    unique = _unused_name(op.graph, name)
    if value.producer() is None or value.is_graph_output() or not value.name.startswith("grad"):
        value = op.Identity(value)
    value.name = unique
    value.type = like.type
    if like.shape is not None:
        value.shape = like.shape.copy()
    return value


def _outputs(graph: ir.Graph, of: str | Sequence[str] | None) -> list[ir.Value]:
    if not graph.outputs:
        raise ModelError("the model has no outputs")
    by_name = {value.name: value for value in graph.outputs}
    names = [graph.outputs[0].name] if of is None else _names("of", of)
    for name in names:
        if name not in by_name:
            raise ModelError(f"of={name!r} is not an output of the model; its outputs are {sorted(by_name)}")
        if by_name[name].dtype not in FLOATS:
            raise ModelError(f"output {name!r} has dtype {by_name[name].dtype}; only float outputs have gradients")
    return [by_name[name] for name in dict.fromkeys(names)]


def _default_sources(graph: ir.Graph) -> list[str]:
    """All float initializers of the model as given (not the constants that `prepare` adds), else all float inputs."""
    floats = [
        v.name
        for v in graph.initializers.values()
        if v.const_value is not None and v.const_value.dtype in FLOATS and not only_instructs(v)
    ]
    if not (floats := floats or [v.name for v in graph.inputs if v.dtype in FLOATS]):
        raise ModelError(
            "the model has no float initializer and no float input, so there is nothing to differentiate by"
        )
    return floats


def _sources(graph: ir.Graph, names: Sequence[str]) -> list[ir.Value]:
    by_name = {value.name: value for value in graph.inputs} | dict(graph.initializers)
    for name in names:
        if name not in by_name:
            raise ModelError(
                f"wrt={name!r} is neither an input nor an initializer of the model; it has {sorted(by_name)}"
            )
        if by_name[name].dtype not in FLOATS:
            raise ModelError(f"{name!r} has dtype {by_name[name].dtype}; only float tensors have gradients")
    return [by_name[name] for name in dict.fromkeys(names)]


def _cotangent(op: Builder, output: ir.Value) -> ir.Value:
    if static_dims(output) == ():
        return op.const(np.ones((), output.dtype.numpy()), output.dtype)
    name = _unused_name(op.graph, f"{output.name}_cotangent")
    cotangent = ir.Value(name=name, type=output.type, shape=output.shape and output.shape.copy())
    op.graph.inputs.append(cotangent)
    return cotangent


def _unused_name(graph: ir.Graph, name: str) -> str:
    """`name`, or the first of name_2, name_3, ... that the graph has not got."""
    taken = {v.name for node in graph for v in node.outputs} | {v.name for v in graph.inputs} | set(graph.initializers)
    return free_name(name, taken)
