"""Bring a foreign model into the form that the driver reads.

Model-local functions are inlined, opsets below 18 are converted up (so that rules know one
form of each operator), operators without a rule are replaced by their ONNX function body,
every value gets its dtype and shape, and nodes are sorted and named.
"""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.differentiate.registry import find_rule, is_non_differentiable
from orttrainer.errors import ModelError
from orttrainer.graph.builder import infer_outputs
from orttrainer.graph.passes.stop_gradient import DOMAIN as STOP_GRADIENT_DOMAIN
from orttrainer.graph.passes.stop_gradient import STOP_GRADIENT

OLDEST_OPSET = 18
NEWEST_OPSET = 23

# Operators that ONNX has no schema for; their first output has dtype and shape of the first input.
LIKE_FIRST_INPUT = {("com.microsoft", op_type) for op_type in ("BiasGelu", "FastGelu", "Gelu", "Inverse", "QuickGelu")}
LIKE_FIRST_INPUT.add((STOP_GRADIENT_DOMAIN, STOP_GRADIENT))


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
    if _infer_foreign(model.graph):
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
        raise ModelError(
            f"opset {opset} of the default domain is not supported; convert the model to 12 to {NEWEST_OPSET}"
        )
    if opset >= OLDEST_OPSET:
        return model
    from onnxscript import version_converter  # here: slow to import, seldom needed

    try:
        version_converter.convert_version(model, OLDEST_OPSET, fallback=True)
    except Exception as error:  # the converter raises whatever its adapters raise
        raise ModelError(
            f"the model has opset {opset} and ONNX cannot convert it to {OLDEST_OPSET}: {error}"
        ) from error
    if model.opset_imports[""] < OLDEST_OPSET:
        raise ModelError(f"the model has opset {opset} and ONNX cannot convert it to {OLDEST_OPSET}; export it again")
    return model


def _with_function_bodies(model: ir.Model) -> ir.Model:
    """Replace operators that have a function body and no rule of ours, until none is left."""
    while ids := {
        (node.domain, node.op_type)
        for node in model.graph.all_nodes()
        if find_rule(node.domain, node.op_type) is None
        and not is_non_differentiable(node.domain, node.op_type)
        and _has_body(node, model.opset_imports)
    }:
        model = _inlined(model, sorted(ids))
    return model


def _inlined(model: ir.Model, ids: list[tuple[str, str]]) -> ir.Model:
    """ONNX's inliner on a model whose large tensors stay behind: a protobuf ends at 2 GB, and they are the caller's own."""
    graph, inputs = model.graph, {value.name for value in model.graph.inputs}
    tensors = {name: value.const_value for name, value in graph.initializers.items() if value.const_value is not None}
    large = [name for name, tensor in tensors.items() if tensor.nbytes > 1024]
    for name in large:
        value = graph.initializers.pop(name)
        value.const_value = None
        if name not in inputs:
            graph.inputs.append(value)
    try:
        expanded = ir.from_proto(onnx.inliner.inline_selected_functions(ir.to_proto(model), ids, False, True))
    except Exception as error:  # onnx raises several types from C++
        names = ", ".join(op_type for _, op_type in ids)
        raise ModelError(
            f"ONNX cannot expand the function bodies of {names}, which have no rule here: {error}"
        ) from error
    given = {value.name: value for value in expanded.graph.inputs}
    for name, tensor in tensors.items():
        value = given.get(name) or expanded.graph.initializers[name]
        value.const_value = tensor
        if name in large:
            if name not in inputs:
                expanded.graph.inputs.remove(value)
            expanded.graph.register_initializer(value)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(expanded)
    return expanded


def _has_body(node: ir.Node, opset_imports: dict[str, int]) -> bool:
    schema = schema_of(node, opset_imports)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def schema_of(node: ir.Node, opset_imports: dict[str, int]) -> onnx.defs.OpSchema | None:
    """ONNX's schema of the operator of `node`, or None."""
    try:
        return onnx.defs.get_schema(node.op_type, opset_imports.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return None


def _infer_foreign(graph: ir.Graph) -> bool:
    """Type the outputs of `LIKE_FIRST_INPUT` and FusedMatMul, and what lies between them; whether there was any."""
    foreign = False
    for node in graph:
        y = node.outputs[0]
        if (node.domain, node.op_type) in LIKE_FIRST_INPUT:
            x = node.inputs[0]
            foreign, y.type, y.shape = True, x.type, x.shape and x.shape.copy()
        elif (node.domain, node.op_type) == ("com.microsoft", "FusedMatMul"):
            foreign, y.type, y.shape = True, node.inputs[0].type, _fused_matmul_shape(node)
        elif foreign and y.type is None and (schema := schema_of(node, graph.opset_imports)) is not None:
            infer_outputs(node, schema, graph.opset_imports)
    return foreign


def _fused_matmul_shape(node: ir.Node) -> ir.Shape | None:
    shapes = [x.shape for x in node.inputs]
    if any(shape is None or len(shape) < 2 for shape in shapes):
        return None
    a, b = (
        [*shape[:-2], shape[-1], shape[-2]]
        if name in node.attributes and node.attributes[name].as_int()
        else list(shape)
        for shape, name in zip(shapes, ("transA", "transB"))
    )
    count = max(len(a), len(b)) - 2
    batches = zip([1] * (count + 2 - len(a)) + a[:-2], [1] * (count + 2 - len(b)) + b[:-2])
    return ir.Shape([q if p == 1 else p if q == 1 or p == q else None for p, q in batches] + [a[-2], b[-1]])


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
