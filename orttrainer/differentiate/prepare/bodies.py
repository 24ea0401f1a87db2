"""Replace operators that have no rule by the function bodies that ONNX gives them."""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.differentiate.registry import find_rule, is_non_differentiable
from orttrainer.errors import ModelError
from orttrainer.graph.inference import infer_shapes


def with_function_bodies(model: ir.Model) -> ir.Model:
    """Replace operators that have a function body and no rule of ours, until none is left."""
    while ids := {
        (node.domain, node.op_type)
        for node in model.graph.all_nodes()
        if find_rule(node.domain, node.op_type) is None
        and not is_non_differentiable(node.domain, node.op_type)
        and has_body(node, model.opset_imports)
    }:
        model = inlined(model, sorted(ids))
    return model


def inlined(model: ir.Model, ids: list[tuple[str, str]]) -> ir.Model:
    """ONNX's inliner on a model whose large tensors stay behind: a protobuf ends at 2 GB, and they are the caller's own."""
    model = _inlined_with_gaps(model, ids)
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


def _inlined_with_gaps(model: ir.Model, ids: list[tuple[str, str]]) -> ir.Model:
    """Expand the nodes of these operators that leave an input out before the last: ONNX's inliner asks for its type and fails."""
    given = [n for n in model.graph.all_nodes() if (n.domain, n.op_type) in ids and None in n.inputs]
    for index, node in enumerate(given):
        schema = schema_of(node, model.opset_imports)
        if not schema.has_context_dependent_function:
            continue
        if any(x is not None and x.type is None for x in node.inputs):
            infer_shapes(model)
        if any(x is not None and x.type is None for x in node.inputs):
            continue
        types = [onnx.TypeProto() if x is None else ir.serde.serialize_type(x.type) for x in node.inputs]
        for x, proto in zip(node.inputs, types):
            if x is not None and x.shape is not None:
                ir.serde.serialize_shape_into(proto, x.shape)
        proto = onnx.FunctionProto.FromString(
            schema.get_context_dependent_function_with_opset_version(
                max(schema.context_dependent_function_opset_versions),
                ir.serde.serialize_node(node).SerializeToString(),
                [t.SerializeToString() for t in types],
            )
        )
        proto.domain, proto.name = "orttrainer.body", f"{node.op_type}_{index}"
        body = ir.from_proto(proto)
        body.opset_imports.update(model.opset_imports)
        model.functions[body.identifier()] = body
        node.domain, node.op_type = proto.domain, proto.name
        model.opset_imports[proto.domain] = 1
    if model.functions:
        common.InlinePass()(model)
        model.opset_imports.pop("orttrainer.body", None)
    return model


def has_body(node: ir.Node, opset_imports: dict[str, int]) -> bool:
    schema = schema_of(node, opset_imports)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def schema_of(node: ir.Node, opset_imports: dict[str, int]) -> onnx.defs.OpSchema | None:
    """ONNX's schema of the operator of `node`, or None."""
    try:
        return onnx.defs.get_schema(node.op_type, opset_imports.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return None
