"""Gradients that somebody wrote: the backward of a `torch.autograd.Function`, which stands in the forward graph."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from orttrainer.differentiate.registry import non_differentiable, vjp
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.gradient_marks import COTANGENT, CUSTOM_GRADIENT, DOMAIN, CustomGradient
from orttrainer.graph.subgraphs import node_inputs, subgraphs

non_differentiable(COTANGENT, domain=DOMAIN)  # it stands for a value that comes from behind


@vjp(CUSTOM_GRADIENT, domain=DOMAIN)
def custom_gradient(op, node, *cotangents):
    """Y' = Y, with dX = f(G) where G stands for dY'  ->  dX = f(dY')."""
    parts = CustomGradient.of(node)
    given = [op.zeros_like(y) if dy is None else dy for y, dy in zip(parts.y, cotangents)]
    again = _computed_again(op, node, dict(zip(parts.g, given)), parts.dx)
    found = [op.cast_as(dx, x) for dx, x in zip(again, parts.x)]
    return [*(None for _ in parts.y), *found, *(None for _ in (*parts.dx, *parts.g))]


def _computed_again(
    op: Builder, node: ir.Node, instead: Mapping[ir.Value, ir.Value], wanted: Sequence[ir.Value]
) -> list[ir.Value]:
    """`wanted` by copies of the nodes that made them, as far as these read what has another `instead`."""
    reached, readers = set(instead), []
    for other in itertools.takewhile(lambda other: other is not node, op.graph):
        if not reached.isdisjoint(node_inputs(other)):
            reached.update(other.outputs)
            readers.append(other)
    read = set(wanted)
    for reader in reversed(readers):
        if not read.isdisjoint(reader.outputs):
            read.update(node_inputs(reader))
    new = dict(instead)
    for reader in readers:
        if not read.isdisjoint(reader.outputs):
            new.update(zip(reader.outputs, _copied(op, reader, new)))
    return [new.get(value, value) for value in wanted]


def _copied(op: Builder, node: ir.Node, new: Mapping[ir.Value, ir.Value]) -> Sequence[ir.Value]:
    """The outputs of a copy of `node` that reads what is new."""
    name = op.new_name(node.op_type)
    copy = ir.Node(
        node.domain, node.op_type, [new.get(x, x) for x in node.inputs],
        [_attribute(attribute, name, new) for attribute in node.attributes.values()],
        num_outputs=len(node.outputs), name=name, version=node.version, metadata_props=dict(node.metadata_props),
    )  # fmt: skip
    for index, (y, old) in enumerate(zip(copy.outputs, node.outputs)):
        y.name = f"{name}:{index}" if old.name else old.name
        y.type, y.shape = old.type, old.shape and old.shape.copy()
    op.graph.append(copy)
    return copy.outputs


def _attribute(attribute: ir.Attr, name: str, new: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    if attribute.type != ir.AttributeType.GRAPH:
        return attribute
    body = attribute.as_graph().clone(allow_outer_scope_values=True)
    body.name = f"{name}/{attribute.name}"
    for inner in _all_nodes(body):
        for index, x in enumerate(inner.inputs):
            if x in new:
                inner.replace_input_with(index, new[x])
        for y in inner.outputs:
            y.name = y.name and f"{body.name}/{y.name}"
    for index, y in enumerate(body.outputs):
        body.outputs[index] = new.get(y, y)
    return ir.AttrGraph(attribute.name, body)


def _all_nodes(graph: ir.Graph):
    for node in graph:
        yield node
        for inner in subgraphs(node):
            yield from _all_nodes(inner)
