"""Bring a foreign model into the form that the driver reads.

Model-local functions are inlined, opsets below 18 are converted up (so that rules know one
form of each operator), operators without a rule are replaced by their ONNX function body,
every value gets its dtype and shape, and nodes are sorted and named.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.differentiate.definition import infer_by_definition
from orttrainer.differentiate.prepare.bodies import schema_of, with_function_bodies
from orttrainer.differentiate.prepare.loop_states import infer_loop_states
from orttrainer.differentiate.prepare.opsets import with_known_opset
from orttrainer.differentiate.prepare.ranks import infer_ranks
from orttrainer.graph.builder import Builder, infer_outputs
from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.names import free_name
from orttrainer.graph.passes.constant_branches import ConstantBranchesPass
from orttrainer.graph.passes.einsum_sizes import EinsumSizesPass
from orttrainer.graph.passes.gradient_marks import COTANGENT, CUSTOM_GRADIENT, STOP_GRADIENT
from orttrainer.graph.passes.gradient_marks import DOMAIN as MARKS
from orttrainer.graph.passes.loop_lists import StackLoopListsPass
from orttrainer.graph.passes.no_axes import NoAxesPass
from orttrainer.graph.passes.one_sided import OneSidedPass
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.passes.pool_sizes import PoolSizesPass
from orttrainer.graph.passes.sequences import ResolveSequencesPass

# Operators that have neither a schema nor a definition, or of which ONNX infers no shape; their outputs have dtype and shape
# of the first inputs.
LIKE_FIRST_INPUT = {("com.microsoft", op_type) for op_type in ("BiasGelu", "FastGelu", "Gelu", "Inverse", "QuickGelu")}
LIKE_FIRST_INPUT |= {("", "GroupNormalization"), ("", "MeanVarianceNormalization")}
LIKE_FIRST_INPUT |= {
    (MARKS, STOP_GRADIENT),
    (MARKS, COTANGENT),
    (MARKS, CUSTOM_GRADIENT),
}  # the last with as many outputs


def prepare(model: ir.Model) -> ir.Model:
    """Return `model` (changed in place where that suffices) ready to be differentiated.

    Raises:
        ModelError: an opset outside 12 to 28, or a model that ONNX cannot make sense of.
    """
    common.InlinePass()(model)
    OneSidedPass()(model)  # before ONNX infers shapes, which its converter does as well
    model = with_known_opset(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    model = with_function_bodies(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    ConstantBranchesPass()(model)
    _complete_loops(model)
    TopologicalOrderPass()(model)
    _correct_sizes(model)
    infer_shapes(model)
    if _infer_foreign(model.graph):
        infer_shapes(model)
    NoAxesPass()(model)
    if any([StackLoopListsPass()(model).modified, ResolveSequencesPass()(model).modified]):
        infer_shapes(model)
    infer_loop_states(model)
    loops = any(node.op_type == "Loop" for node in model.graph.all_nodes())
    unknown = _unknown_shapes(model)
    while loops:  # what one makes has a shape only here
        corrected = _correct_sizes(model)
        if _infer_foreign(model.graph):
            infer_shapes(model)
        before, unknown = unknown, _unknown_shapes(model)
        if not corrected and unknown >= before:
            break
        infer_loop_states(model)
    infer_ranks(model)
    _complete_types(model.graph)
    _name_nodes(model.graph)
    return model


def _correct_sizes(model: ir.Model) -> bool:
    """Rewrite what ONNX's inference takes for of other sizes than it is; whether there was any whose operands' sizes are known."""
    return any([PoolSizesPass()(model).modified, EinsumSizesPass()(model).modified])


def _unknown_shapes(model: ir.Model) -> int:
    return sum(y.shape is None for node in model.graph.all_nodes() for y in node.outputs)


def _infer_foreign(graph: ir.Graph) -> bool:
    """Type the outputs of operators that ONNX has no schema for, and what lies between them; whether there was any."""
    foreign = False
    for node in graph.all_nodes():
        y = node.outputs[0]
        if (node.domain, node.op_type) in LIKE_FIRST_INPUT:
            for x, y in zip(node.inputs, node.outputs):
                foreign, y.type, y.shape = True, x.type, x.shape and x.shape.copy()
        elif (schema := schema_of(node, graph.opset_imports)) is not None:
            if foreign and y.type is None and all(x is None or x.type is not None for x in node.inputs):
                infer_outputs(node, schema, graph.opset_imports)
        elif all(x is None or x.dtype is not None for x in node.inputs):
            foreign |= infer_by_definition(node, graph.opset_imports)
    return foreign


def _complete_loops(model: ir.Model) -> None:
    """Give a Loop without a condition one: the last input of a node may be left out, but a Loop has two."""
    for node in model.graph.all_nodes():
        if node.op_type == "Loop" and node.domain == "" and (len(node.inputs) < 2 or node.inputs[1] is None):
            node.resize_inputs(max(2, len(node.inputs)))
            node.replace_input_with(1, Builder(model.graph, "always").const(np.array(True)))


def _complete_types(graph: ir.Graph) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None and (value.type is None or value.shape is None):
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape)


def _name_nodes(graph: ir.Graph) -> None:
    nodes = list(graph.all_nodes())
    taken = {node.name for node in nodes}
    for index, node in enumerate(nodes):
        if not node.name:
            node.name = free_name(f"{node.op_type}_{index}", taken)  # exporters count nodes like this, too
            taken.add(node.name)
        for position, value in enumerate(node.outputs):
            if not value.name:
                value.name = f"{node.name}:{position}"
