"""Bring a model into an opset that the rules know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from orttrainer.differentiate.prepare.bodies import has_body, inlined, schema_of
from orttrainer.errors import ModelError
from orttrainer.graph.logs import without_warnings

OLDEST_OPSET = 18
NEWEST_OPSET = 26
READABLE_OPSET = 28  # brought down to NEWEST_OPSET, the last that ONNX Runtime reads
NEWEST_IR = 13  # that it reads
_BY_ROWS = ("Hardmax", "LogSoftmax", "Softmax")  # before opset 13 of rows: of what lies behind an axis


def with_known_opset(model: ir.Model) -> ir.Model:
    """The model in an opset from OLDEST_OPSET to NEWEST_OPSET.

    Raises:
        ModelError: it has one that ONNX cannot convert to these.
    """
    opset = model.opset_imports.get("", None)
    if opset is None:
        model.opset_imports[""] = OLDEST_OPSET
        return model
    if not 12 <= opset <= READABLE_OPSET:
        raise ModelError(
            f"opset {opset} of the default domain is not supported; convert the model to 12 to {READABLE_OPSET}"
        )
    if opset > NEWEST_OPSET:
        return _brought_down(model, opset)
    if opset >= OLDEST_OPSET:
        return model
    from onnxscript import version_converter  # here: slow to import, seldom needed

    given = {name: value.const_value for name, value in model.graph.initializers.items()}
    try:
        # It says that it has ONNX's own convert, as it was asked to.
        with without_warnings("onnxscript.version_converter"), unconvertible_aside(model):
            version_converter.convert_version(model, OLDEST_OPSET, fallback=True)
    except Exception as error:  # the converter raises whatever its adapters raise
        raise ModelError(
            f"the model has opset {opset} and ONNX cannot convert it to {OLDEST_OPSET}: {error}"
        ) from error
    if model.opset_imports[""] < OLDEST_OPSET:
        raise ModelError(f"the model has opset {opset} and ONNX cannot convert it to {OLDEST_OPSET}; export it again")
    for name, tensor in given.items():
        if name not in model.graph.initializers:  # the converter drops what nothing reads, but that may be asked for
            model.graph.register_initializer(
                ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
            )
    return model


def _brought_down(model: ir.Model, opset: int) -> ir.Model:
    """A model of an opset that ONNX Runtime does not read yet: new operators by their function bodies, the others as they were."""
    new = {
        node.op_type for node in model.graph.all_nodes() if node.domain == "" and has_body(node, model.opset_imports)
    }
    if new := sorted(op_type for op_type in new if not onnx.defs.has(op_type, NEWEST_OPSET)):
        model = inlined(model, [("", op_type) for op_type in new])
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        if not onnx.defs.has(node.op_type, NEWEST_OPSET):
            raise ModelError(f"{node.op_type!r} of node {node.name!r} (opset {opset}) is not in opset {NEWEST_OPSET}")
        now, before = (onnx.defs.get_schema(node.op_type, version) for version in (opset, NEWEST_OPSET))
        for name in set(node.attributes) - set(before.attributes):
            if node.attributes[name].value != ir.serde.deserialize_attribute(now.attributes[name].default_value).value:
                raise ModelError(
                    f"{node.op_type!r} node {node.name!r} has {name}={node.attributes[name].value!r}, which is new in "
                    f"opset {opset}; export the model with opset {NEWEST_OPSET} or older"
                )
            del node.attributes[name]
    model.opset_imports[""] = NEWEST_OPSET
    model.ir_version = min(model.ir_version, NEWEST_IR)
    return model


@contextlib.contextmanager
def unconvertible_aside(model: ir.Model) -> Iterator[None]:
    """Keep from ONNX's converter what it stops at: BatchNormalization in training form, and what the opset does not have;
    and of what was of rows before opset 13 a Softmax that a body reads from around it, which it cannot replace there, and Hardmax, which
    it leaves as it is.

    Before opset 14 that form is told by more outputs than one: Y, running mean and variance, and two that nobody may use.
    The rest is what ONNX Runtime's optimizer writes into models of any opset, in the form of later ones.
    """
    aside, opset = "orttrainer.aside", model.opset_imports.get("", OLDEST_OPSET)
    bodies = ((body, x) for body in model.graph.subgraphs() for node in body for x in node.inputs)
    inside = {x for body, x in bodies if x is not None and x.graph is not body}
    for node in model.graph.all_nodes():
        stops = node.op_type == "BatchNormalization" and opset < 14 and (len(node.outputs) > 1 or _of_pixels(node))
        stops |= node.op_type in _BY_ROWS and opset < 13 and (node.op_type == "Hardmax" or node.outputs[0] in inside)
        if node.domain == "" and (stops or schema_of(node, model.opset_imports) is None):
            node.domain, model.opset_imports[aside] = aside, 1
    yield
    for node in model.graph.all_nodes():
        if node.domain != aside:
            continue
        node.domain = ""
        if node.op_type in _BY_ROWS:
            _of_rows(node)
        if node.op_type == "BatchNormalization":
            if _of_pixels(node):
                raise ModelError(
                    f"the moments of the BatchNormalization that makes {node.outputs[0].name!r} are of single pixels (spatial=0), "
                    "which newer opsets have no more; export the model with a newer opset"
                )
            if any(y.uses() or y.is_graph_output() for y in node.outputs[3:]):
                raise ModelError(
                    f"the saved moments of the BatchNormalization that makes {node.outputs[0].name!r} (outputs 3 and 4) are used, "
                    "which opset 14 has no more; export the model with a newer opset"
                )
            node.resize_outputs(min(len(node.outputs), 3))
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            node.attributes.pop("spatial", None)  # of opsets 7 and 8
    model.opset_imports.pop(aside, None)


def _of_pixels(norm: ir.Node) -> bool:
    return not norm.attributes.get_int("spatial", 1)


def _of_rows(node: ir.Node) -> None:
    """Softmax(x) of rows -> Reshape(Softmax(Flatten(x)), Shape(x)), under the same name; Hardmax likewise."""
    x, y = node.inputs[0], node.outputs[0]
    rows = ir.Node("", "Flatten", [x], [ir.AttrInt64("axis", node.attributes.get_int("axis", 1))], num_outputs=1)
    shape = ir.Node("", "Shape", [x], num_outputs=1)
    whole = ir.Node("", "Reshape", [y, shape.outputs[0]], [ir.AttrInt64("allowzero", 1)], num_outputs=1)
    node.replace_input_with(0, rows.outputs[0])
    node.attributes["axis"] = ir.AttrInt64("axis", 1)
    node.graph.insert_before(node, rows)
    node.graph.insert_after(node, [shape, whole])
    y.replace_all_uses_with(whole.outputs[0], replace_graph_outputs=True)
    whole.replace_input_with(0, y)
    new, name = whole.outputs[0], y.name
    y.name = name and f"{name}/rows"
    new.name, new.type, new.shape, y.shape = name, y.type, y.shape, None
