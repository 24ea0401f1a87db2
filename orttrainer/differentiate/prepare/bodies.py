"""Replace operators that have no rule by the function bodies that ONNX gives them."""

from __future__ import annotations

import logging

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.differentiate.registry import canonical, find_rule, is_non_differentiable
from orttrainer.errors import ModelError
from orttrainer.graph.inference import infer_shapes

log = logging.getLogger("orttrainer")


def without_shadowed_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without those of its functions that have the name of an operator.

    What such a name means is up to runtimes, as ONNX says: ONNX Runtime takes the operator, whatever the body is. Of those
    that it may have, and that are unknown here, a warning says that the body is taken.
    """
    opset = max((entry.version for entry in proto.opset_import if canonical(entry.domain) == ""), default=1)
    called = [function for function in proto.functions if not _is_operator(function, opset)]
    if unknown := [f"{f.domain}.{f.name}" for f in called if f.domain == "com.microsoft"]:
        log.warning(
            "the model's functions %s are taken by their bodies; where ONNX Runtime has an operator of that name, it runs "
            "the operator", ", ".join(unknown),
        )  # fmt: skip
    if len(called) == len(proto.functions):
        return proto
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    del changed.functions[:]
    changed.functions.extend(called)
    return changed


def _is_operator(function: onnx.FunctionProto, opset: int) -> bool:
    if canonical(function.domain) == "":
        return onnx.defs.has(function.name, opset)
    return find_rule(function.domain, function.name) is not None or is_non_differentiable(
        function.domain, function.name
    )


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
