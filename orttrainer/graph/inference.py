"""ONNX's shape inference over a whole model, with the types of sequences and optionals kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import may_decide
from orttrainer.graph.names import values_apart

_SEQUENCES = {"SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence"}
_WITHOUT_VALUES = {"data_prop": False}


def infer_shapes(model: ir.Model) -> None:
    """Give every value the dtype and shape that ONNX finds; `model` is changed in place.

    Where an operator makes all of ONNX's inference fail, it is done again without values, then without its checks.
    """
    values_apart(model)  # it goes by names
    with _constants_inside(model):
        for options in ({}, _WITHOUT_VALUES, {**_WITHOUT_VALUES, "strict_mode": False, "check_type": False}):
            if _succeeds(common.ShapeInferencePass(**options), model):
                break
    _restore_types(model.graph)


def fits_together(model: ir.Model) -> bool:
    """Whether dtypes and shapes are those that operators take and make, as ONNX's full check asks; unknown ones become known."""
    with _constants_inside(model):
        fits = _succeeds(common.ShapeInferencePass(**_WITHOUT_VALUES), model)
    _restore_types(model.graph)
    return fits


@contextlib.contextmanager
def _constants_inside(model: ir.Model) -> Iterator[None]:
    """Let each body have the axes and sizes that it reads from around it: there ONNX sees of a constant the type alone."""
    copies = []
    for body in model.graph.subgraphs():
        for x in dict.fromkeys(x for node in body for x in node.inputs):
            if x is not None and x.graph is not body and not x.is_graph_input() and may_decide(x):
                copy = ir.Value(name=x.name, type=x.type, shape=x.shape, const_value=x.const_value)
                body.register_initializer(copy)
                copies.append((body, copy))
    try:
        yield
    finally:
        for body, copy in copies:
            del body.initializers[copy.name]


def _succeeds(inference: common.ShapeInferencePass, model: ir.Model) -> bool:
    """Whether onnx-ir logs no failure, which is all that it does with one."""
    failures: list[logging.LogRecord] = []
    logger = logging.getLogger(common.shape_inference.__name__)
    logger.addFilter(keep := lambda record: bool(failures.append(record)))
    try:
        inference(model)
    finally:
        logger.removeFilter(keep)
    return not failures


def _restore_types(graph: ir.Graph) -> None:
    """onnx-ir takes the dtype of what a sequence or an optional holds for that of a tensor, and the next inference then fails."""
    for node in graph:
        if node.op_type in _SEQUENCES and node.outputs[0].dtype is not None:
            _set_type(node.outputs[0], ir.SequenceType(ir.TensorType(node.outputs[0].dtype)))
        elif node.op_type == "Optional":
            held = node.inputs[0].type if node.inputs else node.attributes["type"].value.type
            _set_type(node.outputs[0], held and ir.OptionalType(held))
        elif node.op_type == "Identity":
            _set_type(node.outputs[0], node.inputs[0].type)
        elif node.op_type in ("If", "Loop", "Scan"):
            bodies = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
            if node.op_type == "Loop":
                for inside, first in zip(bodies[0].inputs[2:], node.inputs[2:]):
                    _set_type(inside, first.type)
            for body in bodies:
                _restore_types(body)
                for y, inside in zip(node.outputs, body.outputs[1:] if node.op_type == "Loop" else body.outputs):
                    _set_type(y, inside.type)


def _set_type(value: ir.Value, kind: ir.TypeProtocol | None) -> None:
    """Give `value` this type, unless it is that of a tensor."""
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        value.type, value.shape = kind, None
