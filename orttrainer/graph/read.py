"""Read a foreign ONNX model, and refuse a broken one before anything else trips over it."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir
from google.protobuf.message import EncodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from orttrainer.errors import ModelError
from orttrainer.graph.names import name_apart
from orttrainer.graph.spelling import in_usual_spelling

STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")

# GroupNormalization of opsets 18 to 20 is deprecated; ONNX Runtime's optimizer writes the others into models that have not
# got them, by their opset or at all.
UNCHECKED = ("GroupNormalization", "LayerNormalization", "SimplifiedLayerNormalization")


def read_model(proto: onnx.ModelProto) -> ir.Model:
    """The model in the IR.

    Raises:
        ModelError: ONNX's checker refuses the model, or data that it keeps in another file is missing.
    """
    for tensor in proto.graph.initializer:
        if uses_external_data(tensor) and not os.path.exists(location := ExternalDataInfo(tensor).location):
            raise ModelError(
                f"the data of {tensor.name!r} is in a file {location!r}, which is not here. Load the model with "
                "onnx.load(path), which reads such data from the folder of the model."
            )
    try:
        proto = in_usual_spelling(proto)
        if _checkable(proto):
            # Full: shapes and types as well, which ONNX infers only through operators that it knows.
            known = all(node.domain in STANDARD_DOMAINS for node in proto.graph.node)
            onnx.checker.check_model(proto, full_check=known)
        model = ir.from_proto(proto)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ir.serde.SerdeError) as error:
        raise ModelError(f"the ONNX model is broken: {_reason(error)}") from error
    _detach(model)
    name_apart(model)
    _complete_calls(model)
    return model


def _checkable(proto: onnx.ModelProto) -> bool:
    """Whether the checker takes such models: none of 2 GB, no input or output of unknown rank, and no `UNCHECKED` operator.

    Runtimes take all of these.
    """
    opset = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    unchecked = [op_type for op_type in UNCHECKED if op_type != "LayerNormalization" or opset < 17]
    types = [value.type for value in (*proto.graph.input, *proto.graph.output)]
    ranked = all(t.HasField("tensor_type") and t.tensor_type.HasField("shape") for t in types)
    checked = all(node.domain not in ("", "ai.onnx") or node.op_type not in unchecked for node in proto.graph.node)
    return ranked and checked and _is_small(proto)


def _is_small(proto: onnx.ModelProto) -> bool:
    try:
        return proto.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF
    except EncodeError:  # protobuf counts by writing
        return False


def _complete_calls(model: ir.Model) -> None:
    """Let calls of functions have all outputs, also those that they leave out, as the inliner wants them."""
    for nodes in (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for node in nodes:
            if (function := model.functions.get(node.op_identifier())) is not None:
                node.resize_outputs(len(function.outputs))


def _detach(model: ir.Model) -> None:
    """Let tensors be renamed without renaming them in the caller's model."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            value.const_value = _renamable(value.const_value)
    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            if tensor.dtype != ir.DataType.STRING:
                own = ir.Tensor(tensor.numpy(), tensor.dtype, shape=tensor.shape)
                node.attributes["value"] = ir.AttrTensor("value", own)


def _renamable(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    """A tensor of the caller's model, not copied, under a name of its own."""
    if not isinstance(tensor, ir.serde.TensorProtoTensor):
        return tensor
    return ir.LazyTensor(lambda: tensor, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)


def _reason(error: Exception) -> str:
    while isinstance(error, ir.serde.SerdeError) and error.__cause__ is not None:
        error = error.__cause__  # which says what, where the others say in what
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("==>"))
