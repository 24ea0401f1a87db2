"""What a user's function may make of an exported graph, and what the training needs of it."""

from __future__ import annotations

import onnx

from orttrainer.errors import InvalidArgumentError, ModelError
from orttrainer.export.forward_graph import ForwardGraph
from orttrainer.graph.read import read_model

__all__ = ["check_postprocessed"]


def check_postprocessed(given: onnx.ModelProto, changed: onnx.ModelProto, forward: ForwardGraph) -> None:
    """Check that a changed graph has the inputs, outputs and weights of the one that was exported.

    Args:
        given: the exported model.
        changed: what the user's function made of a copy of it.
        forward: what `given` was made from; the values of its parameters and buffers are the module's own.

    Raises:
        InvalidArgumentError: `changed` is no valid ONNX model, or an input, an output or a weight is missing, renamed or
            of another shape or dtype.
    """
    for role in ("input", "output"):
        names, now = ([value.name for value in getattr(model.graph, role)] for model in (given, changed))
        if names != now:
            raise _error(f"the {role}s {now}, but exported were {names}")
    tensors, now = ({tensor.name: tensor for tensor in model.graph.initializer} for model in (given, changed))
    for name in (*forward.parameters, *forward.buffers):
        if name not in now:
            raise _error(f"no initializer {name!r}, which is a weight of the module")
        kinds = [
            (list(tensor.dims), onnx.TensorProto.DataType.Name(tensor.data_type))
            for tensor in (tensors[name], now[name])
        ]
        if kinds[0] != kinds[1]:
            raise _error(
                f"{name!r} as {kinds[1][1]} {kinds[1][0]}, but it is {kinds[0][1]} {kinds[0][0]} in the module"
            )

    try:
        read_model(changed)
    except ModelError as error:
        raise InvalidArgumentError(f"what the postprocess function left cannot be used: {error}") from error


def _error(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"after the postprocess function the graph has {what}. It may change nodes and constants; inputs, outputs and "
        "weights have to stay."
    )
