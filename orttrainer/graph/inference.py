"""ONNX's shape inference over a whole model, with the types of sequences and optionals kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from unittest import mock

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import infer_rank, may_decide, same_dim
from orttrainer.graph.equations import einsum_labels, einsum_terms
from orttrainer.graph.logs import without_warnings
from orttrainer.graph.names import values_apart
from orttrainer.graph.subgraphs import values_behind

_SEQUENCES = {"SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence"}
_ASIDE = "orttrainer.uninferred"
_WITHOUT_VALUES = {"data_prop": False}


def infer_shapes(model: ir.Model) -> None:
    """Give every value the dtype and shape that ONNX finds; `model` is changed in place.

    Where an operator makes all of ONNX's inference fail, it is done again without values, then without its checks; and
    without an Attention of which it takes an unknown size, or the length of a past, for 0, and an Einsum of whose operands it
    does not know which is repeated.
    """
    values_apart(model)  # it goes by names
    doubtful = [node for node in model.graph.all_nodes() if node.op_type in _RIGHT_SIZES and node.domain == ""]
    given = {y: y.shape for graph in model.graphs() for node in graph for y in node.outputs} if doubtful else {}
    right: dict[ir.Node, dict[ir.Value, ir.Shape]] = {}
    while True:
        with _constants_inside(model), _unknown_to_onnx(model, right):
            for options in ({}, _WITHOUT_VALUES, {**_WITHOUT_VALUES, "strict_mode": False, "check_type": False}):
                if _succeeds(common.ShapeInferencePass(**options), model):
                    break
        if any([infer_rank(node) for node in model.graph.all_nodes()]):
            continue
        sizes = ((node, _RIGHT_SIZES[node.op_type](node)) for node in doubtful if node not in right)
        misread, found = next(((node, found) for node, found in sizes if found), (None, None))
        if misread is None:
            break
        right[misread] = found
        _forget_names(given, misread, found, model.graph)
        for shapes in (given, *right.values()):
            for y, shape in shapes.items():
                y.shape = shape and shape.copy()
    _restore_types(model.graph)


def fits_together(model: ir.Model) -> bool:
    """Whether dtypes and shapes are those that operators take and make, as ONNX's full check asks; unknown ones become known."""
    with _constants_inside(model):
        fits = _succeeds(common.ShapeInferencePass(**_WITHOUT_VALUES), model)
    _restore_types(model.graph)
    return fits


def _attention_sizes(node: ir.Node) -> dict[ir.Value, ir.Shape]:
    """The shapes of those outputs that have a size by which ONNX's inference counts what it does not know, or a past, as 0."""
    inputs, outputs = [*node.inputs, *[None] * 6], [*node.outputs, *[None] * 4]
    (_, k, v), past, y, scores = inputs[:3], inputs[4], outputs[0], outputs[3]
    if any(x is not None and x.shape is None for x in (k, v, past)):
        return {}
    sizes = {}
    if y.shape is not None and len(v.shape) == 3 and not isinstance(v.shape[2], int):
        heads = {node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads")}
        sizes[y] = ir.Shape([*y.shape.dims[:2], v.shape[2] if len(heads) == 1 else None])
    if scores is not None and scores.shape is not None:
        lengths = [x.shape[-2] for x in (k, past) if x is not None]
        known = all(isinstance(length, int) for length in lengths)
        total = sum(lengths) if known else lengths[0] if past is None else None
        if not (known and scores.shape[3] == total):
            sizes[scores] = ir.Shape([*scores.shape.dims[:3], total])
    return sizes


def _einsum_sizes(node: ir.Node) -> dict[ir.Value, ir.Shape]:
    """The shape of its output, where ONNX's inference has a size of the first operand for one that another may be repeated to."""
    (y,), (terms, result) = node.outputs, einsum_terms(node)
    if any(x.shape is None for x in (y, *node.inputs)):
        return {}
    sizes: dict[str | int, list] = {}
    for term, x in zip(terms, node.inputs):
        for label, size in zip(einsum_labels(term, len(x.shape)), x.shape):
            sizes.setdefault(label, []).append(size)
    labels = einsum_labels(result, len(y.shape))
    if not sizes.keys() >= set(labels):
        return {}
    whole = [_repeated_to(sizes[label]) for label in labels]
    said = [(size, found) for size, found in zip(y.shape, whole) if isinstance(size, int) or size.value is not None]
    return {} if all(found is not None and same_dim(size, found) for size, found in said) else {y: ir.Shape(whole)}


def _forget_names(given: dict, node: ir.Node, found: dict[ir.Value, ir.Shape], graph: ir.Graph) -> None:
    """Take from what is given of all that follows from a node the names of sizes that its outputs have not got."""
    pairs = [pair for y, shape in found.items() for pair in zip(y.shape, shape)]
    names = {
        said.value for said, size in pairs if isinstance(said, ir.SymbolicDim) and not (size and same_dim(said, size))
    }
    for y in values_behind(node, graph):
        if names and given.get(y) is not None:
            sizes = given[y].dims
            given[y] = ir.Shape(
                [None if isinstance(size, ir.SymbolicDim) and size.value in names else size for size in sizes]
            )


def _repeated_to(sizes: list[int | ir.SymbolicDim]) -> int | ir.SymbolicDim | None:
    """What all of these become together; None where that is not known."""
    others = [size for size in sizes if size != 1] or [1]
    if all(same_dim(size, others[0]) for size in others):
        return others[0]
    return next((size for size in others if isinstance(size, int)), None)


_RIGHT_SIZES = {"Attention": _attention_sizes, "Einsum": _einsum_sizes}


@contextlib.contextmanager
def _unknown_to_onnx(model: ir.Model, nodes: Iterable[ir.Node]) -> Iterator[None]:
    """Keep nodes from ONNX's inference: of an operator that it does not know it leaves the outputs as they are."""
    for node in nodes:
        node.domain, model.opset_imports[_ASIDE] = _ASIDE, 1
    try:
        yield
    finally:
        for node in nodes:
            node.domain = ""
        model.opset_imports.pop(_ASIDE, None)


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
    """Whether onnx-ir warns of no failure, which is all that it does with one: whatever the program lets loggers tell."""
    logger = logging.getLogger(common.shape_inference.__name__)
    # Of outputs that nodes leave out, and of types that are not known yet, nothing is told.
    with mock.patch.object(logger, "warning") as warned, without_warnings("onnx_ir.serde"):
        inference(model)
    return not warned.called


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
