"""Read a foreign ONNX model, and refuse a broken one before anything else trips over it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from google.protobuf.message import EncodeError, Message
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from orttrainer.errors import ModelError
from orttrainer.graph.declared import forget_wrong_shapes
from orttrainer.graph.inference import fits_together
from orttrainer.graph.names import name_apart
from orttrainer.graph.spelling import in_usual_spelling, nodes_of

STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")

# GroupNormalization of opsets 18 to 20 is deprecated; ONNX Runtime's optimizer writes the others into models that have not
# got them, by their opset or at all.
UNCHECKED = ("GroupNormalization", "LayerNormalization", "SimplifiedLayerNormalization")

_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
_ASIDE = "orttrainer.unchecked"
_BROKEN = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ir.serde.SerdeError)


def read_model(proto: onnx.ModelProto) -> ir.Model:
    """The model in the IR, without the shapes that it declares and its operators contradict.

    Raises:
        ModelError: ONNX's checker refuses the model, a text in it is not UTF-8, or data that it keeps in another file is missing.
    """
    _check_texts(proto)
    for version in (entry.version for entry in proto.opset_import if entry.domain == "com.microsoft"):
        if version > 1:
            raise ModelError(
                f"the ONNX model imports 'com.microsoft' in version {version}, of which there is version 1 only"
            )
    for tensor in proto.graph.initializer:
        if uses_external_data(tensor) and not os.path.exists(location := ExternalDataInfo(tensor).location):
            raise ModelError(
                f"the data of {tensor.name!r} is in a file {location!r}, which is not here. Load the model with "
                "onnx.load(path), which reads such data from the folder of the model."
            )
    try:
        proto = in_usual_spelling(proto)
        checkable = _checkable(proto) if _is_small(proto) else None
        # Full: shapes and types as well, which ONNX infers only through operators that it knows.
        full = checkable is proto and all(node.domain in STANDARD_DOMAINS for node in proto.graph.node)
        mismatch = None if checkable is None else _mismatch(checkable, full)
        model = ir.from_proto(proto)
    except (*_BROKEN, ValueError) as error:  # the last of a dtype that there is not
        raise ModelError(f"the ONNX model is broken: {_reason(error)}") from error
    _check_tensors(model)
    _detach(model)
    name_apart(model)
    if mismatch is not None or not full or any(node.op_type == "Loop" for node in model.graph.all_nodes()):
        forget_wrong_shapes(model)
        if mismatch is not None and not fits_together(model):
            raise ModelError(f"the ONNX model is broken: {_reason(mismatch)}") from mismatch
    _check_recurrent(model)
    _check_dropouts(model)
    _complete_calls(model)
    return model


def _mismatch(proto: onnx.ModelProto, full: bool) -> onnx.shape_inference.InferenceError | None:
    """What the checker says of dtypes and shapes; of all else it raises."""
    try:
        onnx.checker.check_model(proto, full_check=full)
    except onnx.shape_inference.InferenceError as error:
        return error
    return None


def _check_texts(message: Message) -> None:
    """That names and what else is text are UTF-8: the checker lets others pass, which no graph can be written with."""
    for field, value in message.ListFields():
        values = [value] if isinstance(value, (str, bytes, Message)) else value
        if field.type == field.TYPE_MESSAGE:
            for part in values:
                _check_texts(part)
        elif field.type == field.TYPE_STRING:
            for text in values:
                if isinstance(text, bytes):  # as protobuf gives what it cannot decode
                    raise ModelError(f"the ONNX model is broken: {text!r} ({field.full_name}) is no text in UTF-8")


def _check_tensors(model: ir.Model) -> None:
    """That initializers have the bytes that their shapes take: the checker lets more pass, before 1.22 less; they have these shapes."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape)
        given = len(tensor.raw.raw_data) if isinstance(tensor, ir.serde.TensorProtoTensor) else 0
        if given and given != tensor.nbytes:
            raise ModelError(
                f"initializer {name!r} has {given} bytes, and its shape {list(tensor.shape.numpy())} takes {tensor.nbytes}"
            )


def _check_recurrent(model: ir.Model) -> None:
    """That weights of recurrent layers fit their hidden size, as ONNX Runtime asks when it runs; the checker does not."""
    for node in model.graph.all_nodes():
        hidden = node.attributes.get_int("hidden_size", 0)
        if node.domain != "" or node.op_type not in _GATES or not hidden:
            continue
        x, *weights = node.inputs[:4]
        directions = 2 if node.attributes.get_string("direction", "forward") == "bidirectional" else 1
        rows, size = _GATES[node.op_type] * hidden, None if x is None or x.shape is None else x.shape[-1]
        asked = ("W", (directions, rows, size)), ("R", (directions, rows, hidden)), ("B", (directions, 2 * rows))
        for (name, sizes), value in zip(asked, weights):
            found = None if value is None else value.shape
            if found is not None and (len(found) != len(sizes) or any(map(_differ, found, sizes))):
                raise ModelError(
                    f"{name} of the {node.op_type} that makes {next(y.name for y in node.outputs if y.name)!r} ({value.name!r}) "
                    f"has the shape {found}; hidden_size={hidden}, its direction and its input ask for {ir.Shape(sizes)}"
                )


def _check_dropouts(model: ir.Model) -> None:
    """That rates are below 1, as ONNX says, and ONNX Runtime when it runs, also where nothing is dropped; the checker does not."""
    for node in _nodes(model):
        given = node.inputs[1] if node.op_type == "Dropout" and node.domain == "" and len(node.inputs) > 1 else None
        tensor = None if given is None or given.is_graph_input() else ir.convenience.get_const_tensor(given)
        ratio = None if tensor is None else tensor.numpy()
        if ratio is not None and not ((ratio >= 0.0) & (ratio < 1.0)).all():
            raise ModelError(
                f"the Dropout that makes {node.outputs[0].name!r} has the ratio {ratio.tolist()}; it must be at least 0 and below 1"
            )


def _differ(size, other) -> bool:
    return isinstance(size, int) and isinstance(other, int) and size != other


def _checkable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy that the checker takes: of known ranks, and with `UNCHECKED` operators in a domain of their own.

    Runtimes take the others, too.
    """
    opset = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    unchecked = [op_type for op_type in UNCHECKED if op_type != "LayerNormalization" or opset < 17]
    if not any(_open(proto)) and not any(node.op_type in unchecked for node in nodes_of(proto)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for value in _open(copy):
        value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
        value.type.tensor_type.shape.SetInParent()
    for node in nodes_of(copy):
        if node.domain == "" and node.op_type in unchecked:
            node.domain = _ASIDE
    for owner in (copy, *copy.functions):
        owner.opset_import.append(onnx.helper.make_opsetid(_ASIDE, 1))
    return copy


def _open(proto: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Inputs and outputs of unknown rank, and outputs of unknown type."""
    for value in proto.graph.input:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            yield value
    for value in proto.graph.output:
        kind = value.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not value.type.tensor_type.HasField("shape")):
            yield value


def _is_small(proto: onnx.ModelProto) -> bool:
    try:
        return proto.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF
    except EncodeError:  # protobuf counts by writing
        return False


def _complete_calls(model: ir.Model) -> None:
    """Let calls of functions have all outputs, also those that they leave out, as the inliner wants them.

    It gives the results of the body the names of the outputs: with "" for a name they would be left out within the body, too.
    """
    for node in _nodes(model):
        if (function := model.functions.get(node.op_identifier())) is not None:
            node.resize_outputs(len(function.outputs))
            for value in node.outputs:
                value.name = value.name or None


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Those of the graph, of functions, and of the bodies of both."""
    for owner in (model.graph, *model.functions.values()):
        yield from owner.all_nodes()


def _detach(model: ir.Model) -> None:
    """Let tensors be renamed without renaming them in the caller's model."""
    bodies = (body for owner in (model.graph, *model.functions.values()) for body in owner.subgraphs())
    for graph in (model.graph, *bodies):
        for value in graph.initializers.values():
            value.const_value = _renamable(value.const_value)
    for node in _nodes(model):
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
