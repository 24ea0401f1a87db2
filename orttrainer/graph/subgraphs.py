"""Subgraphs: the bodies of If, Scan and Loop, and the values that they read from outside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.logs import without_infos


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs among the attributes of a node."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()


def captured_values(node: ir.Node, read: Callable = operator.attrgetter("inputs")) -> list[ir.Value]:
    """The values from outside that the subgraphs of a node read, each once, in the order of their first use.

    Args:
        node: any node.
        read: of a node of a subgraph, the inputs that count.
    """
    found: dict[ir.Value, None] = {}
    for graph in subgraphs(node):
        own = {*graph.inputs, *graph.initializers.values()}
        for inner in graph:
            for x in (*read(inner), *captured_values(inner, read)):
                if x is not None and x not in own:
                    found[x] = None
            own.update(inner.outputs)
        found.update(dict.fromkeys(y for y in graph.outputs if y not in own))
    return list(found)


def node_inputs(node: ir.Node) -> list[ir.Value]:
    """The values that a node reads: its inputs, and what its subgraphs capture."""
    return [*(x for x in node.inputs if x is not None), *captured_values(node)]


def values_behind(node: ir.Node, graph: ir.Graph) -> list[ir.Value]:
    """The outputs of a node, and what is made of them, in bodies and around them as well."""
    owners = {body: owner for owner in graph.all_nodes() for body in subgraphs(owner)}
    found: dict[ir.Node, None] = {}
    stack = [node]
    while stack:
        if (reader := stack.pop()) in found:
            continue
        found[reader] = None
        stack.extend(use.node for y in reader.outputs for use in y.uses())
        stack.extend(inner for body in subgraphs(reader) for inner in body)
        if reader.graph in owners and any(y.is_graph_output() for y in reader.outputs):
            stack.append(owners[reader.graph])
    return [y for reader in found for y in reader.outputs]


def eliminate_identities(model: ir.Model) -> None:
    """Remove each Identity, unless there are subgraphs: there a branch may not return an outer value, nor a Scan one twice."""
    if not list(model.graph.subgraphs()):
        with without_infos(common.identity_elimination.__name__):
            common.IdentityEliminationPass()(model)


def lift_initializers(model: ir.Model) -> None:
    """Make initializers of the whole of those of bodies, under new names where theirs are taken."""
    for body in model.graph.subgraphs():
        for index, value in enumerate(body.outputs):
            if value.is_initializer():  # it stays where it is as long as it is an output
                copy = ir.node("Identity", [value])
                copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = (
                    f"{value.name}_out",
                    value.type,
                    value.shape,
                )
                body.append(copy)
                body.outputs[index] = copy.outputs[0]
    common.LiftSubgraphInitializersToMainGraphPass()(model)
