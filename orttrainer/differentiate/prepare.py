"""Bring a foreign model into the form that the driver reads.

Model-local functions are inlined, opsets below 18 are converted up (so that rules know one
form of each operator), operators without a rule are replaced by their ONNX function body,
every value gets its dtype and shape, and nodes are sorted and named.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.differentiate.registry import find_rule, is_non_differentiable
from orttrainer.errors import ModelError

OLDEST_OPSET = 18
NEWEST_OPSET = 23


def prepare(model: ir.Model) -> ir.Model:
    """Return `model` (changed in place where that suffices) ready to be differentiated.

    Raises:
        ModelError: an opset outside 12 to 23, or a model that ONNX cannot make sense of.
    """
    common.InlinePass()(model)
    model = _with_known_opset(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    model = _with_function_bodies(model)
    common.TopologicalSortPass()(model)
    model = common.ShapeInferencePass(data_prop=True)(model).model
    _complete_types(model.graph)
    _name_nodes(model.graph)
    return model


def _with_known_opset(model: ir.Model) -> ir.Model:
    opset = model.opset_imports.get("", None)
    if opset is None:
        model.opset_imports[""] = OLDEST_OPSET
        return model
    if not 12 <= opset <= NEWEST_OPSET:
        raise ModelError(f"opset {opset} of the default domain is not supported; convert the model to 12 to {NEWEST_OPSET}")
    if opset >= OLDEST_OPSET:
        return model
    from onnxscript import version_converter  # here: slow to import, seldom needed

    try:
        version_converter.convert_version(model, OLDEST_OPSET, fallback=True)
    except Exception as error:  # the converter raises whatever its adapters raise
        raise ModelError(f"the model has opset {opset} and ONNX cannot convert it to {OLDEST_OPSET}: {error}") from error
    if model.opset_imports[""] < OLDEST_OPSET:
        raise ModelError(f"the model has opset {opset} and ONNX cannot convert it to {OLDEST_OPSET}; export it again")
    return model


def _with_function_bodies(model: ir.Model) -> ir.Model:
    """Replace operators that have a function body and no rule of ours, until none is left."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    while ids := {
        (node.domain, node.op_type)
        for node in model.graph.all_nodes()
        if find_rule(node.domain, node.op_type) is None
        and not is_non_differentiable(node.domain, node.op_type)
        and _has_body(node, model.opset_imports)
    }:
        model = ir.from_proto(_inline(model, sorted(ids)))
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        for name, tensor in tensors.items():  # the caller's own tensors, not copies of them
            model.graph.initializers[name].const_value = tensor
    return model


def _inline(model: ir.Model, ids: list[tuple[str, str]]) -> onnx.ModelProto:
    """ONNX's inliner on a model whose large tensors stay behind (a protobuf ends at 2 GB)."""
    large = [v for v in model.graph.initializers.values() if v.const_value is not None and v.const_value.nbytes > 1024]
    tensors = [v.const_value for v in large]
    for value in large:
        value.const_value = ir.tensor(np.empty(0, value.dtype.numpy()), name=value.name, dtype=value.dtype)
    try:
        return onnx.inliner.inline_selected_functions(ir.to_proto(model), ids, False, True)
    finally:
        for value, tensor in zip(large, tensors):
            value.const_value = tensor


def _has_body(node: ir.Node, opset_imports: dict[str, int]) -> bool:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_imports.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return False
    return schema.has_function or schema.has_context_dependent_function


def _complete_types(graph: ir.Graph) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None and (value.type is None or value.shape is None):
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape)


def _name_nodes(graph: ir.Graph) -> None:
    for index, node in enumerate(graph):
        if not node.name:
            node.name = f"{node.op_type}_{index}"
        for position, value in enumerate(node.outputs):
            if not value.name:
                value.name = f"{node.name}:{position}"
