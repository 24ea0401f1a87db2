"""ONNX's node tests as models that the suite can differentiate: in a supported opset, and in the float dtype asked for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from orttrainer.differentiate import coverage
from orttrainer.differentiate.prepare.opsets import OLDEST_OPSET
from orttrainer.differentiate.registry import is_non_differentiable

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
WELL_KNOWN_OPSET, NEWEST_IR = 23, 10  # what ONNX Runtime reads and has kernels for

# Float inputs that say how to compute, as an attribute does; none is what a model learns.
SETTINGS = {"CastLike": (1,), "Dropout": (1,), "OneHot": (0, 1), "Resize": (1, 2), "Upsample": (1,)}
DTYPE_ATTRIBUTES = {"to", "dtype", "softmax_precision", "output_dtype"}


@dataclass
class NodeTest:
    """One of ONNX's node tests."""

    name: str
    model: onnx.ModelProto
    inputs: dict[str, object] = field(repr=False)  # arrays, or lists of them
    outputs: dict[str, object] = field(repr=False)

    @property
    def wrt(self) -> list[str]:
        """The float inputs but those that are settings."""
        uses = [(x, n, k) for n in self.model.graph.node for k, x in enumerate(n.input)]
        settings = {x for x, node, k in uses if k in SETTINGS.get(node.op_type, ())}
        return [name for name in float_tensors(self.model.graph.input) if name not in settings]

    @property
    def of(self) -> list[str]:
        """The float outputs."""
        return float_tensors(self.model.graph.output)

    @property
    def dtype(self) -> int:
        """The float dtype of the first float input."""
        return next(v.type.tensor_type.elem_type for v in self.model.graph.input if v.name == self.wrt[0])


def node_tests() -> Iterator[NodeTest]:
    """Every node test of the installed onnx, as it is."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in cases:
        graph = case.model.graph
        inputs, outputs = case.data_sets[0]
        given = [v.name for v in graph.input]
        yield NodeTest(
            case.name, case.model, dict(zip(given, map(_array, inputs))),
            dict(zip((v.name for v in graph.output), map(_array, outputs))),
        )  # fmt: skip


def _array(value):
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return [_array(v) for v in value] if isinstance(value, list) else value if value is None else np.asarray(value)


def float_tensors(values: Iterable[onnx.ValueInfoProto]) -> list[str]:
    """The names of those values that are float tensors."""
    return [v.name for v in values if v.type.tensor_type.elem_type in FLOATS]


# -- what can vary ----------------------------------------------------------------------------


@functools.cache
def _states() -> dict[str, str]:
    return {row.op_type: row.state for row in coverage.coverage() if not row.domain}


def varies(test: NodeTest) -> bool:
    """Whether a float output can vary with a float input, by the registry and the schemas of the operators between."""
    states = _states()
    model = onnx.shape_inference.infer_shapes(test.model)
    kinds = {v.name: v.type for v in [*model.graph.value_info, *model.graph.output]}
    reached = set(test.wrt)
    for node in model.graph.node:
        constant = (
            is_non_differentiable(node.domain, node.op_type)
            or (not node.domain and states.get(node.op_type) == coverage.NO_GRADIENT)
            or node.op_type == "Bernoulli"  # its function body compares: draws do not vary with the probability
        )
        if not constant and any(name in reached for name in _names_used(node)):
            reached.update(name for name in node.output if _may_vary(kinds.get(name)))
    return any(name in reached for name in test.of)


def _may_vary(kind: onnx.TypeProto | None) -> bool:
    """Whether a value of this type can hold floats; so can one whose type is not known."""
    return kind is None or kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.elem_type in {0, *FLOATS}


def _names_used(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _names_used(inner)


# -- opsets -----------------------------------------------------------------------------------


def in_supported_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in the oldest opset from 23 on that has its operators, so that ONNX Runtime reads it; in 18 if it is older than 12."""
    opset = next((o.version for o in model.opset_import if not o.domain), None)
    if opset is None or coverage.FIRST_OPSET <= opset <= WELL_KNOWN_OPSET:
        return model
    if opset < coverage.FIRST_OPSET:
        return onnx.version_converter.convert_version(model, OLDEST_OPSET)
    for version in range(WELL_KNOWN_OPSET, opset + 1):
        moved = onnx.ModelProto.FromString(model.SerializeToString())
        moved.ir_version = min(model.ir_version, NEWEST_IR)
        for entry in [*moved.opset_import, *(o for f in moved.functions for o in f.opset_import)]:
            if not entry.domain:
                entry.version = version
        try:
            onnx.checker.check_model(moved, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            continue
        return moved
    return model


# -- dtypes -----------------------------------------------------------------------------------


def with_floats(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """The model with every float tensor of the dtype `dtype`: inputs, initializers, attributes, subgraphs."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    _retype_graph(model.graph, dtype)
    for function in model.functions:
        for node in function.node:
            _retype_node(node, dtype)
    return model


def _retype_graph(graph: onnx.GraphProto, dtype: int) -> None:
    for value in [*graph.input, *graph.output, *graph.value_info]:
        _retype(value.type, dtype)
    for tensor in graph.initializer:
        _retype_tensor(tensor, dtype)
    for node in graph.node:
        _retype_node(node, dtype)


def _retype(kind: onnx.TypeProto, dtype: int) -> None:
    while (form := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, form).elem_type
    if form == "tensor_type" and kind.tensor_type.elem_type in FLOATS:
        kind.tensor_type.elem_type = dtype


def _retype_tensor(tensor: TensorProto, dtype: int) -> None:
    if tensor.data_type in FLOATS:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(dtype))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _retype_node(node: onnx.NodeProto, dtype: int) -> None:
    if node.op_type == "ConstantOfShape" and not node.attribute:  # float32 zeros
        zero = np.zeros(1, helper.tensor_dtype_to_np_dtype(dtype))
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(zero)))
    for attribute in node.attribute:
        if attribute.HasField("g"):
            _retype_graph(attribute.g, dtype)
        elif attribute.HasField("t"):
            _retype_tensor(attribute.t, dtype)
        elif attribute.name in DTYPE_ATTRIBUTES and attribute.i in FLOATS:
            attribute.i = dtype
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            numbers = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            array = np.asarray(numbers, helper.tensor_dtype_to_np_dtype(dtype))
            attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
        for inner in attribute.graphs:
            _retype_graph(inner, dtype)
