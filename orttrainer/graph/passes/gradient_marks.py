"""Marks that say to the driver what a gradient is to be, and to the forward pass nothing.

`orttrainer::StopGradient` is the identity whose gradient is zero, for `detach` and what is like it. ONNX has no such
operator. `orttrainer::CustomGradient` is the identity whose gradient somebody wrote, for `torch.autograd.Function`:

    g, ... = Cotangent(y), ...
    y', ... = CustomGradient(y, ..., x, ..., dx, ..., g, ...)

where dx is what the graph makes of g, which stands for the gradient of y'. `orttrainer::Changed` is what forward left in the
memory of a trained parameter: the gradient of that is the parameter's. Exporters write them, the driver obeys, and
`RemoveGradientMarksPass` takes them out before anything is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import onnx_ir as ir

from orttrainer.graph.subgraphs import node_inputs, subgraphs

DOMAIN = "orttrainer"
STOP_GRADIENT = "StopGradient"
CUSTOM_GRADIENT = "CustomGradient"  # attribute "outputs": how many y
COTANGENT = "Cotangent"
CHANGED = "Changed"  # attribute "parameter": what forward wrote to, without a gradient


class CustomGradient(NamedTuple):
    """The inputs of such a node by what they are."""

    y: list[ir.Value]
    x: list[ir.Value]
    dx: list[ir.Value]
    g: list[ir.Value]

    @classmethod
    def of(cls, node: ir.Node) -> CustomGradient:
        count, inputs = node.attributes.get_int("outputs"), list(node.inputs)
        y, pairs, g = inputs[:count], inputs[count : len(inputs) - count], inputs[len(inputs) - count :]
        return cls(y, pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :], g)


def stop_gradients_at(model: ir.Model, values: Collection[ir.Value]) -> None:
    """Let all nodes that read one of `values`, each made by a node, read StopGradient of it; as an output of the graph it stays."""
    for x in values:
        stopped = ir.Value(name=f"{x.name}/stopped", type=x.type, shape=x.shape)
        for reader, index in list(x.uses()):
            reader.replace_input_with(index, stopped)
        node = x.producer()
        node.graph.insert_after(node, ir.Node(DOMAIN, STOP_GRADIENT, [x], outputs=[stopped], name=stopped.name))
    if values:
        model.opset_imports.setdefault(DOMAIN, 1)


def stops_as_identities(model: ir.Model, but: Collection[ir.Node] = ()) -> list[ir.Node]:
    """StopGradient -> Identity, which ONNX knows; the nodes."""
    marks = [node for node in _marks(model, STOP_GRADIENT) if node not in but]
    for node in marks:
        node.domain, node.op_type = "", "Identity"
    return marks


def identities_as_stops(model: ir.Model, outputs: Collection[str]) -> set[str]:
    """Identity -> StopGradient, of those with these outputs; the names of what was found."""
    identities = [node for node in model.graph.all_nodes() if node.domain == "" and node.op_type == "Identity"]
    found = {node.outputs[0].name: node for node in identities if node.outputs[0].name in outputs}
    for node in found.values():
        node.domain, node.op_type = DOMAIN, STOP_GRADIENT
    if found:
        model.opset_imports.setdefault(DOMAIN, 1)
    return {*found}


def stops_within_written(model: ir.Model) -> set[ir.Node]:
    """Where gradients stop within what has a gradient that somebody wrote: it would be none without that."""
    found: set[ir.Node] = set()
    for mark in map(CustomGradient.of, _marks(model, CUSTOM_GRADIENT)):
        values, seen = [*mark.y], {*mark.x}
        while values:
            if (value := values.pop()) not in seen and value is not None:
                seen.add(value)
                if (node := value.producer()) is not None:
                    found.add(node)
                    values += node_inputs(node)
    return found.intersection(_marks(model, STOP_GRADIENT))


def _marks(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.domain == DOMAIN and node.op_type == op_type]


@contextlib.contextmanager
def stops_known(model: ir.Model) -> Iterator[None]:
    """Within the block StopGradient is Identity, which ONNX's inference knows."""
    marks = stops_as_identities(model)
    try:
        yield
    finally:
        for node in marks:
            node.domain, node.op_type = DOMAIN, STOP_GRADIENT


def with_gradient(graph: ir.Graph, y: ir.Value, x: ir.Value, gradient: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Append CustomGradient(y), where `gradient` makes of the gradient of `y` that of `x`."""
    given, marked = (ir.Value(name=f"{y.name}/{name}", type=y.type, shape=y.shape) for name in ("cotangent", "marked"))
    graph.append(ir.Node(DOMAIN, COTANGENT, [y], outputs=[given], name=given.name))
    inputs = [y, x, gradient(given), given]
    graph.append(
        ir.Node(DOMAIN, CUSTOM_GRADIENT, inputs, [ir.AttrInt64("outputs", 1)], outputs=[marked], name=marked.name)
    )
    graph.opset_imports.setdefault(DOMAIN, 1)
    return marked


def pass_gradients_by(model: ir.Model, parameters: Collection[str]) -> None:
    """Changed(y) -> CustomGradient: the gradient of y is the parameter's as it is, for how y was made has none.

    Args:
        parameters: names of initializers; that of others takes its mark out.
    """
    for node in _marks(model, CHANGED):
        (y,), name = node.inputs, node.attributes.get_string("parameter")
        if name not in parameters:
            node.outputs[0].replace_all_uses_with(y, replace_graph_outputs=True)
            node.graph.remove(node, safe=True)
            continue
        given = ir.Value(name=f"{node.outputs[0].name}/cotangent", type=y.type, shape=y.shape)
        cotangent = ir.Node(DOMAIN, COTANGENT, [y], outputs=[given])
        inputs = [y, model.graph.initializers[name], given, given]
        mark = ir.Node(
            DOMAIN, CUSTOM_GRADIENT, inputs, [ir.AttrInt64("outputs", 1)], outputs=[marked := _like(node.outputs[0])]
        )
        node.graph.insert_before(node, [cotangent, mark])
        node.outputs[0].replace_all_uses_with(marked, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


def _like(value: ir.Value) -> ir.Value:
    """One that takes its place."""
    name, value.name = value.name, f"{value.name}/replaced"
    return ir.Value(name=name, type=value.type, shape=value.shape)


class RemoveGradientMarksPass(ir.passes.InPlacePass):
    """StopGradient(x) -> x; CustomGradient(y, ...) -> y, without what made the gradients only.

    Attributes:
        replaced: for each output of theirs what is in its place.
    """

    def __init__(self):
        self.replaced: dict[ir.Value, ir.Value] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        marks = [
            n for n in model.graph.all_nodes() if n.domain == DOMAIN and n.op_type in (STOP_GRADIENT, CUSTOM_GRADIENT)
        ]
        for node in marks:
            inputs = list(node.inputs)
            for x, y in zip(inputs, node.outputs):
                if y.is_graph_output():  # an output keeps its name and a node that makes it
                    identity = ir.Node("", "Identity", [x], num_outputs=1, name=y.name)
                    node.graph.insert_before(node, identity)
                    (x,) = identity.outputs
                    x.name, x.type, x.shape = y.name, y.type, y.shape
                    y.name = f"{y.name}/marked"
                y.replace_all_uses_with(x, replace_graph_outputs=True)
                self.replaced[y] = x
            node.graph.remove(node, safe=True)
            if node.op_type == CUSTOM_GRADIENT:
                _remove_unread(inputs)
        model.opset_imports.pop(DOMAIN, None)
        return ir.passes.PassResult(model, bool(marks))


def _remove_unread(values: list[ir.Value]) -> None:
    """Remove what made `values`, and what made that, as far as nobody reads it."""
    while values:
        value = values.pop()
        node = value.producer() if value is not None else None
        if node is None or node.graph is None or any(y.uses() or y.is_graph_output() for y in node.outputs):
            continue
        values.extend(node_inputs(node))
        for body in subgraphs(node):  # it would go on reading
            for inner in body.all_nodes():
                inner.resize_inputs(0)
            body.outputs.clear()
        node.graph.remove(node, safe=True)
