"""Decisions that are made when a graph is."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import take_place
from orttrainer.graph.names import free_name


class ConstantBranchesPass(ir.passes.InPlacePass):
    """If(True) -> its then_branch, in the place of it.

    ONNX Runtime does so when it loads a graph, and stops where it then finds an LSTM, GRU or RNN of the branch ("Argument type
    mismatch when adding edge", 1.31.1). To come where the initializers of branches are those of the graph.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        while (node := next(filter(_taken, model.graph.all_nodes()), None)) is not None:
            _put_in_place(node, _taken(node))
            modified = True
        return ir.passes.PassResult(model, modified)


def _taken(node: ir.Node) -> ir.Graph | None:
    """The branch that an If always takes, where its condition is known."""
    condition = node.inputs[0] if node.op_type == "If" and node.domain == "" else None
    known = None if condition is None or condition.is_graph_input() else ir.convenience.get_const_tensor(condition)
    if known is None or known.size != 1:
        return None
    return node.attributes["then_branch" if known.numpy().item() else "else_branch"].as_graph()


def _put_in_place(node: ir.Node, branch: ir.Graph) -> None:
    nodes, outputs = [*branch], [*branch.outputs]
    made = set(nodes)
    branch.outputs.clear()
    branch.remove(nodes)
    _name_apart(nodes, node.graph)
    node.graph.insert_before(node, nodes)
    results: list[ir.Value] = []
    for value in outputs:
        if value.producer() not in made or value in results:
            # What is made outside keeps its own name.
            value = ir.node("Identity", [value]).outputs[0]
            node.graph.insert_before(node, value.producer())
        results.append(value)
    take_place(results, node)


def _name_apart(nodes: list[ir.Node], graph: ir.Graph) -> None:
    """Two branches may have the same names within, of nodes those around them as well."""
    of_nodes = {node.name for node in graph}
    of_values = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    of_values.update(y.name for node in graph for y in node.outputs)
    for node in nodes:
        for named, taken in ((node, of_nodes), *((y, of_values) for y in node.outputs)):
            if named.name in taken and named.name:
                named.name = free_name(named.name, taken)
            taken.add(named.name)
