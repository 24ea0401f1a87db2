"""Gradients within a forward: nodes `orttrainer::Gradient` become what the rules make of the graph before them.

Such a gradient is a value as any other, so that the loss, and a second gradient, may depend on it: forces, the residual of
a differential equation, a gradient penalty.
"""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.driver import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.errors import ModelError
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.matmul import VectorMatMulPass
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

DOMAIN = "orttrainer"
GRADIENT = "Gradient"  # (y, ..., cotangent of y, ..., x, ...) -> gradient of x, ...; attribute "outputs": how many y
_WATCHED = "Watched"  # the identity that everybody reads an x through, so that no rewrite goes past it


def watch_inner_gradients(model: ir.Model) -> None:
    """Keep what gradients are asked for apart from what is made of it, whatever rewrites come."""
    for node in list(_gradients(model.graph)):
        _, _, sources = _parts(node)
        for x in dict.fromkeys(sources):
            if x.producer() is not None and _is(x.producer(), _WATCHED):
                continue
            watched = ir.Node(DOMAIN, _WATCHED, [x], num_outputs=1, name=f"{x.name}/watched")
            (y,) = watched.outputs
            y.name, y.type, y.shape = watched.name, x.type, x.shape
            for reader, place in [*x.uses()]:  # an output of the graph that it is keeps its name
                if reader is not watched:
                    reader.replace_input_with(place, y)
            producer = x.producer()
            if producer is None:
                model.graph.insert_before(model.graph[0], watched)
            else:
                model.graph.insert_after(producer, watched)
            model.graph.opset_imports.setdefault(DOMAIN, 1)


def asks_for_gradients(model: ir.Model) -> bool:
    """Whether forward asks for any."""
    return any(_is(node, GRADIENT) for node in model.graph.all_nodes())


def expand_inner_gradients(model: ir.Model) -> ir.Model:
    """Return `model` (changed in place where that suffices) with the gradients' own nodes in their place.

    Raises:
        MissingGradientError: an operator on the way has no rule.
        ModelError: a gradient is asked for within a branch or a loop.
    """
    for node in [node for node in model.graph if _is(node, _WATCHED)]:
        identity = ir.Node("", "Identity", node.inputs, outputs=None, num_outputs=1, name=node.name)
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [identity], node.outputs, identity.outputs)
    model = VectorMatMulPass()(prepare(model)).model
    graph = model.graph
    if any(_is(node, GRADIENT) and node.graph is not graph for node in graph.all_nodes()):
        raise ModelError("forward asks for a gradient within a branch or a loop; ask for it outside.")
    op = Builder(graph, "inner")
    _draw_masks_apart(op)
    while (node := next(_gradients(graph), None)) is not None:
        outputs, cotangents, sources = _parts(node)
        before = list(graph)[: list(graph).index(node)]
        found = differentiate(op, dict(zip(outputs, cotangents)), sources, before)
        for x, y in zip(sources, node.outputs):
            gradient = found[x] if found[x] is not None else op.zeros_like(x)
            if y.is_graph_output():  # it keeps its name and a node that makes it
                gradient, name = op.Identity(gradient), y.name
                y.name, gradient.name = f"{name}/asked", name
            y.replace_all_uses_with(gradient, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        graph.sort()
    RemoveUnusedNodesPass()(model)
    return model


def _draw_masks_apart(op: Builder) -> None:
    """Dropout(x) -> x * Dropout(1), so that a gradient has the same factor, whatever becomes of the operator."""
    for node in [node for node in op.graph if node.op_type == "Dropout" and not node.domain]:
        x, y = node.inputs[0], node.outputs[0]
        product = op.Mul(x, y)
        y.replace_all_uses_with(product, replace_graph_outputs=True)
        product.producer().replace_input_with(1, y)
        node.replace_input_with(0, op.full_like(x, 1.0))
        product.name, product.type, product.shape, y.name = y.name, y.type, y.shape, f"{y.name}/mask"
    op.graph.sort()


def _gradients(graph: ir.Graph):
    return (node for node in graph if _is(node, GRADIENT))


def _is(node: ir.Node, op_type: str) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, op_type)


def _parts(node: ir.Node) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
    """Outputs, their cotangents, and what the gradient is taken with respect to."""
    count, inputs = node.attributes.get_int("outputs"), list(node.inputs)
    return inputs[:count], inputs[count : 2 * count], inputs[2 * count :]
